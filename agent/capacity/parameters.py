"""Counts the weights of a model from its config.json: exact for the plain families, near for the others."""

from __future__ import annotations

from dataclasses import dataclass

from agent.capacity import families
from agent.capacity.feed_forward import EXPERT_NAMES, LISTABLE_NAMES, feed_forward
from agent.capacity.fields import HIDDEN_NAMES, Fields
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, StateCache

QKV_BIASED = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"})
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
ONE_NORM = frozenset({"falcon_mamba", "mamba", "mamba2", "nemotron_h", "zamba2"})
UNCOUNTED = families.ENCODER_DECODER | {"openelm"}
"""Known types whose layers differ in size, or take part in more than one stack: no formula here counts them."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Weights of a whole model. `unquantized` are embeddings, output head and norms; `experts` those of experts."""

    total: int | None
    unquantized: int
    experts: int
    note: str


def count_parameters(model_type: str, text: Fields, layers: int, caches: tuple[tuple[Cache, ...], ...]) -> Counted:
    """Weights from the shapes that the config names; `total` is None where a shape is missing or not known."""
    hidden = text.count(*HIDDEN_NAMES)
    vocabulary = text.count("vocab_size", "padded_vocab_size", "n_vocab")
    heads = text.count("num_attention_heads", "n_head", "n_heads", "num_heads") or 0
    if hidden is None or vocabulary is None:
        return Counted(None, 0, 0, "the config has no vocab_size or hidden_size")
    tied = is_tied(model_type, text)
    embeddings = vocabulary * hidden * (1 if tied else 2) + _positions(model_type, text, hidden)
    if model_type in UNCOUNTED or model_type.startswith(("gemma3n", "gemma4")):
        return Counted(None, embeddings, 0, f"the weights of {model_type} are not counted from its config")
    if isinstance(text.raw(*EXPERT_NAMES), list):
        return Counted(None, embeddings, 0, "experts are listed layer by layer, and not counted")
    for name in LISTABLE_NAMES:
        value = text.raw(name)
        if isinstance(value, list) and len(value) < layers:
            return Counted(None, embeddings, 0, f"{name} is listed for {len(value)} of {layers} layers: not counted")
    if model_type not in families.KNOWN:
        return Counted(None, embeddings, 0, f"the weights of model_type {model_type or '(none)'} are not counted")
    norm = hidden * (2 if model_type in families.BIASED or model_type == "falcon" else 1)
    norms = 4 if model_type in FOUR_NORMS else 1 if model_type in ONE_NORM else 2
    total = embeddings + norm
    kept, experts = total, 0
    for index, layer in enumerate(caches):
        mixing = sum(_mixer(model_type, text, hidden, heads, cache) for cache in layer)
        dense, sparse = feed_forward(model_type, text, hidden, index, layer)
        if dense is None:
            return Counted(None, kept, 0, "the config has no intermediate_size, so its weights cannot be counted")
        total += mixing + dense + sparse + norms * norm
        kept += norms * norm
        experts += sparse
    if model_type == "zamba2":
        total += _shared_blocks(text, hidden, heads, [one for layer in caches for one in layer])
    near = "" if model_type in families.PLAIN else "; small vectors are left out"
    return Counted(total, kept, experts, f"counted from the config's shapes{near}")


def is_tied(model_type: str, text: Fields) -> bool:
    """Whether the output head is the table of embeddings."""
    for name in ("tie_embedding", "tie_word_embeddings", "share_input_output_layers"):
        if name in text:
            return text.truth(name, False)
    return model_type in families.TIED_BY_DEFAULT


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
        rank = text.count("q_lora_rank", least=0) or hidden
        return rank * index_heads * cache.key_dim + hidden * (cache.key_dim + index_heads)
    if model_type == "zamba2":
        return hidden * hidden  # a layer's own; the blocks of attention are shared, and counted once
    queries, keys = heads * cache.key_dim, cache.kv_heads * cache.key_dim
    values = cache.kv_heads * cache.value_dim
    gate = 2 if model_type in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text") else 1
    count = hidden * (gate * queries + keys + values) + heads * cache.value_dim * hidden
    if model_type in families.BIASED or model_type == "gpt_oss":
        count += queries + keys + values + hidden
    elif model_type in QKV_BIASED or text.truth("qkv_bias", False) or text.truth("add_qkv_bias", False):
        count += queries + keys + values
    elif model_type in families.NORMED_HEADS:
        count += 2 * cache.key_dim
    return count + (heads if model_type == "gpt_oss" else 0)


def _shared_blocks(text: Fields, hidden: int, heads: int, caches: list[Cache]) -> int:
    """Zamba2's blocks of attention and MLP, which its hybrid layers take turns with, and the adapters of each layer.

    They see the hidden state beside the embedding, so their input is twice as wide (Transformers' Zamba2Attention).
    """
    attending = [one for one in caches if isinstance(one, AttentionCache)]
    if not attending:
        return 0
    wide, rank = text.count("intermediate_size") or 4 * hidden, text.count("adapter_rank") or 128
    dim = text.count("attention_head_dim") or 2 * hidden // max(1, heads)
    attention = 2 * hidden * dim * (heads + 2 * attending[0].kv_heads) + heads * dim * hidden
    adapter = rank * (hidden + 2 * wide)
    if text.truth("use_shared_attention_adapter", False):
        adapter += 3 * rank * 4 * hidden
    block = attention + 3 * hidden * wide + 3 * hidden
    return (text.count("num_mem_blocks") or 1) * block + len(attending) * adapter


def _latent_mixer(text: Fields, hidden: int, heads: int, cache: AttentionCache) -> int:
    rope = text.count("qk_rope_head_dim", least=0) or 0
    nope, value = text.count("qk_nope_head_dim", least=0) or 0, text.count("v_head_dim") or 0
    rank, query_rank = cache.key_dim - rope, text.count("q_lora_rank", least=0)
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
    if cache.family == "kda":
        # Its gates are of low rank, one of what is forgotten and one of the output (Transformers' KimiLinear).
        width = cache.heads * cache.head_dim
        gates = 2 * cache.head_dim * (hidden + width)
        small = cache.heads + width + cache.head_dim
        return hidden * (4 * width + cache.heads) + cache.kernel * 3 * width + gates + small
    if cache.family == "gated-delta":
        keys, values = cache.key_heads * cache.key_dim, cache.heads * cache.head_dim
        return hidden * (2 * keys + 2 * values + 2 * cache.heads) + cache.kernel * (2 * keys + values) + values * hidden
    if cache.family == "linear":
        return hidden * 5 * cache.heads * cache.head_dim
    return hidden * 4 * cache.inner + cache.kernel * cache.inner
