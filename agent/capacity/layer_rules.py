"""Which cache each layer of a model keeps: rules by family, from the fields of its config.json."""

from __future__ import annotations

from math import gcd

from agent.capacity import families
from agent.capacity.fields import HIDDEN_NAMES, Fields, show
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, Confidence
from agent.capacity.reading import LayoutUnknown, Reading, missing
from agent.capacity.state_rules import state_of
from engine_shim.errors import SettingsError

HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
LISTED_HEADS = "num_query_heads"  # OpenELM's, a number for each layer
KV_HEAD_NAMES = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "num_attention_groups")
INDEXER_GROUP = 128  # fp8 keys of a sparse-attention indexer have one fp32 scale for so many


def caches_of_layers(
    model_type: str, top: Fields, text: Fields, layers: int, reading: Reading
) -> tuple[tuple[Cache, ...], ...]:
    """One tuple of caches for each of `layers` decoder layers."""
    if model_type in families.ENCODER_DECODER:
        return _encoder_decoder(text, layers)
    kinds = _kinds(model_type, text, layers, reading)
    if set(kinds) & {"state", "both"} and model_type not in families.STATEFUL:
        raise LayoutUnknown(f"layers of {model_type or 'this model'} keep a state, of a form that is not known here")
    latent = _latent(model_type, text, reading)
    may_attend = model_type not in ("mamba", "mamba2", "falcon_mamba")
    if not may_attend and set(kinds) != {"state"}:
        raise LayoutUnknown(f"the config of {model_type}, whose layers keep states alone, names layers of other kinds")
    heads = _need_heads(model_type, text, layers) if may_attend else None
    per_layer = _kv_heads_by_layer(model_type, text, layers, heads)
    shared_from = layers - (text.count("num_kv_shared_layers", least=0) or 0)
    if shared_from < 1:
        raise missing("num_kv_shared_layers", f"it leaves none of {layers} layers a cache to share")
    if shared_from < layers:
        reading.note(f"the last {layers - shared_from} layers share the cache of earlier ones and keep none")
    cross = text.indices("cross_attention_layers", layers) or frozenset()
    window = _window(text)
    chunk = text.count("attention_chunk_size")
    if "sliding" in kinds and window is None:
        raise missing("sliding_window", "the size of the window of its sliding layers")
    if "chunked" in kinds and chunk is None:
        raise missing("attention_chunk_size", "the size of its attention chunks")
    found: list[tuple[Cache, ...]] = []
    for index, kind in enumerate(kinds):
        caches: list[Cache] = []
        if kind in ("state", "both"):
            caches.append(state_of(model_type, text, reading))
        if kind not in ("state", "none") and index < shared_from and per_layer[index]:
            own = text.count_at(index, LISTED_HEADS) or heads
            if index in cross:
                caches.append(_attention(model_type, text, CacheKind.CROSS, own, per_layer[index], None, reading))
            elif latent:
                caches.extend(latent)
            else:
                attends = {"sliding": CacheKind.SLIDING, "chunked": CacheKind.CHUNKED}.get(kind, CacheKind.FULL)
                limit = window if attends is CacheKind.SLIDING else chunk if attends is CacheKind.CHUNKED else None
                caches.append(_attention(model_type, text, attends, own, per_layer[index], limit, reading))
        found.append(tuple(caches))
    if may_attend and not any(isinstance(one, AttentionCache) for kept in found for one in kept):
        reading.lower("low", f"by the config none of {layers} layers keeps keys and values, as models of this type do")
    return tuple(found)


def encoder_tokens(model_type: str, top: Fields, text: Fields, reading: Reading) -> int:
    """Tokens of the encoder that a cross-attention cache holds for each sequence."""
    if model_type in families.ENCODER_DECODER:
        found = text.count("max_source_positions")
        if found is None:
            found = text.count("max_position_embeddings", "n_positions") or 512
            reading.lower("medium", f"the config does not say how long the encoder's input may be: {found} is assumed")
        return found
    if "cross_attention_layers" not in text:
        return 0
    vision = top.section("vision_config")
    size, patch = (vision.count("image_size"), vision.count("patch_size")) if vision else (None, None)
    tiles = (vision.count("max_num_tiles") if vision else None) or 4
    if size is None or patch is None:
        reading.lower("medium", "no vision_config with image_size and patch_size: 1601 tokens for each of 4 tiles")
        return 1601 * tiles
    return ((size // patch) ** 2 + 1) * tiles


def _window(text: Fields) -> int | None:
    """Tokens of the sliding window; 0 in a file means none, as in Qwen2-MoE's."""
    return text.count("sliding_window", "sliding_window_size", least=0) or None


def attention_heads(model_type: str, text: Fields) -> int | None:
    """Query heads of the whole model; of layers that differ, the most heads that each has a multiple of."""
    listed = text.raw(LISTED_HEADS)
    if not isinstance(listed, list):
        return text.count(*HEAD_NAMES)
    return gcd(*(text.count_at(index, LISTED_HEADS) or 0 for index in range(len(listed)))) or None


def _need_heads(model_type: str, text: Fields, layers: int) -> int:
    listed = text.raw(LISTED_HEADS)
    if isinstance(listed, list) and len(listed) < layers:
        raise missing(LISTED_HEADS, f"{layers} whole numbers, one a layer, where it has {len(listed)}")
    heads = attention_heads(model_type, text)
    if heads is None:
        raise missing(HEAD_NAMES[0], "how many heads each layer has")
    return heads


def _kinds(model_type: str, text: Fields, layers: int, reading: Reading) -> list[str]:
    """`full`, `sliding`, `chunked`, `state`, `both` (state beside attention) or `none` for each layer."""
    listed = text.listed("layer_types", "layers_block_type")
    if listed is not None:
        if len(listed) < layers:
            raise missing("layer_types", f"{layers} entries, one a layer, where it has {len(listed)}")
        kinds = []
        for entry in listed[:layers]:
            word = entry.lower() if isinstance(entry, str) else ""
            if word in families.FULL_NAMES or (word == "indexed_attention" and model_type in families.LATENT):
                kinds.append("full")
            elif word in families.SLIDING_NAMES:
                kinds.append("sliding")
            elif word in families.CHUNKED_NAMES:
                kinds.append("chunked")
            elif word in families.STATE_NAMES:
                kinds.append("state")
            elif word == "hybrid":
                kinds.append("both")
            elif word in families.EMPTY_NAMES:
                kinds.append("none")
            else:
                raise LayoutUnknown(f"layer type {show(entry)} of {model_type or 'this model'} is not known here")
        return kinds
    if model_type in families.STATEFUL:
        return _stateful_kinds(model_type, text, layers)
    return _windowed_kinds(model_type, text, layers, reading)


def _stateful_kinds(model_type: str, text: Fields, layers: int) -> list[str]:
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    if model_type == "falcon_h1":
        return ["both"] * layers
    pattern = text.text("hybrid_override_pattern")
    if pattern is not None:
        words = {"M": "state", "*": "full", "-": "none", "E": "none"}
        if len(pattern) != layers or set(pattern) - set(words):
            raise missing("hybrid_override_pattern", f"{layers} letters of M, *, - and E, one a layer")
        return [words[letter] for letter in pattern]
    every = text.count("full_attention_interval")
    if every is not None:
        return ["full" if (index + 1) % every == 0 else "state" for index in range(layers)]
    period = text.count("attn_layer_period")
    if period is not None:
        offset = text.count("attn_layer_offset", least=0) or 0
        return ["full" if index % period == offset else "state" for index in range(layers)]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        chosen = text.indices(name, layers)
        if chosen is not None:
            return ["full" if index in chosen else "state" for index in range(layers)]
    hybrid = text.indices("hybrid_layer_ids", layers)
    if hybrid is not None:
        return ["both" if index in hybrid else "state" for index in range(layers)]
    attends = text.listed("attn_type_list")
    if attends is not None:
        if len(attends) < layers or any(entry not in (0, 1) for entry in attends):
            raise missing("attn_type_list", f"{layers} numbers 0 or 1, one a layer")
        return ["full" if entry == 1 else "state" for entry in attends[:layers]]
    linear = text.section("linear_attn_config")
    if linear is not None and (chosen := linear.indices("full_attn_layers", layers + 1, start=1)) is not None:
        return ["full" if index + 1 in chosen else "state" for index in range(layers)]
    raise LayoutUnknown(f"the config of {model_type} does not say which of its layers attend and which keep a state")


def _windowed_kinds(model_type: str, text: Fields, layers: int, reading: Reading) -> list[str]:
    attends = text.listed("attn_type_list")
    if attends is not None and any(entry != 1 for entry in attends):
        raise LayoutUnknown(f"attn_type_list of {model_type} has layers that are not full attention (1)")
    every: int | None
    if model_type in ("llama4", "llama4_text") and text.count("attention_chunk_size") is not None:
        rope = text.listed("no_rope_layers")
        if rope and (len(rope) < layers or any(entry not in (0, 1) for entry in rope)):
            raise missing("no_rope_layers", f"{layers} numbers 0 or 1, one a layer")
        every = text.count("no_rope_layer_interval") or 4
        uses = [bool(one) for one in rope] if rope else [(index + 1) % every != 0 for index in range(layers)]
        return ["chunked" if one else "full" for one in uses[:layers]]
    window = _window(text)
    if window is None:
        return ["full"] * layers
    if model_type in families.SWITCHED_WINDOW or "use_sliding_window" in text:
        if not text.truth("use_sliding_window", False):
            reading.note(f"sliding_window {window} is in the file and switched off (use_sliding_window): full")
            return ["full"] * layers
        first = text.count("max_window_layers", least=0) or 0
        return ["sliding" if index >= first else "full" for index in range(layers)]
    if model_type in families.EVERY_LAYER_SLIDES:
        return ["sliding"] * layers
    every = text.count("sliding_window_pattern", "_sliding_window_pattern") if not isinstance(
        text.raw("sliding_window_pattern"), str
    ) else None  # fmt: skip
    every = every or (2 if model_type in ("gemma2", "gpt_oss") else families.FULL_EVERY.get(model_type))
    if every is not None:
        return ["full" if (index + 1) % every == 0 else "sliding" for index in range(layers)]
    to: Confidence = "medium" if model_type in families.KNOWN else "low"
    reading.lower(to, f"sliding_window {window} without a list of layers: every layer is counted as full attention")
    return ["full"] * layers


def _latent(model_type: str, text: Fields, reading: Reading) -> tuple[AttentionCache, ...]:
    """The latent cache, and the indexer's beside it; empty where the model has none."""
    rank = text.count("kv_lora_rank")
    if rank is None:
        if model_type in families.LATENT:
            reading.lower("low", f"{model_type} without kv_lora_rank: counted as plain keys and values")
        return ()
    rope = text.count("qk_rope_head_dim", least=0)
    if rope is None:
        raise missing("qk_rope_head_dim", "the rotary part of its latent vector")
    if model_type not in families.LATENT:
        heads = attention_heads(model_type, text) or 0
        key = (text.count("qk_nope_head_dim", least=0) or 0) + rope
        value = text.count("v_head_dim") or key
        reading.lower(
            "low",
            f"kv_lora_rank is in the config and {model_type or 'this type'} is not known to use it: counted as MLA, "
            f"{rank + rope} elements a token and layer; an engine that keeps full heads needs {heads * (key + value)}",
        )
    caches = [AttentionCache(kind=CacheKind.MLA, kv_heads=1, key_dim=rank + rope, value_dim=0)]
    dim = text.count("index_head_dim")
    if dim is not None:
        size = dim + -(-dim // INDEXER_GROUP) * 4
        caches.append(
            AttentionCache(kind=CacheKind.INDEXER, kv_heads=1, key_dim=dim, value_dim=0, fixed_token_bytes=size)
        )
        reading.note(f"a sparse-attention indexer keeps {size} B a token and layer beside: fp8 keys, fp32 scales")
    return tuple(caches)


def _kv_heads_by_layer(model_type: str, text: Fields, layers: int, heads: int | None) -> list[int]:
    """KV heads of each layer; 0 where a layer has no attention of its own."""
    if heads is None:
        return [0] * layers
    blocks = text.listed("block_configs")
    if blocks is not None and model_type in ("nemotron-nas", "deci"):
        if len(blocks) < layers:
            raise missing("block_configs", f"{layers} entries, one a layer, where it has {len(blocks)}")
        return [_heads_of_block(block, heads) for block in blocks[:layers]]
    for name in ("num_key_value_heads_per_layer", "num_kv_heads", "num_key_value_heads"):
        found = text.raw(name)
        if isinstance(found, list):
            plain = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found)
            if len(found) < layers or not plain:
                raise missing(name, f"{layers} whole numbers, one a layer")
            return [int(one) for one in found[:layers]]
    return [_kv_heads(model_type, text, heads)] * layers


def _heads_of_block(block: object, heads: int) -> int:
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict) or attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    group = attention.get("n_heads_in_group")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise missing("block_configs[].attention.n_heads_in_group", "query heads for each KV head")
    return heads // group


def _kv_heads(model_type: str, text: Fields, heads: int) -> int:
    """KV heads of the whole model, by the names that families use for them."""
    if model_type == "falcon" and not text.truth("new_decoder_architecture", False):
        return 1 if text.truth("multi_query", True) else heads
    if model_type == "gpt_bigcode":
        return 1 if text.truth("multi_query", True) else heads
    if model_type == "chatglm":
        grouped = text.truth("multi_query_attention", False)
        return (text.count("multi_query_group_num") or 1) if grouped else heads
    section = text.section("attn_config")
    if section is not None and (found := section.count("kv_n_heads")) is not None:
        return found
    if section is not None and section.raw("attn_type") == "multiquery_attention":
        return 1
    return text.count(*KV_HEAD_NAMES) or heads


def _head_dim(model_type: str, text: Fields, heads: int, reading: Reading) -> int:
    """Elements of one head; what the file says wins over hidden size / heads."""
    hidden = text.count(*HIDDEN_NAMES)
    said = text.count("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head", "d_kv")
    if said is not None:
        if hidden is not None and hidden != said * heads and LISTED_HEADS not in text:
            note = f"head_dim {said} of the file is used; hidden size / heads would give {hidden / heads:g}"
            reading.note(note)
        return said
    if hidden is None:
        raise missing("hidden_size", "the head size follows from it")
    if hidden % heads:
        raise SettingsError(
            f"hidden_size={hidden} is no multiple of {heads} heads, and the config has no head_dim; add head_dim"
        )
    return hidden // heads


def _attention(
    model_type: str,
    text: Fields,
    kind: CacheKind,
    heads: int | None,
    kv_heads: int,
    window: int | None,
    reading: Reading,
) -> AttentionCache:
    if heads is None or heads % kv_heads:
        raise SettingsError(
            f"{heads} attention heads cannot share {kv_heads} KV heads; mend num_key_value_heads in the config"
        )
    dim = _head_dim(model_type, text, heads, reading)
    value_dim = dim
    if model_type in ("gemma4", "gemma4_text", "gemma4_unified") and kind is CacheKind.FULL:
        # Gemma 4's full layers have heads of their own; K equals V in the weights, and both are cached.
        dim = value_dim = text.count("global_head_dim") or dim
        kv_heads = text.count("num_global_key_value_heads") or kv_heads
    return AttentionCache(kind=kind, kv_heads=kv_heads, key_dim=dim, value_dim=value_dim, window=window)


def _encoder_decoder(text: Fields, layers: int) -> tuple[tuple[Cache, ...], ...]:
    """Each decoder layer attends to its own tokens and to the encoder's."""
    depth = text.count("decoder_layers", "num_decoder_layers") or layers
    heads = text.need("decoder_attention_heads", "num_heads", "num_attention_heads", why="heads of the decoder")
    dim = text.count("d_kv", "head_dim")
    if dim is None:
        width = text.need("d_model", "hidden_size", why="the head size follows from it")
        if width % heads:
            raise SettingsError(f"d_model={width} is no multiple of {heads} heads; mend the file, or give its d_kv")
        dim = width // heads
    own = AttentionCache(kind=CacheKind.FULL, kv_heads=heads, key_dim=dim, value_dim=dim)
    cross = AttentionCache(kind=CacheKind.CROSS, kv_heads=heads, key_dim=dim, value_dim=dim)
    return tuple((own, cross) for _ in range(depth))
