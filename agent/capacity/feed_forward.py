"""Counts the weights of feed-forward layers, dense ones and those of experts, from a model's config.json.

Names and rules are those of Transformers 5.19's model classes.
"""

from __future__ import annotations

from agent.capacity import families
from agent.capacity.fields import Fields
from agent.capacity.geometry import Cache

EXPERT_NAMES = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
WIDTH_NAMES = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERT_WIDTH_NAMES = ("moe_intermediate_size", "expert_hidden_size")
SHARED_NAMES = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert")
SHARED_WIDTH_NAMES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                      "shared_intermediate_size")  # fmt: skip
FIRST_SPARSE_NAMES = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_layer_num_skipped")
STEP_NAMES = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
LISTABLE_NAMES = (*WIDTH_NAMES, *EXPERT_WIDTH_NAMES, *SHARED_NAMES, "mlp_layer_types", "moe_layer_freq")
"""What some files give layer by layer."""

SHARED_BESIDE = frozenset({"granitemoeshared", "granitemoehybrid"})
"""Types whose shared MLP stands in every layer, whether it has experts or not."""
ROUTER_BIASED = frozenset({"gpt_oss", "ernie4_5_moe", "lfm2_moe"})


def feed_forward(
    model_type: str, text: Fields, hidden: int, index: int, layer: tuple[Cache, ...]
) -> tuple[int | None, int]:
    """Weights of one layer outside and inside its experts; None where the config does not say how wide it is."""
    if model_type in ("mamba", "mamba2", "falcon_mamba", "zamba2"):
        return 0, 0
    sparse = _experts(text) > 0
    if model_type == "nemotron_h":
        if layer:
            return 0, 0
        sparse = _is_nemotron_moe(text, index)
    elif sparse:
        sparse = _is_sparse(text, index)
    return _of_experts(model_type, text, hidden, index) if sparse else (_dense(model_type, text, hidden, index), 0)


def _dense(model_type: str, text: Fields, hidden: int, index: int) -> int | None:
    wide = text.count("intermediate_size_mlp") if model_type.startswith("llama4") else None
    if model_type in SHARED_BESIDE and not _experts(text):
        wide = text.count(*SHARED_WIDTH_NAMES, least=0)  # without experts the shared MLP is all there is
    wide = wide or _width(model_type, text, hidden, index)
    if wide is None:
        return None
    return _matrices(model_type) * hidden * wide + (wide + hidden if model_type in families.BIASED else 0)


def _of_experts(model_type: str, text: Fields, hidden: int, index: int) -> tuple[int | None, int]:
    narrow = text.count_at(index, *EXPERT_WIDTH_NAMES, least=0) or _width(model_type, text, hidden, index)
    if narrow is None:
        return None, 0
    experts, matrices = _experts(text), _matrices(model_type)
    # Nemotron-H's experts may see a narrower projection of the hidden state.
    latent = text.count("moe_latent_size", least=0) if model_type == "nemotron_h" else None
    inside = experts * matrices * (latent or hidden) * narrow
    if model_type == "gpt_oss":
        inside += experts * (2 * narrow + hidden)
    router = hidden * experts + (experts if model_type in ROUTER_BIASED else 0)
    gate = hidden if text.count("shared_expert_intermediate_size", least=0) else 0
    shared = matrices * hidden * _shared_width(model_type, text, index, narrow)
    return router + gate + shared + 2 * hidden * (latent or 0), inside


def _shared_width(model_type: str, text: Fields, index: int, narrow: int) -> int:
    """Width of the expert that every token passes; 0 where there is none."""
    if model_type.startswith("llama4"):
        return narrow
    named = text.count(*SHARED_WIDTH_NAMES, least=0)
    if named:
        return named
    shared = text.count_at(index, *SHARED_NAMES, least=0)
    if model_type == "hunyuan_v1_moe":
        if text.raw("use_mixed_mlp_moe") in (False, 0):
            return 0
        shared = 1 if shared is None else shared
    return (shared or 0) * narrow


def _matrices(model_type: str) -> int:
    return 2 if model_type in families.UNGATED_MLP else 3


def _width(model_type: str, text: Fields, hidden: int, index: int) -> int | None:
    found = text.count_at(index, *WIDTH_NAMES, least=0) or None
    if found is None and model_type in ("gpt2", "bloom", "falcon", "gpt_neox", "gptj", "gpt_bigcode"):
        return 4 * hidden
    if found is None and model_type == "mpt":
        return (text.count("expansion_ratio") or 4) * hidden
    return _adjusted(text) if model_type == "lfm2" else found


def _adjusted(text: Fields) -> int | None:
    """LFM2 narrows the width that its file names: 2/3 of it, rounded up (Transformers' Lfm2MLP)."""
    wide = text.count("block_ff_dim", "intermediate_size")
    if wide is None or not text.truth("block_auto_adjust_ff_dim", True):
        return wide
    factor, multiple = text.raw("block_ffn_dim_multiplier"), text.count("block_multiple_of") or 256
    narrowed = int(2 * wide / 3)
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < 100:
        narrowed = int(factor * narrowed)
    return -(-narrowed // multiple) * multiple


def _experts(text: Fields) -> int:
    found = text.count(*EXPERT_NAMES, least=0) or 0
    return found if found > 1 else 0


def _is_nemotron_moe(text: Fields, index: int) -> bool:
    """Each layer of Nemotron-H is a mixer, an MLP or experts, by a letter or by a word."""
    letters = text.text("hybrid_override_pattern")
    if letters is not None:
        return letters[index : index + 1] == "E"
    words = text.listed("layers_block_type", "layer_types") or ()
    return index < len(words) and words[index] == "moe"


def _is_sparse(text: Fields, index: int) -> bool:
    """Whether a layer of a model with experts has them."""
    kinds = text.listed("mlp_layer_types")
    if kinds is not None:
        return bool(kinds[index] == "sparse")
    if index < (text.count(*FIRST_SPARSE_NAMES, least=0) or 0):
        return False
    last = text.count("moe_layer_end_index", least=-1)
    if last is not None and 0 <= last < index:  # -1 is the last layer
        return False
    if index in (text.listed("mlp_only_layers") or ()):
        return False
    period = text.count("expert_layer_period")
    if period is not None:
        return index % period == (text.count("expert_layer_offset", least=0) or 0)
    frequency = text.raw("moe_layer_freq")
    if frequency is not None:
        every = text.count_at(index, "moe_layer_freq", least=0) or 0
        return every > 0 and (isinstance(frequency, list) or index % every == 0)
    step = text.count(*STEP_NAMES, least=0)
    return step is None or (step > 0 and (index + 1) % step == 0)
