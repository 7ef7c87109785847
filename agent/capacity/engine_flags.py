"""How an option is switched on in each engine, and what it is known to cost in quality, with the source.

Flags were read in vLLM 0.32's own code and in the other projects' documentation; an empty text means that the engine
has no such setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an operator needs to know of one kind of change. `quality` is the cost in answers, `price` any other."""

    title: str
    vllm: str
    sglang: str = ""
    lmdeploy: str = ""
    ollama: str = ""
    quality: str
    source: str
    price: str = ""
    effort: (
        int  # 0 a flag without a cost, 1 a flag with one, 2 another checkpoint or a loss, 3 GPUs, 4 speed, 5 a model
    )

    @property
    def flags(self) -> dict[str, str | None]:
        """By engine; None where it has none."""
        found = {"vllm": self.vllm, "sglang": self.sglang, "lmdeploy": self.lmdeploy, "ollama": self.ollama}
        return {engine: text or None for engine, text in found.items()}


_SAME = "none: the same numbers are computed"
_ARITHMETIC = "by construction"
AWQ = "AWQ (arXiv 2306.00978): WikiText-2 perplexity of Llama-2-7B 5.47 → 5.60, of 70B 3.32 → 3.41, in groups of 128"
HALF_MILLION = (
    "“Give Me BF16 or Give Me Death?” (arXiv 2411.02355), over 500,000 evaluations of Llama-3.1: FP8 loses nothing "
    "measurable, INT8 1 to 3 %"
)
MEASURED = "docs/kv-quantisation.md (SmolLM2-135M, whose weights were Q4_1, on the Python language reference)"
KV_FP8 = (
    f"our measurement, {MEASURED}; vLLM's page on the quantized KV cache: accuracy close to 16 bits with calibrated "
    "scales, less with scales of 1; the “< 0.5 %” that goes round names no measurement"
)
KV_EIGHT = f"our measurement, {MEASURED}; 8 bits are half plus scales, not 37.5 %"
KV_LOW = (
    f"our measurement, {MEASURED}, without the rotation that vLLM does first; KIVI (arXiv 2402.02750): 4 bits hold up "
    "with scales for each channel of K and token of V, one scale a head and token is coarser; the “< 2 %” that goes "
    "round names no measurement"
)
GQA_PAPER = (
    "GQA (arXiv 2305.13245): close to MHA after uptraining with 5 % of the pre-training compute; MQA somewhat worse"
)

RECIPES: Mapping[str, Recipe] = {
    "kv-fp8": Recipe(
        title="KV cache in FP8",
        vllm="--kv-cache-dtype fp8",
        sglang="--kv-cache-dtype fp8_e4m3",
        lmdeploy="--backend pytorch --quant-policy fp8",
        ollama="OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 (8.5 bits)",
        quality="small with scales, more without: perplexity +0.8 % with one for each head and token of a small "
        "model, +1.3 % with a scale of 1, which is what the flag alone means",
        source=KV_FP8,
        price="a GPU or attention backend without fused FP8 attention decodes more slowly",
        effort=1,
    ),
    "kv-int8": Recipe(
        title="KV cache in INT8, a scale for each head and token",
        vllm="--kv-cache-dtype int8_per_token_head",
        lmdeploy="--quant-policy 8",
        ollama="OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 (8.5 bits)",
        quality="hardly to be measured: perplexity +0.1 % of a small model, KL 0.0009 nats a token",
        source=KV_EIGHT,
        effort=1,
    ),
    "kv-int4": Recipe(
        title="KV cache in INT4, a scale for each head and token",
        vllm="--kv-cache-dtype int4_per_token_head",
        lmdeploy="--quant-policy 4",
        ollama="OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q4_0 (4.5 bits)",
        quality="large where nothing else is done: perplexity +17.9 % of a small model, KL 0.15 nats a token; "
        "try your own tasks first",
        source=KV_LOW,
        effort=2,
    ),
    "weights-fp8": Recipe(
        title="weights in FP8",
        vllm="--quantization fp8",
        sglang="--quantization fp8",
        lmdeploy="lmdeploy lite blocked_fp8 MODEL",
        ollama="",
        quality="hardly to be measured",
        source=HALF_MILLION,
        price="fast where the GPU computes in FP8 (compute capability 8.9 and more), else weights alone are FP8",
        effort=1,
    ),
    "weights-int8": Recipe(
        title="weights in INT8",
        vllm="serve a W8A8 checkpoint (llm-compressor); it is recognised by its config",
        sglang="--quantization w8a8_int8",
        lmdeploy="lmdeploy lite smooth_quant MODEL",
        ollama="a tag with q8_0 (8.5 bits), or ollama create --quantize q8_0",
        quality="slight: 1 to 3 % where activations are 8 bits too",
        source=HALF_MILLION,
        effort=2,
    ),
    "weights-int4": Recipe(
        title="weights in INT4 (AWQ, groups of 128)",
        vllm="serve an AWQ or GPTQ checkpoint; it is recognised by its config (--quantization awq_marlin)",
        sglang="serve an AWQ or GPTQ checkpoint (--quantization awq_marlin)",
        lmdeploy="lmdeploy lite auto_awq MODEL --w-bits 4 --w-group-size 128, then --model-format awq",
        ollama="a tag with q4_K_M, or ollama create --quantize q4_K_M",
        quality="measurable",
        source=AWQ,
        price="faster for few sequences at once, slower for many: weights are unpacked at each step",
        effort=2,
    ),
    "shorter-length": Recipe(
        title="a shorter longest sequence",
        vllm="--max-model-len",
        sglang="--context-length",
        lmdeploy="--session-len",
        ollama="OLLAMA_CONTEXT_LENGTH or num_ctx",
        quality="none for requests that fit; longer ones are refused",
        source="by construction; the pool stays as large, so “halves the memory” is true of one sequence alone",
        effort=1,
    ),
    "fewer-sequences": Recipe(
        title="fewer sequences at once",
        vllm="--max-num-seqs",
        sglang="--max-running-requests",
        lmdeploy="--max-batch-size",
        ollama="OLLAMA_NUM_PARALLEL",
        quality=_SAME,
        source=_ARITHMETIC,
        price="requests wait at the door instead of being preempted half-way",
        effort=1,
    ),
    "fewer-in-flight": Recipe(
        title="fewer tokens in one step",
        vllm="--max-num-batched-tokens",
        sglang="--chunked-prefill-size",
        lmdeploy="--max-prefill-token-num",
        ollama="num_batch",
        quality=_SAME,
        source=_ARITHMETIC,
        price="long prompts take more steps: a later first token",
        effort=0,
    ),
    "utilization": Recipe(
        title="a larger share of the GPU",
        vllm="--gpu-memory-utilization",
        sglang="--mem-fraction-static",
        lmdeploy="--cache-max-entry-count (of what is free after the weights)",
        ollama="",
        quality=_SAME,
        source=_ARITHMETIC,
        price="less room for what the profiling run did not see: out-of-memory under load",
        effort=0,
    ),
    "headroom": Recipe(
        title="no blocks held back from new sequences",
        vllm="",
        quality=_SAME,
        source="10 to 20 % of the blocks are commonly advised",
        price="more preemptions when running sequences grow",
        effort=0,
    ),
    "block-size": Recipe(
        title="smaller blocks",
        vllm="--block-size",
        sglang="--page-size",
        lmdeploy="--cache-block-seq-len",
        ollama="",
        quality=_SAME,
        source="the last block of a sequence is half empty on average",
        price="longer block tables, and more descriptors where KV is transferred",
        effort=0,
    ),
    "hybrid-manager": Recipe(
        title="windowed layers that give back what they left behind",
        vllm="--no-disable-hybrid-kv-cache-manager",
        sglang="leave --disable-hybrid-swa-memory out",
        quality=_SAME,
        source="vLLM 0.32, vllm/v1/kv_cache_interface.py: SlidingWindowSpec",
        effort=0,
    ),
    "tensor-parallel": Recipe(
        title="twice as many GPUs in each tensor-parallel group",
        vllm="--tensor-parallel-size",
        sglang="--tp-size",
        lmdeploy="--tp",
        ollama="OLLAMA_SCHED_SPREAD=1",
        quality=_SAME,
        source=_ARITHMETIC,
        price="twice the GPUs, and two all-reduces a layer: wants NVLink",
        effort=3,
    ),
    "pipeline-parallel": Recipe(
        title="twice as many pipeline stages",
        vllm="--pipeline-parallel-size",
        sglang="--pp-size",
        quality=_SAME,
        source=_ARITHMETIC,
        price="twice the GPUs; no faster for one request, works over slow links",
        effort=3,
    ),
    "data-parallel": Recipe(
        title="a second replica",
        vllm="--data-parallel-size",
        sglang="--dp-size",
        lmdeploy="--dp",
        ollama="a second server",
        quality=_SAME,
        source=_ARITHMETIC,
        price="twice the GPUs; the weights are kept twice, and so are shared prefixes",
        effort=3,
    ),
    "weight-offload": Recipe(
        title="a quarter of the weights in host memory",
        vllm="--cpu-offload-gb",
        sglang="--cpu-offload-gb",
        ollama="num_gpu (layers on the GPU)",
        quality=_SAME,
        source=_ARITHMETIC,
        price="those weights cross PCIe at each step: decoding slows down by a multiple",
        effort=4,
    ),
    "kv-offload": Recipe(
        title="cached prefixes in host memory",
        vllm="--kv-offloading-size GIB --kv-offloading-backend native",
        sglang="--enable-hierarchical-cache --hicache-size GB",
        quality=_SAME,
        source="running sequences need their KV on the GPU; the host keeps prefixes that would be evicted",
        price="host memory and PCIe traffic",
        effort=1,
    ),
    "allocation-policy": Recipe(
        title="relocating allocation",
        vllm="KVATLAS_VLLM_ALLOCATION=relocating",
        quality=_SAME,
        source="docs/policies.md: fragmentation of a paged pool costs no memory",
        price="up to two block copies for each block that is allocated",
        effort=1,
    ),
    "gqa-model": Recipe(
        title="a model with eight query heads to a KV head",
        vllm="another model",
        sglang="another model",
        lmdeploy="another model",
        ollama="another model",
        quality="that of the other model",
        source=GQA_PAPER,
        price="choosing, testing and perhaps tuning another model",
        effort=5,
    ),
    "mla-model": Recipe(
        title="a model with latent attention (512 + 64 elements a layer)",
        vllm="another model",
        sglang="another model",
        lmdeploy="another model",
        ollama="another model",
        quality="that of the other model",
        source="DeepSeek-V2 (arXiv 2405.04434): MLA above MHA of the same size in its ablation",
        price="choosing and testing another model; the latent is kept whole on every tensor-parallel rank",
        effort=5,
    ),
}
