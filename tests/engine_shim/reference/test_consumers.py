"""Whom compaction serves: transfers get longer runs, a pool can be made smaller, and emptied pages go to the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.tail_plan import plan_tail
from engine_shim.errors import ControlRefused, PoolError, SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool.prefix import hash_prefix_blocks
from engine_shim.reference.consumers import transfer_cost
from engine_shim.reference.elastic import ElasticPages, resident_bytes
from engine_shim.reference.engine import Engine
from engine_shim.reference.geometry import named_geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
FREE, CACHED, USED, PINNED, RESERVED = BlockState
QUICK = RunSettings(target=0.0, max_step_seconds=1.0)


def scattered(engine: Engine, count: int = 24, *, output: int = 120, salt: int = 0) -> Engine:
    """Every other sequence ends soon, so that gaps are left between the others' blocks."""
    for index in range(count):
        tokens = output if index % 2 else 6
        request = TraceRequest(index, 0.0, 60 + 16 * (index % 3), tokens, (5000 + 100 * salt + index,))
        assert engine.submit(sequence_of(request, 16))
    for _ in range(8):
        engine.step()
    assert engine.scheduler.running
    return engine


def compact(engine: Engine, wanted: RunSettings = QUICK) -> CompactionReport:
    reports: list[CompactionReport] = []
    engine.compaction.start(wanted, done=reports.append)
    while engine.compaction.active:
        engine.compaction.step()
    return reports[0]


# Transfer

# Those that the test chooses go, none by itself, and however many blocks that pins.
CHOSEN: dict[str, Any] = {"transfer_every": 1000, "transfer_pinned_share": 1.0}


def test_transfers_need_fewer_descriptors_after_a_run(make_engine: EngineMaker, tmp_path: Path) -> None:
    """The cost that is predicted from tables is what the real transfers pay."""
    sent, predicted, runs = [], [], []
    for move in (False, True):
        chosen = CHOSEN | {"transfer_folder": tmp_path / str(move)}
        engine = make_engine(blocks=512, prefix_cache=False, policy="fifo", **chosen)
        for index in range(60):
            assert engine.submit(sequence_of(TraceRequest(index, 0.0, 30, 150 if index % 3 else 20, (index,)), 16))
            engine.step()
            engine.step()
        if move:
            report = compact(engine)
            assert report.moved_blocks > 0
            runs = [report.before.sequence_runs, report.predicted.sequence_runs, report.after.sequence_runs]
        before = engine.report().transfers.descriptors
        running = list(engine.scheduler.running)
        predicted.append(transfer_cost(running))
        for sequence in running:
            engine.scheduler.finish(sequence)
            assert engine._transfers.start(sequence)  # type: ignore[union-attr]
        deadline = time.monotonic() + 120
        while engine._transfers.in_flight and time.monotonic() < deadline:  # type: ignore[union-attr]
            engine.step()
        sent.append(engine.report().transfers.descriptors - before)
    assert [cost.runs for cost in predicted] == sent
    assert predicted[0].blocks == predicted[1].blocks
    assert sent[1] < sent[0]
    assert runs == [predicted[0].runs, predicted[1].runs, predicted[1].runs]
    assert transfer_cost([]).runs_per_sequence is None


# Shrink


def states_of(engine: Engine) -> list[int]:
    states: list[int] = engine.pool.states().tolist()
    return states


def test_a_pool_empties_its_tail_and_grows_again(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=128))
    assert USED in states_of(engine)[80:]
    reports: list[CompactionReport] = []
    engine.size.resize(80, done=reports.append)
    with pytest.raises(ControlRefused):
        engine.size.resize(100)
    while engine.size.active:
        engine.step()
    (report,) = reports
    assert report.outcome is Outcome.REACHED
    assert report.moved_blocks > 0
    assert set(states_of(engine)[80:]) == {RESERVED}
    assert engine.pool.usable_blocks == 79
    assert engine.size.blocks == 80
    assert engine.verify_all() == []
    for _ in range(400):
        engine.step()
    assert set(states_of(engine)[80:]) == {RESERVED}
    assert engine.report().served_requests == 24
    engine.size.resize(100)
    assert states_of(engine).count(RESERVED) == 29
    engine.size.resize(128)
    assert states_of(engine).count(RESERVED) == 1
    assert engine.pool.usable_blocks == 127
    scattered(engine)
    assert engine.verify_all() == []


def test_prefixes_of_the_tail_are_kept_where_there_is_room(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=128, policy="fifo")
    for salt in range(5):  # fifo goes round the pool, so prefixes come to lie in its tail
        scattered(engine, 6, output=20, salt=salt)
        while engine.scheduler.has_work:
            engine.step()
    cached, free_below = engine.pool.num_cached, states_of(engine)[:100].count(FREE)
    in_tail = states_of(engine)[100:].count(CACHED)
    assert in_tail
    engine.size.resize(100)
    while engine.size.active:
        engine.step()
    assert engine.pool.num_cached == cached - max(0, in_tail - free_below)
    assert engine.verify_all() == []


def test_a_pool_is_not_made_too_small_for_what_it_serves(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=128)
    assert engine.submit(sequence_of(TraceRequest(0, 0.0, 800, 10, (1, 2)), 16))
    for blocks, why in ((40, "need 51 blocks; the pool has 39"), (0, "can use 1 to 128"), (129, "can use 1 to 128")):
        with pytest.raises(SettingsError, match=why):
            engine.size.resize(blocks)
    assert engine.pool.usable_blocks == 127


def test_a_tail_in_transfer_is_waited_for_then_given_up(make_engine: EngineMaker) -> None:
    now = [0.0]
    engine = scattered(make_engine(blocks=128))
    engine.size._clock = lambda: now[0]
    held = [block for block in range(90, 128) if engine.pool.state(block) is USED][:2]
    engine.pool.pin(held)
    for seconds, outcome in ((100.0, Outcome.PARTIAL), (1.0, Outcome.REACHED)):
        reports: list[CompactionReport] = []
        engine.size.resize(90, settings=RunSettings(target=0.0, max_seconds=50.0), done=reports.append)
        for _ in range(30):
            engine.step()
        assert engine.size.active
        assert not engine.size.wants_step
        now[0] += seconds
        if outcome is Outcome.REACHED:
            engine.pool.unpin(held)
        while engine.size.active:
            engine.step()
        assert reports[0].outcome is outcome
        assert states_of(engine).count(RESERVED) == (1 if outcome is Outcome.PARTIAL else 1 + 38)
    assert engine.verify_all() == []


def test_the_kill_switch_stops_a_resize(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=128))
    engine.compaction.set_moving(False)
    reports: list[CompactionReport] = []
    engine.size.resize(80, done=reports.append)
    while engine.size.active:
        engine.step()
    assert reports[0].outcome in (Outcome.REFUSED, Outcome.PARTIAL)
    assert reports[0].reason == "moving is switched off"
    assert states_of(engine).count(RESERVED) == 1


def with_prefixes_above(engine: Engine) -> Engine:
    """Prefixes of an ended sequence in blocks 71 to 170 of 201, free blocks above, a live sequence below."""
    for index, (prompt, output) in enumerate(((280, 40), (400, 2))):
        tokens = np.arange(prompt + output, dtype=np.int64) + 1_000_000 * index
        hashes = hash_prefix_blocks(tokens.tolist(), 4)
        assert engine.submit(Sequence(str(index), tokens, prompt_tokens=prompt, length=prompt, hashes=hashes))
    for _ in range(4):
        engine.step()
    engine.compaction.mover.moves.evict([b for b in range(75, 105) if engine.pool.state(b) is CACHED])  # type: ignore[attr-defined]
    assert states_of(engine)[110:].count(CACHED) > 30
    assert states_of(engine)[:110].count(FREE) > 20
    return engine


SHRINKING: dict[str, Any] = {"blocks": 201, "block_tokens": 4, "headroom": 0.0}


def check_books(engine: Engine) -> None:
    """The pool's counts are those of its states, and every free or cached block can be handed out."""
    states = states_of(engine)
    assert (engine.pool.num_free, engine.pool.num_cached) == (states.count(FREE), states.count(CACHED))
    assert engine.pool.usable_blocks == len(states) - states.count(RESERVED)
    assert engine.verify_all() == []


def test_moving_that_is_off_leaves_prefixes_and_the_tail_alone(make_engine: EngineMaker) -> None:
    engine = with_prefixes_above(make_engine(**SHRINKING))
    before, copied = states_of(engine), engine.cache.copied_blocks
    engine.compaction.set_moving(False)
    reports: list[CompactionReport] = []
    engine.size.resize(110, done=reports.append)
    assert not engine.size.step()
    assert (reports[0].outcome, reports[0].reason) == (Outcome.REFUSED, "moving is switched off")
    assert (states_of(engine), engine.cache.copied_blocks) == (before, copied)


@pytest.mark.parametrize(("seconds", "bytes_of"), [(0.0004, 1000), (0.003, 1000), (0.0, 3)])
def test_clearing_a_tail_keeps_to_the_budgets_and_is_reported(
    seconds: float, bytes_of: int, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied prefix costs so many seconds; what a step may copy is `bytes_of` blocks, or what fits into 2 ms."""
    now = [0.0]
    engine = with_prefixes_above(make_engine(**SHRINKING))
    engine.size._clock = engine.compaction._clock = lambda: now[0]
    copy, counts = engine.size._copy, [0]

    def slow(copies: list[tuple[int, int]]) -> None:
        copy(copies)
        now[0] += seconds * len(copies)
        counts[-1] += len(copies)

    monkeypatch.setattr(engine.size, "_copy", slow)
    reports: list[CompactionReport] = []
    wanted = RunSettings(max_chunk_bytes=bytes_of * engine.cache.block_bytes)
    engine.size.resize(110, settings=wanted, done=reports.append)
    stalls = []
    while engine.size.active:
        began = now[0]
        engine.size.step()
        engine.compaction.step()
        stalls.append(now[0] - began)
        counts.append(0)
    (report,) = reports
    assert report.outcome is Outcome.REACHED
    assert max(stalls) <= max(0.002, seconds) + 1e-9
    assert 1 <= max(counts) <= (3 if bytes_of == 3 else 1000)
    assert report.longest_stall_seconds == pytest.approx(max(stalls))
    assert report.moving_seconds == pytest.approx(sum(stalls))
    assert report.moved_blocks >= sum(counts) > 20
    assert report.moved_bytes == report.moved_blocks * engine.cache.block_bytes
    assert report.cached_lost > 0
    check_books(engine)


TAIL_CALLS: dict[str, Callable[[Any], Any]] = {
    "size._copy": lambda engine: engine.size,
    "moves.relocate": lambda engine: engine.compaction.mover.moves,
    "moves.evict": lambda engine: engine.compaction.mover.moves,
    "moves.withdraw": lambda engine: engine.compaction.mover.moves,
    "prefixes.relocate": lambda engine: engine.pool._prefixes,
    "prefixes.forget": lambda engine: engine.pool._prefixes,
    "policy.move_cached": lambda engine: engine.pool._policy,
    "policy.remove_free": lambda engine: engine.pool._policy,
    "policy.remove_cached": lambda engine: engine.pool._policy,
    "policy.give_vacated": lambda engine: engine.pool._policy,
    "observer.reserved": lambda engine: engine.pool._observer,
}


@pytest.mark.parametrize("late", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("inner", TAIL_CALLS)
def test_whatever_raises_while_a_pool_shrinks_it_goes_back_to_its_size(
    inner: str, late: bool, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_prefixes_above(make_engine(**SHRINKING))
    name = inner.split(".")[1]
    holder = TAIL_CALLS[inner](engine)
    right = getattr(holder, name)
    calls: list[str] = []
    advance, shrinking = engine.size._advance, False

    def third(*arguments: Any, **named: Any) -> Any:
        if shrinking:  # the engine's own evictions are none of the shrinking's
            calls.append(inner)
        if not shrinking or len(calls) != 3:
            return right(*arguments, **named)
        if late:
            right(*arguments, **named)
        raise RuntimeError("device lost")

    def advancing(*arguments: Any) -> Any:
        nonlocal shrinking
        shrinking = True
        try:
            return advance(*arguments)
        finally:
            shrinking = False

    monkeypatch.setattr(holder, name, third)
    monkeypatch.setattr(engine.size, "_advance", advancing)
    reports: list[CompactionReport] = []
    engine.size.resize(110, done=reports.append)
    while engine.size.active:
        engine.step()
    assert (reports[0].outcome, reports[0].reason) == (Outcome.FAILED, "RuntimeError: device lost")
    assert states_of(engine).count(RESERVED) == 1
    assert engine.size.blocks == 201
    check_books(engine)
    engine.size.resize(110, done=reports.append)
    while engine.scheduler.has_work or engine.size.active:
        engine.step()
    assert reports[1].outcome is Outcome.REACHED
    assert set(states_of(engine)[110:]) == {RESERVED}
    check_books(engine)


def test_what_comes_while_a_pool_shrinks_is_held_to_its_coming_size(make_engine: EngineMaker) -> None:
    def request(index: int, prompt: int, output: int) -> Sequence:
        return sequence_of(TraceRequest(index, 0.0, prompt, output, (9000 + index,)), 4)

    engine = make_engine(blocks=101, block_tokens=4, headroom=0.0, prefix_cache=False)
    for index in range(10):
        assert engine.submit(request(index, 36, 20 if index > 5 else 4))
    engine.step()
    engine.step()
    reports: list[CompactionReport] = []
    engine.size.resize(51, done=reports.append)
    assert not engine.submit(request(10, 240, 8))
    assert not engine.submit(request(11, 40, 250))
    assert engine.submit(request(12, 100, 90))
    while engine.size.active:
        engine.step()
    assert reports[0].outcome is Outcome.REACHED
    for _ in range(400):
        engine.step()
    assert not engine.scheduler.has_work
    assert (engine.report().served_requests, engine.report().rejected_requests) == (11, 2)
    engine.size.resize(101)
    assert engine.submit(request(13, 240, 8))
    # A sequence that came past `submit` keeps the pool as large as it needs it.
    engine.size.resize(70, done=reports.append)
    engine.scheduler.add(request(14, 300, 80))
    while engine.size.active:
        engine.step()
    assert reports[1].outcome is Outcome.PARTIAL
    assert "380 tokens need 95 blocks; the pool has 69" in reports[1].reason
    assert engine.pool.usable_blocks == 100


@pytest.mark.parametrize("seed", range(40))
def test_a_tail_plan_moves_each_used_block_once(seed: int) -> None:
    dice = np.random.default_rng(seed)
    states = dice.choice([FREE, CACHED, USED, PINNED, RESERVED], size=60, p=[0.3, 0.2, 0.3, 0.1, 0.1]).astype(np.uint8)
    owners = np.where(states == USED, dice.integers(1, 4, 60), 0)
    keep = int(dice.integers(1, 60))
    limit = None if seed % 2 else int(dice.integers(0, 8))
    plan = plan_tail(states, keep=keep, owners=owners, positions=np.arange(60), max_moves=limit)
    sources, destinations = plan.moves[:, 0], plan.moves[:, 1]
    tail_used = np.flatnonzero(states[keep:] == USED) + keep
    room = int((states[:keep] <= CACHED).sum())
    assert (
        sources.tolist()
        == tail_used[tail_used.size - min(tail_used.size, room, 99 if limit is None else limit) :].tolist()
    )
    assert len(set(destinations.tolist())) == len(destinations)
    assert (destinations < keep).all()
    assert (states[destinations] <= CACHED).all()
    emptied = sources.size == tail_used.size and not (states[keep:] == PINNED).any()
    assert plan.meets_target == emptied
    assert plan.limited == (sources.size < tail_used.size)


def test_a_tail_plan_refuses_what_is_no_pool() -> None:
    with pytest.raises(PoolError):
        plan_tail([[0]], keep=0)
    with pytest.raises(SettingsError):
        plan_tail([0, 0], keep=3)


# Elastic


@pytest.mark.parametrize("evict", [False, True])
def test_emptied_pages_go_to_the_host_and_come_back(evict: bool, make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=2048, elastic=True, prefix_cache=evict)
    assert engine.elastic is not None
    consumer: Any = engine.compaction.consumer
    consumer._evict = evict
    gc.collect()  # else memory of engines that went before may leave while this is measured
    scattered(engine, 60)
    held = engine.elastic.resident_bytes()
    report = compact(engine, RunSettings(target=0.05, max_step_seconds=1.0))
    returned = held - engine.elastic.resident_bytes()
    assert report.outcome is Outcome.REACHED
    assert report.given_back_bytes_predicted is not None
    assert report.given_back_bytes_predicted > engine.cache.nbytes // 2
    assert report.given_back_bytes == engine.elastic.away_bytes == report.given_back_bytes_predicted
    assert returned >= 0.95 * report.given_back_bytes_predicted
    assert engine.verify_all() == []
    again = compact(engine, RunSettings(target=0.05, max_step_seconds=1.0))
    assert again.given_back_bytes == again.given_back_bytes_predicted
    away = engine.elastic.away_bytes
    scattered(engine, 200)
    assert engine.verify_all() == []
    taken = engine.elastic.taken_again_bytes
    assert 0 < taken == away - engine.elastic.away_bytes
    # A block is taken whole, and the kernel gives back only those of its pages that were written since.
    assert engine.elastic.resident_bytes() - (held - returned) >= 0.7 * taken


def test_what_is_allocated_meanwhile_is_not_given_back(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=2048, elastic=True, prefix_cache=False)
    scattered(engine, 60)
    reports: list[CompactionReport] = []
    engine.compaction.defaults = RunSettings(max_step_seconds=1e-9)
    engine.compaction.start(RunSettings(target=0.05, max_step_seconds=1.0), done=reports.append)
    while engine.compaction._report is None:
        engine.compaction.step()
    scattered(engine, 300)  # each of its steps gives one slab back
    while engine.compaction.active:
        engine.step()
    report = reports[0]
    assert report.given_back_bytes is not None
    assert report.given_back_bytes_predicted is not None
    assert 0 < report.given_back_bytes < report.given_back_bytes_predicted
    assert engine.verify_all() == []


def test_only_whole_pages_are_returned() -> None:
    cache = KVCache(named_geometry("stories260K"), 64)  # 10 KiB a block: two and a half pages, so that neighbours share
    pages = ElasticPages(cache)
    assert pages.slab_blocks % 2 == 0
    free = np.ones(64, np.bool_)
    free[[5, 63]] = False
    # Blocks 0 to 4 end in the middle of page 12, and block 6 begins page 15; 62 ends in the middle of page 157.
    assert pages.predict(0, free) == (12 + 157 - 15) * 4096
    cache.blocks.fill_(1.0)
    assert pages.give_back(0, free) == (12 + 157 - 15) * 4096
    assert pages.give_back(0, free) == 0
    raw = cache.blocks.reshape(-1, 2048)  # a page of two-byte elements in each row
    assert not bool(raw[:12].any())
    assert bool((cache.blocks[5] == 1.0).all())
    assert bool(raw[12:15].all())
    assert not bool(raw[15:157].any())
    assert bool(raw[157:].all())
    pages.take([10, 11, 59])  # 10 and 11 share page 27
    assert pages.taken_again_bytes == (3 + 2 + 3) * 4096
    assert pages.away_bytes == (12 + 157 - 15 - 8) * 4096
    # Blocks 8 to 13 are pages 20 to 34, of which the host holds 25 to 29.
    assert pages.predict(8, np.ones(6, np.bool_)) == 5 * 4096
    pages.take([])
    free[63] = True
    assert pages.give_back(63, free[63:]) == 2 * 4096  # the last pages, of which 157 is shared


def test_memory_of_a_device_is_not_returned() -> None:
    cache = KVCache(named_geometry("test-tiny"), 4)
    cache.memory = None
    cache.device = torch.device("cuda")
    with pytest.raises(SettingsError, match="not supported here: the KV cache lies on cuda"):
        ElasticPages(cache)


def test_smaps_are_read_by_mapping(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f0000000000-7f0000004000 rw-p 00000000 00:00 0 \nSize:  16 kB\nRss:   12 kB\n"
        "7f0000008000-7f000000c000 rw-p 00000000 00:00 0 \nSize:  16 kB\nRss:    8 kB\n"
        "7f0000010000-7f0000014000 rw-p 00000000 00:00 0 \nSize:  16 kB\nRss:    4 kB\n"
    )
    assert resident_bytes(0x7F0000000000, 0x7F0000004000, smaps) == 12 * 1024
    assert resident_bytes(0x7F0000003000, 0x7F0000012000, smaps) == 24 * 1024
    assert resident_bytes(0x7F0000004000, 0x7F0000008000, smaps) == 0
