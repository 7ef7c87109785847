"""`kvatlas plan`: what a model keeps in memory, what fits, and with --advise what to change."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agent.capacity.reading import LayoutUnknown
from agent.capacity.request import answer, load_model, plan_settings
from agent.capacity.words import refusal, render, render_advice

EXIT_FAILED = 1


def _option(variable: str, help: str, *names: str) -> Any:
    return typer.Option(*names, envvar=variable, help=help)


def plan(
    config: Annotated[str, typer.Argument(help="A model's config.json, its folder, or a preset (llama-3.1-8b).")],
    gpu: Annotated[str | None, _option("KVATLAS_PLAN_GPU", "A card by name, such as A100-80GB.")] = None,
    gpu_memory: Annotated[
        float | None, _option("KVATLAS_PLAN_GPU_MEMORY", "GiB of one GPU, in place of a card's.")
    ] = None,
    tp: Annotated[int | None, _option("KVATLAS_PLAN_TP", "Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, _option("KVATLAS_PLAN_PP", "Pipeline stages.")] = None,
    dp: Annotated[int | None, _option("KVATLAS_PLAN_DP", "Data-parallel replicas.")] = None,
    weight_dtype: Annotated[
        str | None, _option("KVATLAS_PLAN_WEIGHT_DTYPE", "fp16, fp8, int8, awq, gptq, q4_k_m, ...")
    ] = None,
    kv_dtype: Annotated[
        str | None, _option("KVATLAS_PLAN_KV_DTYPE", "fp16, fp8, int8, int4, ...; auto by default.")
    ] = None,
    block_size: Annotated[int | None, _option("KVATLAS_PLAN_BLOCK_SIZE", "Tokens in a block; 16 by default.")] = None,
    max_model_len: Annotated[
        int | None, _option("KVATLAS_PLAN_MAX_MODEL_LEN", "Longest sequence; the model's by default.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option("KVATLAS_PLAN_MAX_NUM_SEQS", "Such sequences that must fit at once.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _option("KVATLAS_PLAN_GPU_MEMORY_UTILIZATION", "Share of the GPU that the engine takes; 0.9 by default."),
    ] = None,
    headroom: Annotated[
        float | None, _option("KVATLAS_PLAN_HEADROOM", "Share of blocks that new sequences leave.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("KVATLAS_PLAN_MAX_NUM_BATCHED_TOKENS", "Tokens of one step; 8192 by default.")
    ] = None,
    weights_memory: Annotated[
        float | None, _option("KVATLAS_PLAN_WEIGHTS_MEMORY", "GiB of all weights; counted from the config by default.")
    ] = None,
    activation_memory: Annotated[
        float | None,
        _option("KVATLAS_PLAN_ACTIVATION_MEMORY", "GiB of peak activations on one GPU; estimated by default."),
    ] = None,
    other_memory: Annotated[
        float | None,
        _option("KVATLAS_PLAN_OTHER_MEMORY", "GiB of context, graphs and the rest on one GPU; 1 by default."),
    ] = None,
    co_tenant_memory: Annotated[
        float | None, _option("KVATLAS_PLAN_CO_TENANT_MEMORY", "GiB that other processes hold on each GPU.")
    ] = None,
    kv_cache_memory: Annotated[
        float | None, _option("KVATLAS_PLAN_KV_CACHE_MEMORY", "GiB of the pool itself, in place of what is left over.")
    ] = None,
    hybrid_manager: Annotated[
        bool | None, _option("KVATLAS_PLAN_HYBRID_MANAGER", "Windowed layers give back what they left; on by default.")
    ] = None,
    advise: Annotated[bool, _option("KVATLAS_PLAN_ADVISE", "Also say what to change, best first.", "--advise")] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")] = False,
) -> int:
    """Plan the memory of a model on given GPUs, each sum in words."""
    settings = plan_settings(
        gpu=gpu,
        gpu_memory_gib=gpu_memory,
        tp=tp,
        pp=pp,
        dp=dp,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        headroom=headroom,
        max_num_batched_tokens=max_num_batched_tokens,
        weights_gib=weights_memory,
        activation_gib=activation_memory,
        other_gib=other_memory,
        co_tenant_gib=co_tenant_memory,
        kv_cache_gib=kv_cache_memory,
        hybrid_manager=hybrid_manager,
    )
    read, name, base = load_model(config)
    try:
        found = answer(read, name, settings.deployment(base), advice=advise)
    except LayoutUnknown as unknown:
        if not as_json:
            raise
        print(json.dumps(refusal(name, str(unknown)), allow_nan=False))
        return EXIT_FAILED
    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        print(render(found.plan))
        if found.options is not None:
            print(render_advice(found.options, found.together, fits_already=found.plan.fits))
    return 0
