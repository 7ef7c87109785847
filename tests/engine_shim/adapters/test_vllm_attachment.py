"""vLLM's attachment from beginning to end, on stand-ins for vLLM's objects; real vLLM is in tests/engines."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine_shim import MapReader
from engine_shim.adapters.hooks import is_hooked
from engine_shim.adapters.vllm import identity, plugin
from engine_shim.adapters.vllm.attachment import Attachment
from engine_shim.control.peer import socket_path
from engine_shim.snapshot import MapSnapshot
from tests.engine_shim.adapters.conftest import WatchVllm
from tests.engine_shim.adapters.vllm_stand_ins import BLOCK, Core, Scheduler


def snapshot(one: Attachment) -> MapSnapshot:
    path = one.pools[0].observer.path
    assert path is not None
    with closing(MapReader(path)) as reader:
        return reader.read()


def test_a_request_that_ends_before_its_step_is_shown_ends_nothing_else(watch_vllm: WatchVllm) -> None:
    """With async scheduling and structured output vLLM schedules a step, then takes the output of the one before, with
    which requests end, and only then asks for what shows the step."""
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    for name in ("ends by itself", "is aborted", "goes on"):
        scheduler.add(name)
    first = scheduler.schedule()
    scheduler.get_grammar_bitmask(first)
    second = scheduler.schedule()
    scheduler.finish_requests(["is aborted"], "FINISHED_ABORTED")
    scheduler.update_from_output(first, ["ends by itself"])
    scheduler.get_grammar_bitmask(second)
    assert one.reason == ""
    shown = snapshot(one)
    assert not shown.flags.degraded
    assert shown.running_requests == 1
    assert {entry.request_id: entry.tokens for entry in shown.owners} == {"goes on": BLOCK + 1}
    assert shown.state_counts[:3] == (61, 0, 2)
    # What was computed for those that ended was computed all the same.
    assert (shown.counters["steps"], shown.counters["tokens_written"]) == (2, 3 * (BLOCK + 1))
    scheduler.update_from_output(second, ["goes on"])
    assert (snapshot(one).running_requests, snapshot(one).owners) == (0, ())


def test_a_step_whose_requests_have_all_ended_is_shown_too(watch_vllm: WatchVllm) -> None:
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    scheduler.add("short")
    first = scheduler.schedule()
    scheduler.get_grammar_bitmask(first)
    scheduler.schedule()
    scheduler.update_from_output(first, ["short"])
    assert one.reason == ""
    assert (snapshot(one).counters["steps"], snapshot(one).counters["tokens_written"]) == (2, BLOCK + 1)


def test_with_a_kv_consumer_and_two_batches_in_flight_ended_requests_are_closed(watch_vllm: WatchVllm) -> None:
    """There blocks of some request wait in every step, so that none of them may wait for all."""
    scheduler = Scheduler(defer=True)
    one = watch_vllm(scheduler)
    book = one.pools[0].book
    assert book is not None
    scheduler.add("r0")
    before = scheduler.schedule()
    scheduler.get_grammar_bitmask(before)
    most = 0
    for number in range(1, 200):
        scheduler.add(f"r{number}")
        step = scheduler.schedule()
        scheduler.get_grammar_bitmask(step)
        scheduler.update_from_output(before, [f"r{number - 1}"])
        before = step
        assert scheduler.deferred_frees
        shown = snapshot(one)
        assert shown.owner is not None
        named = {entry.owner for entry in shown.owners}
        assert set(shown.owner[shown.states == 2].tolist()) <= named
        most = max(most, len(named))
    assert one.reason == ""
    assert most <= 4
    assert len(book._rows) <= 4


def test_each_reset_of_the_prefix_cache_lets_the_old_table_go(watch_vllm: WatchVllm) -> None:
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    hooks, tables = len(one.hooks), []
    for number in range(5):
        (block,) = pool.get_new_blocks(1)
        pool.cache(block, f"hash {number}")
        pool.free_blocks([block])
        tables.append(weakref.ref(pool.cached_block_hash_to_block))
        assert scheduler.reset_prefix_cache()
    gc.collect()
    assert [table() for table in tables] == [None] * 5
    assert len(one.hooks) == hooks
    assert is_hooked(pool.cached_block_hash_to_block, "pop")
    one.stop("the test is over")
    assert vars(pool.cached_block_hash_to_block).keys() == {"_cache"}


def test_a_new_map_after_a_sleep_names_the_devices_too(watch_vllm: WatchVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def gpu_uuids(config: Any) -> list[str]:
        asked.append(config)
        return ["GPU-1", "GPU-2"]

    monkeypatch.setattr(identity, "gpu_uuids", gpu_uuids)
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    for _ in range(2):
        assert snapshot(one).identity.gpu_uuids == ()
        for name in ("a", "b"):
            scheduler.add(name)
            scheduler.update_from_output(scheduler.schedule(), [name])
        assert snapshot(one).identity.gpu_uuids == ("GPU-1", "GPU-2")
        one.set_sleeping(True)
        one.set_sleeping(False)
    assert len(asked) == 2


def test_an_engine_that_wakes_without_a_map_is_left_alone(
    watch_vllm: WatchVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With neither a map nor a socket nobody would see that it relocates, and nobody could stop it."""
    scheduler = Scheduler()
    one = watch_vllm(scheduler, KVATLAS_VLLM_ALLOCATION="relocating")
    relocator = one.steering.relocator
    assert relocator is not None
    assert relocator.on
    one.set_sleeping(True)
    (tmp_path / "a file").touch()
    monkeypatch.setenv("KVATLAS_DIR", str(tmp_path / "a file"))
    one.set_sleeping(False)
    assert one.reason
    assert (relocator.on, relocator.reason) == (False, one.reason)
    assert plugin.attachments() == ()
    cache = scheduler.kv_cache_manager
    for owner in (scheduler, cache, cache.block_pool, cache.coordinator, *cache.coordinator.single_type_managers):
        assert [name for name in dir(owner) if is_hooked(owner, name)] == []


def test_turned_off_an_idle_engine_core_is_left_alone_at_once(watch_vllm: WatchVllm) -> None:
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    path = one.pools[0].observer.path
    assert path is not None
    assert socket_path(path).exists()
    core = one.steering.core = Core(scheduler)
    thread = threading.Thread(target=core.loop_until, args=(lambda: bool(one.reason),))
    thread.start()
    assert plugin.turn_off("the operator said so") == 1
    thread.join(30)
    assert one.reason == "the operator said so"
    assert not path.exists()
    assert not socket_path(path).exists()
    assert not is_hooked(scheduler, "schedule")


def test_however_often_it_is_asked_a_busy_core_gets_one_call_for_when_it_idles(watch_vllm: WatchVllm) -> None:
    scheduler = Scheduler()
    one = watch_vllm(scheduler)
    core = one.steering.core = Core(scheduler)
    for _ in range(1000):
        one.steering.wake()
    assert len(core._idle_state_callbacks) == 1
    core.idle()
    assert core._idle_state_callbacks == []
    # What is asked for while it is being served, or after, is not lost.
    one.steering.wake()
    assert len(core._idle_state_callbacks) == 1


def test_what_is_watched_no_more_is_not_held(watch_vllm: WatchVllm) -> None:
    def end(how: str) -> tuple[weakref.ref[Any], ...]:
        scheduler = Scheduler()
        one = watch_vllm(scheduler)
        core = one.steering.core = Core(scheduler)
        scheduler.add("a")
        scheduler.update_from_output(scheduler.schedule(), ["a"])
        if how == "shutdown":
            scheduler.shutdown()
        elif how == "fault":
            one.fault(RuntimeError("a fault of ours"))
        else:
            one.turn_off("the operator said so")
            core.idle()
        assert one.reason
        return weakref.ref(core), weakref.ref(scheduler)

    for how in ("shutdown", "fault", "turned off"):
        held = end(how)
        gc.collect()
        assert [one() for one in held] == [None, None], how
        assert plugin._attachments == []
