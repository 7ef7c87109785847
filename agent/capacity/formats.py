"""How many bytes a number takes: formats of KV caches and of weights, scales included, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from agent.capacity.fields import Fields
from agent.capacity.geometry import AttentionCache, CacheKind
from engine_shim.errors import SettingsError

DS_MLA_ELEMENTS = 576  # the latent vector that fp8_ds_mla is made for: 512 + 64 rotary
DS_MLA_BYTES = 656  # 512 fp8 + 4 fp32 scales + 64 bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """A KV cache dtype: `bits` for each element, and `vector_bytes` of scales for each head's K or V of one token."""

    name: str
    bits: Fraction
    vector_bytes: int = 0
    source: str

    def of_vector(self, elements: int) -> int:
        """Bytes of one head's K or V vector of one token."""
        return -((-elements * self.bits) // 8) + (self.vector_bytes if elements else 0)

    def of_token(self, cache: AttentionCache, tp: int) -> int:
        """Bytes of one token in one layer on one of `tp` ranks, as the engine reserves them."""
        if cache.fixed_token_bytes is not None:
            return cache.fixed_token_bytes
        if self.name == "fp8_ds_mla" and cache.kind is CacheKind.MLA:
            return DS_MLA_BYTES
        return cache.heads_on_rank(tp) * (self.of_vector(cache.key_dim) + self.of_vector(cache.value_dim))

    def words(self, cache: AttentionCache, tp: int) -> str:
        """The same as a product, for people."""
        if cache.fixed_token_bytes is not None or (self.name == "fp8_ds_mla" and cache.kind is CacheKind.MLA):
            return str(self.of_token(cache, tp))
        heads = cache.heads_on_rank(tp)
        size = f"{float(self.bits / 8):g} B"
        tail = f" (+ {self.vector_bytes} B a vector)" if self.vector_bytes else ""
        if cache.kind is CacheKind.MLA:
            return f"1 latent vector × {cache.key_dim} × {size}{tail}"
        if cache.key_dim == cache.value_dim:
            return f"2 (K, V) × {heads} KV heads × {cache.key_dim} × {size}{tail}"
        return f"{heads} KV heads × ({cache.key_dim} + {cache.value_dim}) × {size}{tail}"


VLLM = "vLLM 0.32, vllm/v1/kv_cache_interface.py"
PER_HEAD = "vLLM 0.32, v1/attention/backends/triton_attn.py: one fp32 scale beside each head's K and V of a token"
GGML = "llama.cpp, ggml/src/ggml-common.h: blocks of 32 with one fp16 scale"
KV_FORMATS: Mapping[str, KvFormat] = {
    one.name: one
    for one in (
        KvFormat(name="float16", bits=Fraction(16), source=VLLM),
        KvFormat(name="bfloat16", bits=Fraction(16), source=VLLM),
        KvFormat(name="float32", bits=Fraction(32), source=VLLM),
        KvFormat(name="fp8", bits=Fraction(8), source=VLLM + ": one scale a tensor"),
        KvFormat(name="fp8_per_token_head", bits=Fraction(8), vector_bytes=4, source=PER_HEAD),
        KvFormat(name="int8", bits=Fraction(8), vector_bytes=4, source=PER_HEAD),
        KvFormat(name="int4", bits=Fraction(4), vector_bytes=4, source=PER_HEAD),
        KvFormat(name="nvfp4", bits=Fraction(9, 2), source="vLLM 0.32, nvfp4_kv_cache_full_dim: one fp8 scale for 16"),
        KvFormat(name="fp8_ds_mla", bits=Fraction(8), source="vLLM 0.32, mla_attention.py: 656 B a token and layer"),
        KvFormat(name="q8_0", bits=Fraction(17, 2), source=GGML),
        KvFormat(name="q4_0", bits=Fraction(9, 2), source=GGML),
    )
}
KV_ALIASES = {
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
    "int4_group32": "q4_0",  # the reference engine's own name: an fp16 scale for 32 elements there too
    "int4_per_token_head": "int4",
}


def kv_format(name: str) -> KvFormat:
    """The KV format of that name; SettingsError lists the names."""
    wanted = name.lower().strip()
    found = KV_FORMATS.get(KV_ALIASES.get(wanted, wanted))
    if found is None:
        raise SettingsError(f"kv dtype {name!r} is not known; use auto, {', '.join((*KV_FORMATS, *KV_ALIASES))}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A weight format: `bits` for each quantized weight, scales and zeros included.

    `keeps` says what stays in 16 bits: embeddings, output head and norms ("embeddings"), everything but the experts
    ("all but experts"), or nothing.
    """

    name: str
    bits: Fraction
    keeps: str = "embeddings"
    arithmetic: str
    source: str

    @property
    def plain(self) -> bool:
        """Whether it is no quantization at all."""
        return self.bits >= 16

    def kept_bytes(self, embeddings: int) -> int:
        """Bytes of so many weights of embeddings, head and norms, in 16 bits where the format leaves them alone."""
        bits = self.bits if self.plain or self.keeps == "nothing" else Fraction(16)
        return -((-embeddings * bits) // 8)

    def bytes_of(self, total: int, embeddings: int, experts: int) -> int:
        """Bytes of `total` weights, of which `embeddings` are embeddings, head and norms and `experts` of experts."""
        if self.plain or self.keeps == "nothing":
            return -((-total * self.bits) // 8)
        quantized = experts if self.keeps == "all but experts" else total - embeddings
        return -((-quantized * self.bits) // 8) + 2 * (total - quantized)


def _grouped(kind: str, bits: int, group: int) -> WeightFormat:
    """A group of weights shares a 16-bit scale and a zero point as wide as a weight."""
    total = Fraction(bits) + Fraction(16 + bits, group)
    return WeightFormat(
        name=f"{kind}-{bits}-g{group}",
        bits=total,
        arithmetic=f"{bits} + (16 scale + {bits} zero) / {group} = {float(total):g} bits",
        source=f"{kind.upper()} checkpoints: qweight, scales (fp16) and qzeros for groups of {group}",
    )


def _plain(name: str, bits: int) -> WeightFormat:
    return WeightFormat(name=name, bits=Fraction(bits), keeps="nothing", arithmetic=f"{bits} bits", source="IEEE types")


def _gguf(name: str, bits: Fraction, arithmetic: str) -> WeightFormat:
    return WeightFormat(
        name=name, bits=bits, keeps="nothing", arithmetic=arithmetic, source="llama.cpp, ggml/src/ggml-common.h"
    )


def _mixture(name: str, bits: str) -> WeightFormat:
    return WeightFormat(
        name=name,
        bits=Fraction(bits),
        keeps="nothing",
        arithmetic=f"{bits} bits on average over a whole file of Llama-3.1-8B",
        source="llama.cpp, tools/quantize/README.md (table of Llama-3.1-8B); other models differ by some per cent",
    )


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    one.name: one
    for one in (
        _plain("float32", 32),
        _plain("float16", 16),
        _plain("bfloat16", 16),
        WeightFormat(
            name="fp8",
            bits=8 + Fraction(32, 128 * 128),
            arithmetic="8 + 32 (fp32 scale) / (128 × 128) = 8.00195 bits",
            source="DeepSeek-V3's block scales; a scale for each tensor or channel is smaller still",
        ),
        WeightFormat(
            name="int8",
            bits=8 + Fraction(32, 4096),
            arithmetic="8 + 32 (fp32 scale) / 4096 inputs of a row = 8.0078 bits",
            source="W8A8 with a scale for each output channel, as compressed-tensors stores it",
        ),
        _grouped("awq", 4, 128),
        _grouped("gptq", 4, 128),
        WeightFormat(
            name="nf4",
            bits=4 + Fraction(8, 64) + Fraction(32, 64 * 256),
            arithmetic="4 + 8/64 + 32/(64 × 256) = 4.127 bits (double quantization)",
            source="bitsandbytes: absmax for blocks of 64, itself 8 bits in blocks of 256",
        ),
        WeightFormat(
            name="mxfp4",
            bits=Fraction(17, 4),
            keeps="all but experts",
            arithmetic="4 + 8 (scale) / 32 = 4.25 bits, experts alone",
            source="OCP microscaling formats 1.0, as gpt-oss stores its experts",
        ),
        WeightFormat(
            name="nvfp4",
            bits=Fraction(9, 2),
            arithmetic="4 + 8 (fp8 scale) / 16 = 4.5 bits",
            source="ModelOpt's NVFP4: one e4m3 scale for 16 weights",
        ),
        _gguf("q2_k", Fraction(21, 8), "84 B for 256 = 2.625 bits"),
        _gguf("q3_k", Fraction(55, 16), "110 B for 256 = 3.4375 bits"),
        _gguf("q4_0", Fraction(9, 2), "18 B for 32 (fp16 scale + 16 B) = 4.5 bits"),
        _gguf("q4_1", Fraction(5), "20 B for 32 (fp16 scale and minimum + 16 B) = 5 bits"),
        _gguf("q4_k", Fraction(9, 2), "144 B for 256 = 4.5 bits"),
        _gguf("q5_0", Fraction(11, 2), "22 B for 32 = 5.5 bits"),
        _gguf("q5_1", Fraction(6), "24 B for 32 = 6 bits"),
        _gguf("q5_k", Fraction(11, 2), "176 B for 256 = 5.5 bits"),
        _gguf("q6_k", Fraction(105, 16), "210 B for 256 = 6.5625 bits"),
        _gguf("q8_0", Fraction(17, 2), "34 B for 32 = 8.5 bits"),
        _mixture("q4_k_s", "4.6672"),
        _mixture("q4_k_m", "4.8944"),
        _mixture("q5_k_m", "5.7036"),
    )
}
WEIGHT_ALIASES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "int4": "awq-4-g128",
    "awq": "awq-4-g128",
    "gptq": "gptq-4-g128",
    "gguf": "q4_k_m",
    "w8a8": "int8",
    "bitsandbytes": "nf4",
}
GROUPED_BITS = (2, 3, 4, 8)
LEAST_GROUP, MOST_GROUP = 8, 8192
_GROUPED_NAME = re.compile(r"(awq|gptq)(?:-(\d))?(?:-g(\d+))?")


def weight_format(name: str) -> WeightFormat:
    """The weight format of that name, `awq-4-g64` and the like included; SettingsError lists the names."""
    wanted = name.lower().strip()
    found = WEIGHT_FORMATS.get(WEIGHT_ALIASES.get(wanted, wanted))
    if found is not None:
        return found
    grouped = _GROUPED_NAME.fullmatch(wanted)
    if grouped:
        bits, group = int(grouped[2] or 4), int(grouped[3] or 128)
        if bits in GROUPED_BITS and LEAST_GROUP <= group <= MOST_GROUP:
            return _grouped(grouped[1], bits, group)
    raise SettingsError(
        f"weight dtype {name!r} is not known; use auto, {', '.join((*WEIGHT_FORMATS, *WEIGHT_ALIASES))}, "
        "or awq-BITS-gGROUP and gptq-BITS-gGROUP"
    )


def format_of_file(quantization: Fields | None, dtype: str) -> str | None:
    """The weight format that a checkpoint's quantization_config names: `dtype` without one, None for one not known."""
    if quantization is None:
        return dtype
    method = (quantization.text("quant_method") or "").lower().replace("_", "-")
    if method in ("awq", "gptq"):
        bits = quantization.count("bits", "w_bit", "num_bits", least=0)
        return _known_group(
            method, 4 if bits is None else bits, quantization.count("group_size", "q_group_size", least=-1)
        )
    if method in ("modelopt", "modelopt-fp4"):
        return _modelopt(method, quantization)
    if method == "bitsandbytes":
        return "nf4" if quantization.raw("load_in_4bit") is True else "int8"
    if method == "compressed-tensors":
        return _compressed(quantization)
    return {"fp8": "fp8", "fbgemm-fp8": "fp8", "mxfp4": "mxfp4"}.get(method)


def _modelopt(method: str, quantization: Fields) -> str | None:
    """ModelOpt names an algorithm, as hf_quant_config.json does one level down; several have 4 bits and no format here
    (W4A16_AWQ, MXFP4), and MIXED_PRECISION differs by layer."""
    inner = quantization.section("quantization")
    named = quantization.text("quant_algo") or (inner.text("quant_algo") if inner else None)
    algorithm = (named or ("NVFP4" if method == "modelopt-fp4" else "")).upper()
    if "NVFP4" in algorithm:
        return "nvfp4"
    return "fp8" if algorithm.startswith("FP8") else None


def _known_group(method: str, bits: int, group: int | None) -> str | None:
    """The format's name; None for bits or a group that it does not come in. -1 is a scale for a whole channel."""
    size = 128 if group is None or group == -1 else group
    known = bits in GROUPED_BITS and LEAST_GROUP <= size <= MOST_GROUP
    return f"{method}-{bits}-g{size}" if known else None


def _compressed(quantization: Fields) -> str | None:
    """compressed-tensors names bits, kind and group size for groups of layers; the first group decides."""
    groups = quantization.section("config_groups")
    if groups is None or not groups.names:
        return None
    first = groups.section(groups.names[0])
    weights = first.section("weights") if first else None
    if weights is None:
        return None
    bits, kind = weights.count("num_bits"), weights.text("type")
    if bits == 8:
        return "fp8" if kind == "float" else "int8"
    if bits == 4 and kind == "float":
        return "nvfp4"
    return None if bits is None else _known_group("gptq", bits, weights.count("group_size", least=-1))
