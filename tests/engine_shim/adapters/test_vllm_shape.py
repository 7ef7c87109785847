"""Another version of vLLM, whose methods take more than those of 0.32: no call of vLLM's may fail for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from engine_shim.adapters.hooks import Hook, is_hooked
from engine_shim.adapters.vllm import plugin
from engine_shim.adapters.vllm.allocation import relocation_refusal
from engine_shim.adapters.vllm.shape import examine
from tests.engine_shim.adapters.conftest import WatchVllm
from tests.engine_shim.adapters.later_versions import MORE, takes_more
from tests.engine_shim.adapters.vllm_stand_ins import (
    BlockPool,
    FullAttentionManager,
    HashTable,
    KVCacheManager,
    Scheduler,
)

RELOCATING = {"KVATLAS_VLLM_ALLOCATION": "relocating"}


def all_hooks(watch_vllm: WatchVllm) -> Iterator[Hook]:
    """Each hook that the adapter puts on, relocation's among them."""
    one = watch_vllm(Scheduler(), **RELOCATING)
    relocator = one.steering.relocator
    assert relocator is not None
    yield from (*one.hooks._hooks, *relocator._hooks._hooks)


def test_a_stand_in_has_all_that_is_looked_for(vllm_modules: None) -> None:
    """The control: what is refused below is refused for what was changed."""
    assert examine(Scheduler()).problems == ()
    assert relocation_refusal(Scheduler()) == ""


def test_whatever_takes_more_is_left_alone_or_handed_all_of_it(
    watch_vllm: WatchVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked = {(type(hook.owner), hook.name) for hook in all_hooks(watch_vllm)}
    assert len(hooked) >= 25
    for owner_class, name in hooked:
        with monkeypatch.context() as change:
            change.setattr(owner_class, name, takes_more(getattr(owner_class, name)))
            scheduler = Scheduler()
            one = plugin.attach(scheduler, {"KVATLAS_ENGINE_ID": f"{owner_class.__name__}-{name}", **RELOCATING})
            cache = scheduler.kv_cache_manager
            pool, coordinator = cache.block_pool, cache.coordinator
            table = pool.cached_block_hash_to_block
            everything = (scheduler, cache, pool, table, coordinator, *coordinator.single_type_managers)
            (owner,) = [thing for thing in everything if type(thing) is owner_class]
            if is_hooked(owner, name):
                assert one is not None
                kinds = {parameter.kind for parameter in inspect.signature(getattr(owner, name)).parameters.values()}
                assert inspect.Parameter.VAR_KEYWORD in kinds, f"{owner_class.__name__}.{name}"
                assert inspect.Parameter.VAR_POSITIONAL in kinds, f"{owner_class.__name__}.{name}"
            if one is not None:
                one.stop("the next one comes")


@pytest.mark.parametrize(
    "name", ["get_new_blocks", "free_blocks", "touch", "reset_prefix_cache", "evict_blocks", "unpin_blocks"]
)
def test_a_pool_whose_methods_take_more_is_not_watched(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(BlockPool, name, takes_more(getattr(BlockPool, name)))
    findings = examine(Scheduler())
    assert not findings.pool
    (problem,) = findings.problems
    assert problem.startswith(f"BlockPool.{name} takes ")
    assert MORE in problem


def test_a_part_whose_methods_take_more_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashTable, "pop", takes_more(HashTable.pop))
    monkeypatch.setattr(
        FullAttentionManager, "pop_blocks_for_free", takes_more(FullAttentionManager.pop_blocks_for_free)
    )
    findings = examine(Scheduler())
    assert (findings.pool, findings.evictions, findings.requests, findings.counters) == (True, False, False, True)
    assert len(findings.problems) == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockPool, "get_new_blocks"),
        (BlockPool, "free_blocks"),
        (BlockPool, "touch"),
        (KVCacheManager, "new_step_starts"),
        (KVCacheManager, "take_kv_cache_block_copies"),
    ],
)
def test_relocation_is_refused_where_its_methods_take_more(
    vllm_modules: None, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, takes_more(getattr(owner, name)))
    refusal = relocation_refusal(Scheduler())
    assert f"{name} takes" in refusal
    assert MORE in refusal


def test_what_comes_besides_does_not_end_observation(watch_vllm: WatchVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Scheduler, "_free_blocks"), (KVCacheManager, "record_prefix_cache_stats")):
        monkeypatch.setattr(owner, name, takes_more(getattr(owner, name)))
    scheduler: Any = Scheduler()
    one = watch_vllm(scheduler)
    scheduler.add("a")
    scheduler.update_from_output(scheduler.schedule(), [])
    request = scheduler.requests["a"]
    scheduler.kv_cache_manager.record_prefix_cache_stats(request, 3, new_in_this_version=True)
    scheduler._free_blocks(request, new_in_this_version=True)
    assert one.reason == ""
