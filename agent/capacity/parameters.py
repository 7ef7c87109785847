"""Counts the weights of a model from its config.json: exact for the plain families, near for the others."""

from __future__ import annotations

from dataclasses import dataclass

from agent.capacity import families
from agent.capacity.fields import Fields
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, StateCache

BIASED = frozenset({"gpt2", "opt", "gpt_neox", "bloom", "phi", "gptj", "starcoder2", "gpt_bigcode"})
QKV_BIASED = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"})
NORMED_HEADS = frozenset({"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
EXPERT_NAMES = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Counted:
    """Weights of a whole model. `unquantized` are embeddings, output head and norms; `experts` those of experts."""

    total: int | None
    unquantized: int
    experts: int
    note: str


def count_parameters(model_type: str, text: Fields, layers: int, caches: tuple[tuple[Cache, ...], ...]) -> Counted:
    """Weights from the shapes that the config names; `total` is None where a shape is missing or not known."""
    hidden = text.count("hidden_size", "n_embd", "d_model", "dim")
    vocabulary = text.count("vocab_size", "padded_vocab_size", "n_vocab")
    heads = text.count("num_attention_heads", "n_head", "n_heads", "num_heads") or 0
    if hidden is None or vocabulary is None:
        return Counted(None, 0, 0, "the config has no vocab_size or hidden_size")
    tied = text.truth("tie_word_embeddings", model_type in families.TIED_BY_DEFAULT)
    embeddings = vocabulary * hidden * (1 if tied else 2) + _positions(model_type, text, hidden)
    if model_type in families.ENCODER_DECODER or model_type.startswith(("gemma3n", "gemma4")):
        return Counted(None, embeddings, 0, f"the weights of {model_type} are not counted from its config")
    if isinstance(text.raw(*EXPERT_NAMES), list):
        return Counted(None, embeddings, 0, "experts are listed layer by layer, and not counted")
    if model_type not in families.KNOWN:
        return Counted(None, embeddings, 0, f"the weights of model_type {model_type or '(none)'} are not counted")
    norm = hidden * (2 if model_type in BIASED or model_type == "falcon" else 1)
    norms = 4 if model_type in FOUR_NORMS else 2
    total = embeddings + norm
    kept, experts = total, 0
    for index, layer in enumerate(caches):
        mixing = sum(_mixer(model_type, text, hidden, heads, cache) for cache in layer)
        dense, sparse = _feed_forward(model_type, text, hidden, index, layer)
        if dense is None:
            return Counted(None, kept, 0, "the config has no intermediate_size, so its weights cannot be counted")
        total += mixing + dense + sparse + norms * norm
        kept += norms * norm
        experts += sparse
    near = "" if model_type in families.PLAIN else "; small vectors are left out"
    return Counted(total, kept, experts, f"counted from the config's shapes{near}")


def _positions(model_type: str, text: Fields, hidden: int) -> int:
    """Learned positions, which only old models have."""
    length = text.count("n_positions", "max_position_embeddings") or 0
    if model_type in ("gpt2", "gpt_bigcode"):
        return length * hidden
    return (length + 2) * hidden if model_type == "opt" else 0


def _mixer(model_type: str, text: Fields, hidden: int, heads: int, cache: Cache) -> int:
    """Weights of one attention or state layer."""
    if isinstance(cache, StateCache):
        return _state_mixer(hidden, cache)
    if cache.kind is CacheKind.MLA:
        return _latent_mixer(text, hidden, heads, cache)
    if cache.kind is CacheKind.INDEXER:
        index_heads = text.count("index_n_heads") or 64
        rank = text.count("q_lora_rank") or hidden
        return rank * index_heads * cache.key_dim + hidden * (cache.key_dim + index_heads)
    queries, keys = heads * cache.key_dim, cache.kv_heads * cache.key_dim
    values = cache.kv_heads * cache.value_dim
    gate = 2 if model_type in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text") else 1
    count = hidden * (gate * queries + keys + values) + heads * cache.value_dim * hidden
    if model_type in BIASED or model_type == "gpt_oss":
        count += queries + keys + values + hidden
    elif model_type in QKV_BIASED or text.truth("qkv_bias", False) or text.truth("add_qkv_bias", False):
        count += queries + keys + values
    elif model_type in NORMED_HEADS:
        count += 2 * cache.key_dim
    return count + (heads if model_type == "gpt_oss" else 0)


def _latent_mixer(text: Fields, hidden: int, heads: int, cache: AttentionCache) -> int:
    rope = text.count("qk_rope_head_dim", least=0) or 0
    nope, value = text.count("qk_nope_head_dim", least=0) or 0, text.count("v_head_dim") or 0
    rank, query_rank = cache.key_dim - rope, text.count("q_lora_rank")
    queries = heads * (nope + rope)
    count = query_rank * (hidden + queries + 1) if query_rank else hidden * queries
    return count + hidden * cache.key_dim + rank + rank * heads * (nope + value) + heads * value * hidden


def _state_mixer(hidden: int, cache: StateCache) -> int:
    if cache.family == "mamba1":
        rank = -(-hidden // 16)
        inner = cache.inner
        return inner * (3 * hidden + cache.kernel + 2 * (rank + cache.state) + cache.state + 3)
    if cache.family == "mamba2":
        width = cache.inner + 2 * cache.groups * cache.state
        return hidden * (2 * cache.inner + 2 * cache.groups * cache.state + cache.heads) + (
            width * (cache.kernel + 1) + cache.inner * (hidden + 1) + 3 * cache.heads
        )
    if cache.family in ("gated-delta", "kda"):
        keys, values = cache.key_heads * cache.key_dim, cache.heads * cache.head_dim
        return hidden * (2 * keys + 2 * values + 2 * cache.heads) + cache.kernel * (2 * keys + values) + values * hidden
    if cache.family == "linear":
        return hidden * 5 * cache.heads * cache.head_dim
    return hidden * 4 * cache.inner + cache.kernel * cache.inner


def _feed_forward(
    model_type: str, text: Fields, hidden: int, index: int, layer: tuple[Cache, ...]
) -> tuple[int | None, int]:
    """Weights of one layer outside and inside its experts; None where the config does not say how wide it is."""
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return 0, 0
    matrices = 2 if model_type in families.UNGATED_MLP else 3
    letter = ""
    if model_type == "nemotron_h":
        if layer:
            return 0, 0
        letter = (text.text("hybrid_override_pattern") or "")[index : index + 1]
    wide = _width(model_type, text, hidden)
    experts = _experts(text)
    if experts and (letter == "E" or (not letter and _is_sparse(model_type, text, index))):
        narrow = text.count("moe_intermediate_size", "expert_hidden_size") or wide
        if narrow is None:
            return None, 0
        inside = experts * matrices * hidden * narrow
        if model_type == "gpt_oss":
            inside += experts * (2 * narrow + hidden)
        shared = text.count("n_shared_experts", least=0) or 0
        shared_width = (
            text.count("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size") or shared * narrow
        )
        router = hidden * experts + (experts if model_type == "gpt_oss" else 0)
        gate = hidden if "shared_expert_intermediate_size" in text else 0
        if model_type.startswith("llama4"):
            shared_width = narrow
        return router + gate + matrices * hidden * shared_width, inside
    dense = text.count("intermediate_size_mlp") if model_type.startswith("llama4") else None
    wide = dense or wide
    if wide is None:
        return None, 0
    bias = (wide + hidden) if model_type in BIASED else 0
    return matrices * hidden * wide + bias, 0


def _width(model_type: str, text: Fields, hidden: int) -> int | None:
    found = text.count("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    if found is None and model_type in ("gpt2", "bloom", "falcon", "gpt_neox", "gptj", "gpt_bigcode"):
        return 4 * hidden
    if found is None and model_type == "mpt":
        return (text.count("expansion_ratio") or 4) * hidden
    return found


def _experts(text: Fields) -> int:
    found = text.count(*EXPERT_NAMES, least=0) or 0
    return found if found > 1 else 0


def _is_sparse(model_type: str, text: Fields, index: int) -> bool:
    if index < (text.count("first_k_dense_replace", least=0) or 0):
        return False
    if index in (text.listed("mlp_only_layers") or ()):
        return False
    period = text.count("expert_layer_period")
    if period is not None:
        return index % period == (text.count("expert_layer_offset", least=0) or 0)
    step = text.count("interleave_moe_layer_step", "decoder_sparse_step") or 1
    return (index + 1) % step == 0
