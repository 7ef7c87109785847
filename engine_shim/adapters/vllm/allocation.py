"""Whether and how this vLLM's allocation may be changed: the setting, and what stands against it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from engine_shim.adapters.signatures import Parameters, differences

log = logging.getLogger("kvatlas.shim")

_BLOCK_FIELDS = {
    "block_id", "ref_cnt", "pool", "_block_hash", "_block_hash_num_tokens", "prev_free_block", "next_free_block",
    "is_null",
}  # fmt: skip
_POOL_FIELDS = (
    "cached_block_hashes_by_block",
    "metrics_collector",
    "free_block_queue",
    "_reuse_watchers",
    "_maybe_evict_cached_block",
    "_emit_block_removed_events",
)
_QUEUE_FIELDS = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks", "iter_blocks_after")
_POOL_METHODS: dict[str, Parameters] = {
    "get_new_blocks": ("num_blocks",),
    "free_blocks": ("ordered_blocks",),
    "touch": ("blocks",),
}
_CACHE_METHODS: dict[str, Parameters] = {"take_kv_cache_block_copies": (), "new_step_starts": ()}
_COORDINATOR_METHODS: dict[str, Parameters] = {
    "allocate_new_computed_blocks": ("request_id", "new_computed_blocks", ...)
}
# Devices whose runners make the copies that ride with a step, before its forward pass.
_DEVICES = ("cpu", "cuda", "xpu")


class Allocation(StrEnum):
    """KVATLAS_VLLM_ALLOCATION."""

    STOCK = "stock"
    RELOCATING = "relocating"
    AUTO = "auto"  # the agent switches it


def allocation_setting(environment: Mapping[str, str]) -> Allocation:
    """The setting; stock, with a log line, where it is none of the three."""
    text = environment.get("KVATLAS_VLLM_ALLOCATION", "").strip().lower()
    if not text:
        return Allocation.STOCK
    try:
        return Allocation(text)
    except ValueError:
        log.warning(
            "KVATLAS_VLLM_ALLOCATION=%r is none of %s; vLLM allocates by itself", text, ", ".join(Allocation)
        )  # fmt: skip
        return Allocation.STOCK


def relocation_refusal(scheduler: Any) -> str:
    """Why this engine's pool cannot be relocated in; "" where it can. Touches nothing."""
    cache = scheduler.kv_cache_manager
    pool, coordinator = cache.block_pool, cache.coordinator
    config = scheduler.vllm_config
    if scheduler.kv_cache_config.needs_kv_cache_zeroing:
        return "new blocks are zeroed here (Mamba layers or mixed KV precisions), before copies are made"
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        return "HiSparse reads blocks that nobody references"
    if not hasattr(scheduler, "connector"):
        return "this vLLM does not say whether a KV connector fills blocks"
    if type(pool).__name__ != "BlockPool" or any(m.block_pool is not pool for m in coordinator.single_type_managers):
        return f"the pool is a {type(pool).__name__}, or several pools serve one request"
    if (device := str(config.device_config.device_type)) not in _DEVICES:
        return f"it is not known whether the runner of {device} makes the copies of a step"
    if not type(scheduler).__module__.startswith("vllm.v1.core.sched."):
        return f"{type(scheduler).__module__} is not vLLM's own scheduler; its steps may carry no copies"
    return unknown_shape(cache)


def unknown_shape(cache: Any) -> str:
    """What of this vLLM's pool is not as it was when moves were proven; "" where all is."""
    from vllm.v1.core.sched.output import SchedulerOutput

    pool, coordinator = cache.block_pool, cache.coordinator
    fields = set(getattr(pool.blocks[0], "__slots__", ())) or set(vars(pool.blocks[0]))
    if fields != _BLOCK_FIELDS:
        return f"a block of this vLLM has other fields: {', '.join(sorted(fields ^ _BLOCK_FIELDS))}"
    missing = [f"BlockPool.{name}" for name in _POOL_FIELDS if not hasattr(pool, name)]
    queue = getattr(pool, "free_block_queue", None)
    missing += [f"FreeKVCacheBlockQueue.{name}" for name in _QUEUE_FIELDS if not hasattr(queue, name)]
    if "kv_cache_block_copies" not in SchedulerOutput.__dataclass_fields__:
        missing.append("SchedulerOutput.kv_cache_block_copies")
    if not isinstance(getattr(pool.cached_block_hash_to_block, "_cache", None), dict):
        missing.append("BlockHashToBlockMap._cache")
    if missing:
        return f"{', '.join(missing)}: not in this vLLM"
    others = differences("BlockPool", pool, _POOL_METHODS)
    others += differences("KVCacheManager", cache, _CACHE_METHODS)
    others += differences("KVCacheCoordinator", coordinator, _COORDINATOR_METHODS)
    return "; ".join(others)
