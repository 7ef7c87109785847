"""What of vLLM the hooks rely on, checked on the live objects before anything is touched.

vLLM's block pool is not a public interface: it changes between versions. What is not as expected turns off the part
that needs it, and the log says which part and why; a pool that cannot be watched at all is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_shim.adapters.signatures import Parameters, differences

SUPPORTED = "0.32"  # the versions these names and signatures were read in and tested with

_POOL_FIELDS = (
    "blocks",
    "num_gpu_blocks",
    "null_block",
    "enable_caching",
    "cached_block_hash_to_block",
    "free_block_queue",
)
_QUEUE_FIELDS = ("num_free_blocks", "fake_free_list_head", "fake_free_list_tail")
_BLOCK_FIELDS = ("block_id", "ref_cnt", "is_null", "block_hash", "_block_hash", "next_free_block", "pool")
_POOL_METHODS: dict[str, Parameters] = {
    "get_new_blocks": ("num_blocks",),
    "free_blocks": ("ordered_blocks",),
    "touch": ("blocks",),
    "reset_prefix_cache": (),
}
_POOL_EXTRAS: dict[str, Parameters] = {"evict_blocks": ("block_ids",), "unpin_blocks": ("blocks", "on_reuse")}
_HASHES_METHODS: dict[str, Parameters] = {"pop": ("key", "block_id")}
_SCHEDULER_FIELDS = ("running", "waiting", "requests", "vllm_config", "kv_cache_config", "kv_cache_manager")
_SCHEDULER_METHODS: dict[str, Parameters] = {
    "schedule": (...,),
    "update_from_output": ("scheduler_output", "model_runner_output", ...),
    "finish_requests": ("request_ids", "finished_status", ...),
    "_free_blocks": ("request", ...),
    "shutdown": (...,),
}
_MANAGER_FIELDS = ("req_to_blocks", "block_size", "block_pool", "kv_cache_group_id", "kv_cache_spec")
_MANAGER_METHODS: dict[str, Parameters] = {
    "free": ("request_id", ...),
    "pop_blocks_for_free": ("request_id",),
    "allocate_new_blocks": ("request_id", ...),
    "add_local_computed_blocks": ("request_id", ...),
    "allocate_external_computed_blocks": ("request_id", ...),
    "remove_skipped_blocks": ("request_id", ...),
}
_COUNTED_METHODS: dict[str, Parameters] = {
    "allocate_slots": ("request", ...),
    "record_prefix_cache_stats": ("request", "num_hits", ...),
}


@dataclass(frozen=True, slots=True)
class Findings:
    """What can be watched of one scheduler. `problems` says what cannot, and what was looked for."""

    pool: bool  # states and references: without these nothing is instrumented
    evictions: bool
    requests: bool  # owners, positions, groups, tokens
    counters: bool  # preemptions, prefix queries and hits, allocation failures
    connector: bool  # blocks held for a KV connector
    problems: tuple[str, ...]


def examine(scheduler: Any) -> Findings:
    """Look at every attribute and signature that the hooks use; touches nothing."""
    problems: list[str] = []

    def sound(what: str, holder: Any, fields: tuple[str, ...] = (), methods: Mapping[str, Parameters] = {}) -> bool:
        found = [f"{what}.{name} is missing" for name in fields if not hasattr(holder, name)]
        found += differences(what, holder, methods)
        problems.extend(found)
        return not found

    cache_manager = getattr(scheduler, "kv_cache_manager", None)
    pool: Any = getattr(cache_manager, "block_pool", None)
    coordinator = getattr(cache_manager, "coordinator", None)
    managers = getattr(coordinator, "single_type_managers", ())
    pool_sound = sound("Scheduler", scheduler, _SCHEDULER_FIELDS, _SCHEDULER_METHODS)
    pools = {id(one): one for one in (pool, *(getattr(manager, "block_pool", pool) for manager in managers))}
    for one in pools.values():
        extras = {name: parameters for name, parameters in _POOL_EXTRAS.items() if hasattr(one, name)}
        blocks = getattr(one, "blocks", None) or [None]
        pool_sound &= sound("BlockPool", one, _POOL_FIELDS, _POOL_METHODS | extras)
        pool_sound &= sound("KVCacheBlock", blocks[0], _BLOCK_FIELDS)
        pool_sound &= sound("FreeKVCacheBlockQueue", getattr(one, "free_block_queue", None), _QUEUE_FIELDS)
    if not pool_sound:
        return Findings(False, False, False, False, False, tuple(problems))
    evictions = True
    for one in pools.values():
        hashes = one.cached_block_hash_to_block
        evictions &= sound("BlockHashToBlockMap", hashes, (), _HASHES_METHODS) and hasattr(hashes, "__dict__")
    requests = sound("KVCacheCoordinator", coordinator, ("single_type_managers",))
    for manager in managers:
        name = type(manager).__name__
        requests &= sound(name, manager, _MANAGER_FIELDS, _MANAGER_METHODS)
    counters = sound("KVCacheManager", cache_manager, (), _COUNTED_METHODS)
    counters &= sound("Scheduler", scheduler, (), {"_preempt_request": ("request", ...)})
    connector = sound("Scheduler", scheduler, ("connector", "deferred_frees"), {"_free_request": ("request", ...)})
    return Findings(True, evictions, requests, counters, connector, tuple(problems))
