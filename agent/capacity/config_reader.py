"""From a model's config.json to its geometry. Pure: it is given the parsed file and reads nothing.

Rules follow Transformers' configuration classes and vLLM 0.32's models; what a file leaves open is said in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.capacity import families, layer_rules
from agent.capacity.feed_forward import WIDTH_NAMES
from agent.capacity.fields import HIDDEN_NAMES, LAYER_NAMES, Fields, printable, rival_sections, text_section
from agent.capacity.formats import format_of_file
from agent.capacity.geometry import ModelGeometry
from agent.capacity.parameters import count_parameters, is_tied
from agent.capacity.reading import LayoutUnknown, Reading, missing

MAX_LAYERS = 2048
SIXTEEN_BIT = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
                "max_target_positions", "max_sequence_length", "max_seq_length", "n_ctx",
                "max_context_length")  # fmt: skip


def read_geometry(config: Mapping[str, Any], name: str | None = None) -> ModelGeometry:
    """The geometry of the model that `config`, a parsed config.json, describes.

    Raises SettingsError where a field that is needed is missing or no number, LayoutUnknown where the layout is none
    that is known here.
    """
    top, text = Fields(config), text_section(config)
    model_type = text.text("model_type") or top.text("model_type") or ""
    reading = Reading()
    called = name or top.text("_name_or_path", "name_or_path") or model_type or "model"
    rivals = rival_sections(config)
    if rivals:
        reading.lower(
            "low", f"the config has {len(rivals)} language models ({', '.join(rivals)}): the first is counted"
        )
    architectures = [str(one) for one in top.listed("architectures") or ()]
    if _encodes_only(model_type, architectures):
        return _without_cache(top, text, called, model_type)
    _judge_type(model_type, text, reading)
    layers = text.count(*LAYER_NAMES)
    if layers is None and model_type == "nemotron_h":  # Transformers 5 saves its list of layers alone
        layers = len(text.listed("layers_block_type") or ()) or None
    if layers is None:
        raise missing(LAYER_NAMES[0], f"how many layers it has; also read as {', '.join(LAYER_NAMES[1:])}")
    if layers > MAX_LAYERS:
        raise missing(LAYER_NAMES[0], f"it says {layers}, and no model has more than {MAX_LAYERS}")
    caches = layer_rules.caches_of_layers(model_type, top, text, layers, reading)
    encoder_tokens = layer_rules.encoder_tokens(model_type, top, text, reading)
    dtype, dtype_note = _dtype(top, text)
    quantization = _quantization(top) or _quantization(text)
    weight_format = format_of_file(quantization, dtype)
    if weight_format is None and quantization is not None:
        reading.warnings.append(
            f"quant_method {quantization.text('quant_method') or '(none)'} is not known here in the form that the "
            "config has: weights are counted in 16 bits; give --weight-dtype or --weights-memory"
        )
    towers = [name for name in ("vision_config", "audio_config") if name in top and text is not top]
    if any(top.section(name) is not None for name in towers):
        reading.note(f"the weights of the model's {' and '.join(name.removesuffix('_config') for name in towers)} part "
                     "are not counted: give --weights-memory where they matter")  # fmt: skip
    counted = count_parameters(model_type, text, layers, caches)
    heads = layer_rules.attention_heads(model_type, text) or 0
    draft = text.count("num_nextn_predict_layers", "mtp_num_hidden_layers", least=0) or 0
    if draft:
        reading.note(
            f"{draft} multi-token prediction layer(s) in the file: they keep keys and values only with speculative "
            f"decoding, then {draft}/{layers} more"
        )
    return ModelGeometry(
        name=called,
        model_type=model_type,
        layers=caches,
        attention_heads=heads,
        hidden_size=text.count(*HIDDEN_NAMES) or 0,
        vocab_size=text.count("vocab_size", "padded_vocab_size", "n_vocab"),
        max_position=text.count(*LENGTH_NAMES),
        dtype=dtype,
        dtype_note=dtype_note,
        weight_format=weight_format or dtype,
        kv_scheme=_kv_scheme(quantization),
        parameters=counted.total,
        embedding_parameters=counted.unquantized,
        expert_parameters=counted.experts,
        tied_embeddings=is_tied(model_type, text),
        parameters_note=counted.note,
        intermediate_size=text.largest(*WIDTH_NAMES),
        encoder_tokens=encoder_tokens,
        draft_layers=draft,
        no_cache_reason=None,
        confidence=reading.confidence,
        notes=tuple(reading.notes),
        warnings=tuple(reading.warnings),
    )


def _quantization(fields: Fields) -> Fields | None:
    for name in ("quantization_config", "compression_config"):
        if name in fields:
            found = fields.section(name)
            if found is None:
                raise missing(name, "an object that names quant_method")
            return found
    return None


def _encodes_only(model_type: str, architectures: list[str]) -> bool:
    if model_type in families.ENCODERS:
        return True
    return any(one.endswith(("ForMaskedLM", "ForSequenceClassification")) for one in architectures) and (
        model_type not in families.KNOWN
    )


def _judge_type(model_type: str, text: Fields, reading: Reading) -> None:
    """Refuse what is surely counted wrong, lower the confidence of what may be."""
    handled = {"num_kv_shared_layers", "kv_lora_rank", "q_lora_rank", "index_head_dim", "index_topk", "index_n_heads"}
    foreign = [
        name for name in text.names
        if name not in handled and any(word in name.lower() for word in families.FOREIGN_WORDS)
    ]  # fmt: skip
    if "compress_ratios" in text:
        raise LayoutUnknown(
            f"{model_type or 'this model'} keeps compressed caches (compress_ratios), which no formula here counts; "
            "take the bytes per block from the engine's own log"
        )
    if not model_type:
        reading.lower("low", "the config has no model_type: its numbers are read as those of a plain decoder")
    if model_type in families.STATEFUL or model_type in families.LATENT:
        return
    if model_type not in families.KNOWN:
        if any(word in model_type for word in families.FOREIGN_WORDS):
            raise LayoutUnknown(
                f"model_type {model_type} keeps something other than keys and values, which no formula here counts; "
                "take the bytes per block from the engine's own log"
            )
        if foreign:
            raise LayoutUnknown(
                f"model_type {model_type or '(none)'} is not known here, and "
                f"{printable(', '.join(sorted(foreign)[:4]))} in its config speaks of a cache other than "
                "keys and values; take the bytes per block from the engine's log"
            )
        if model_type:
            reading.lower(
                "low",
                f"model_type {model_type} is not known: read as a plain decoder with keys and values in each layer",
            )
    elif foreign:
        names = printable(", ".join(sorted(foreign)[:4]))
        reading.lower("low", f"{names} in the config is not known for {model_type}: its layers may keep something else")


def _without_cache(top: Fields, text: Fields, name: str, model_type: str) -> ModelGeometry:
    dtype, note = _dtype(top, text)
    return ModelGeometry(
        name=name,
        model_type=model_type,
        layers=(),
        attention_heads=text.count("num_attention_heads") or 0,
        hidden_size=text.count("hidden_size") or 0,
        vocab_size=text.count("vocab_size"),
        max_position=text.count(*LENGTH_NAMES),
        dtype=dtype,
        dtype_note=note,
        weight_format=dtype,
        kv_scheme=None,
        parameters=None,
        embedding_parameters=0,
        expert_parameters=0,
        tied_embeddings=False,
        parameters_note="not counted",
        intermediate_size=None,
        encoder_tokens=0,
        draft_layers=0,
        no_cache_reason=f"{model_type or name} is an encoder: it makes all its tokens at once and keeps no KV cache",
        confidence="refused",
        notes=(),
        warnings=(),
    )


def _dtype(top: Fields, text: Fields) -> tuple[str, str]:
    """The 16-bit type that an engine would run in, and a note where the file says another or none."""
    found = text.text("torch_dtype", "dtype") or top.text("torch_dtype", "dtype")
    given = found.removeprefix("torch.") if found is not None else None
    if given is None:
        return "float16", "the config names no dtype: float16 is assumed"
    if given in SIXTEEN_BIT:
        return SIXTEEN_BIT[given], ""
    if given == "float32":
        return "bfloat16", "the config says float32, which engines cast down to 16 bits: bfloat16 is assumed"
    return "bfloat16", f"the config says {given}: bfloat16 is assumed for what is not quantized"


def _kv_scheme(quantization: Fields | None) -> str | None:
    """What `--kv-cache-dtype auto` resolves to where a checkpoint brings scales for its KV cache."""
    if quantization is None:
        return None
    scheme = quantization.section("kv_cache_scheme")
    if scheme is not None:
        bits, kind = scheme.count("num_bits"), scheme.text("type")
        if bits == 8 and kind in (None, "float"):
            return "fp8"
        return "int8" if bits == 8 else None
    inner = quantization.section("quantization")
    algorithm = quantization.text("kv_cache_quant_algo") or (inner.text("kv_cache_quant_algo") if inner else None)
    return {"FP8": "fp8", "NVFP4": "nvfp4"}.get((algorithm or "").upper())
