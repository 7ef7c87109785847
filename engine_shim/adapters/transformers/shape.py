"""What of Transformers the hooks rely on, checked on the live objects before anything is touched.

Continuous batching is young and changes between versions, so nothing is assumed: what is not as expected leaves the
cache alone, and the log says what was looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_shim.adapters.signatures import Parameters, differences

SUPPORTED = "5.19"  # the versions these names and signatures were read in and tested with

_PROCESSOR_FIELDS = ("cache", "config", "scheduler", "model_runner", "distributed_helper")
_PROCESSOR: dict[str, Parameters] = {
    "prepare_next_batch": (...,),
    "update_batch": (...,),
    "fail_all_requests": ("error", ...),
}
_SCHEDULER_FIELDS = ("active_requests", "waiting_requests", "safety_margin")
_SCHEDULER: dict[str, Parameters] = {"schedule_batch": ("token_budget", "cache_budget", ...)}
_CACHE_FIELDS = ("cache_allocators", "pool", "num_sectors", "bytes_per_sector", "use_prefix_sharing", "cache_tensor")
_CACHE: dict[str, Parameters] = {
    "can_store_request_tokens": ("state", "request_len", "dry_run", ...),
    "free_blocks": ("request_id", "no_cache", ...),
    "search_prefix_match": ("request_id", "prompt_ids", ...),
}
_POOL_FIELDS = ("num_sectors", "num_reserved_sectors", "free_sectors")
_POOL: dict[str, Parameters] = {"count_free_blocks": ("index",)}
_ALLOCATOR_FIELDS = (
    "index",
    "layer_type",
    "pages_per_block",
    "tokens_per_page",
    "bytes_per_block",
    "blocks_per_sector",
    "block_table",
    "ledger",
    "pool",
)
_ALLOCATOR: dict[str, Parameters] = {
    "allocate_cache_to_request": ("request_id", "past_length", "query_length", ...),
    "acquire_prefix_blocks": ("request_id", "prefix_len", "block_ids"),
    "fork_blocks": ("source_request_id", "dest_request_id", "past_length"),
    "free_blocks": ("request_id", "no_cache", ...),
    "mark_complete_blocks": ("request_id", "token_ids", ...),
}
_LEDGER_FIELDS = ("shared_ref_counts", "cached_blocks", "block_to_hash")
_LEDGER: dict[str, Parameters] = {"evict_cached_blocks": (), "reset": ()}


def examine(processor: Any) -> list[str]:
    """What differs from the shape that the hooks know; empty where all is as expected. Touches nothing."""
    problems: list[str] = []

    def look(what: str, holder: Any, fields: tuple[str, ...], methods: Mapping[str, Parameters]) -> None:
        problems.extend(f"{what}.{name} is missing" for name in fields if not hasattr(holder, name))
        problems.extend(differences(what, holder, methods))
        if holder is not None and not hasattr(holder, "__dict__"):
            problems.append(f"{what} takes no attributes of ours")

    cache = getattr(processor, "cache", None)
    look("ContinuousBatchProcessor", processor, _PROCESSOR_FIELDS, _PROCESSOR)
    look("Scheduler", getattr(processor, "scheduler", None), _SCHEDULER_FIELDS, _SCHEDULER)
    look("PagedAttentionCache", cache, _CACHE_FIELDS, _CACHE)
    look("CachePool", getattr(cache, "pool", None), _POOL_FIELDS, _POOL)
    allocators = getattr(cache, "cache_allocators", None)
    if not isinstance(allocators, dict) or not allocators:
        return [*problems, "PagedAttentionCache.cache_allocators is no table of allocators"]
    for allocator in allocators.values():
        look(type(allocator).__name__, allocator, _ALLOCATOR_FIELDS, _ALLOCATOR)
        look("BlockLedger", getattr(allocator, "ledger", None), _LEDGER_FIELDS, _LEDGER)
    if not problems:
        problems += _examine_geometry(cache)
    return problems


def _examine_geometry(cache: Any) -> list[str]:
    """Sectors must be cut into whole blocks, or a block's place in memory is not what the map would say."""
    problems = []
    for name, allocator in cache.cache_allocators.items():
        if allocator.blocks_per_sector * allocator.bytes_per_block != cache.bytes_per_sector:
            problems.append(f"{allocator.blocks_per_sector} blocks of {name} do not make a sector")
    whole = (cache.num_sectors + cache.pool.num_reserved_sectors) * cache.bytes_per_sector
    if int(cache.cache_tensor.nbytes) != whole:
        problems.append(f"the cache's tensor has {cache.cache_tensor.nbytes} bytes, not the {whole} of its sectors")
    return problems
