"""Says in the map's terms who a vLLM engine core is: model, ranks, groups, bytes of a block."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from engine_shim.adapters.opening import engine_id
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.snapshot import GroupEntry

log = logging.getLogger("kvatlas.shim")

_KINDS = {
    "full_attention": "full",
    "sink_full_attention": "full",
    "mla_attention": "mla",
    "sliding_window": "sliding",
    "sliding_window_mla": "sliding",
    "chunked_local_attention": "chunked",
    "mamba": "state",
    "cross_attention": "cross",
    "encoder_only_attention": "encoder",
}


def describe(scheduler: Any, pool: Any, pool_name: str, version: str, environment: Mapping[str, str]) -> MapSpec:
    """The map of one pool of one engine core. Numbers are of the first tensor- and pipeline-parallel rank."""
    config, cache = scheduler.vllm_config, scheduler.kv_cache_config
    parallel, model = config.parallel_config, config.model_config
    try:
        groups = describe_groups(scheduler, pool)
    except Exception as error:  # noqa: BLE001 - whatever has changed in vLLM, the map is of use without
        log.warning("the KV cache groups of this vLLM are not told: %r", error)
        groups = ()
    index = int(getattr(parallel, "data_parallel_index", 0) or 0)
    own = pool is scheduler.kv_cache_manager.block_pool
    return MapSpec(
        engine_id=engine_id(model.model, environment),
        kind="vllm",
        version=version,
        runner=runner_class(config),
        model=str(getattr(model, "served_model_name", None) or model.model),
        pool=pool_name,
        total_blocks=int(pool.num_gpu_blocks),
        block_tokens=min((group.block_tokens for group in groups), default=int(scheduler.block_size)),
        block_bytes=block_bytes(cache) if own else sum(group.bytes_per_block for group in groups),
        dtype=_dtype(config),
        medium=_medium(config) if own else "cpu",
        policy="vllm",
        headroom_blocks=int(getattr(scheduler.kv_cache_manager, "watermark_blocks", 0)),
        # An independent rank of a dense model has its size reset to 1; the index stays.
        data_parallel=(index, max(int(parallel.data_parallel_size), index + 1)),
        tensor_parallel=(0, int(parallel.tensor_parallel_size)),
        pipeline_parallel=(0, int(parallel.pipeline_parallel_size)),
        groups=groups,
    )


def describe_groups(scheduler: Any, pool: Any) -> tuple[GroupEntry, ...]:
    """The KV cache groups that live in `pool`, under vLLM's own group numbers."""
    entries = []
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for number, (group, manager) in enumerate(zip(scheduler.kv_cache_config.kv_cache_groups, managers, strict=True)):
        if manager.block_pool is not pool or number > 254:
            continue
        spec = group.kv_cache_spec
        layers = len(group.layer_names)
        # A group of layers that differ is sized as a whole, one of equal layers by the layer.
        whole = hasattr(spec, "kv_cache_specs")
        entries.append(
            GroupEntry(
                id=number,
                kind=group_kind(spec),
                block_tokens=int(manager.block_size),
                layers=layers,
                bytes_per_block=int(spec.page_size_bytes) * (1 if whole else layers),
                window_tokens=_window(spec),
            )
        )
    return tuple(entries)


def group_kind(spec: Any) -> str:
    """ "full", "sliding", "chunked", "mla", "state", or what vLLM calls it."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = str(get_kv_cache_spec_kind(spec).value)
    return _KINDS.get(kind, kind)


def block_bytes(cache: Any) -> int:
    """Bytes of one block over all layers of this rank: all tensors are views of one allocation, which blocks share."""
    sizes = [int(t.size) for t in cache.kv_cache_tensors if not getattr(t, "host_resident", False)]
    return max(sizes, default=0) // max(1, int(cache.num_blocks))


def runner_class(config: Any) -> str:
    """Which class runs the model, by the rule that vLLM's workers follow."""
    second = bool(getattr(config, "use_v2_model_runner", False))
    if _medium(config) == "cpu":
        return "cpu.model_runner.CPUModelRunner" if second else "cpu_model_runner.CPUModelRunner"
    return "gpu.model_runner.GPUModelRunner" if second else "gpu_model_runner.GPUModelRunner"


def gpu_uuids(config: Any) -> Sequence[str]:
    """UUIDs of this engine core's devices; empty on the CPU, or where the driver does not tell."""
    if _medium(config) == "cpu":
        return ()
    from vllm.platforms import current_platform

    count = int(getattr(config.parallel_config, "local_world_size", config.parallel_config.world_size))
    return [str(current_platform.get_device_uuid(device)) for device in range(count)]


def _medium(config: Any) -> str:
    return str(getattr(config.device_config, "device_type", "") or "unknown")


def _dtype(config: Any) -> str:
    given = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if given == "auto" else given


def _window(spec: Any) -> int:
    for holder in (spec, getattr(spec, "first_spec", None)):
        for name in ("sliding_window", "attention_chunk_size"):
            if isinstance(value := getattr(holder, name, None), int):
                return value
    return 0
