"""Compaction in steps, on an in-memory pool whose blocks hold numbers that tell whose they are; and with faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_shim.compaction.compactor import Compactor
from engine_shim.compaction.mover import BlockFacts, Moves, MoveSwitch
from engine_shim.compaction.planning import plan_moves
from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import CompactionRun, Phase, RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE
from engine_shim.errors import SettingsError
from engine_shim.layout import BlockState

BLOCK_BYTES = 1024
FREE, CACHED, USED, PINNED, RESERVED = BlockState


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A paged pool and its tables; contents are numbers. Implements Mover."""

    block_bytes = BLOCK_BYTES
    keeps_cached = False

    def __init__(self, blocks: int, clock: Clock, move_seconds: float = 0.0001) -> None:
        self.blocks, self.clock, self.move_seconds = blocks, clock, move_seconds
        self.contents = [-1] * blocks
        self.tables: dict[int, list[int]] = {}
        self.references = np.zeros(blocks, np.int64)
        self.owners, self.positions = np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32)
        self.cached: dict[int, int] = {}  # block to the number that its hash promises
        self.held: set[int] = set()  # pinned, reserved by a move, or never allocatable
        self.reserved: set[int] = set()
        self.fault: Callable[[str, Moves], None] = lambda what, moves: None
        self.vetoed: set[int] = set()
        self.why_not = ""
        self.peak_chunk = 0

    # What an engine does

    def allocatable(self) -> list[int]:
        return [b for b in range(self.blocks) if not self.references[b] and b not in self.held | self.reserved]

    def start(self, sequence: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.grow(sequence, block)

    def grow(self, sequence: int, block: int) -> None:
        assert block in self.allocatable()
        table = self.tables.setdefault(sequence, [])
        self.cached.pop(block, None)
        self.contents[block] = sequence * 1000 + len(table)
        self.references[block] = 1
        self.owners[block], self.positions[block] = sequence, len(table)
        table.append(block)

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        self.references[self.tables[child]] += 1

    def finish(self, sequence: int, *, keep: bool = False) -> None:
        for block in self.tables.pop(sequence):
            self.references[block] -= 1
            if not self.references[block]:
                self.owners[block] = self.positions[block] = 0
                if keep:
                    self.cached[block] = self.contents[block]

    def check(self) -> None:
        """Every live block holds what its sequence wrote; every cached one what its hash promises; counts add up."""
        found = np.zeros(self.blocks, np.int64)
        for sequence, table in self.tables.items():
            root = sequence % 1000
            assert [self.contents[block] for block in table] == [root * 1000 + i for i in range(len(table))]
            np.add.at(found, table, 1)
        assert np.array_equal(found, self.references)
        for block, promised in self.cached.items():
            assert self.references[block] == 0
            assert self.contents[block] == promised
        assert not self.reserved

    # Mover

    def _call(self, what: str, moves: Moves) -> None:
        self.fault(what, moves)

    def refusal(self) -> str:
        return self.why_not

    def columns(self) -> BlockFacts:
        return self.facts(np.arange(self.blocks))

    def facts(self, blocks: NDArray[np.int64]) -> BlockFacts:
        self._call("facts", np.column_stack((blocks, blocks)))
        states = [
            RESERVED
            if block == 0
            else PINNED
            if block in self.held | self.reserved
            else USED
            if self.references[block]
            else CACHED
            if block in self.cached
            else FREE
            for block in blocks.tolist()
        ]
        return BlockFacts(
            np.array(states, np.uint8),
            self.owners[blocks].copy(),
            self.positions[blocks].copy(),
            self.references[blocks].copy(),
        )

    def found(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        counts = np.zeros(self.blocks, np.int64)
        for table in self.tables.values():
            np.add.at(counts, table, 1)
        return counts[blocks]

    def revalidate(self, moves: Moves) -> Moves:
        self._call("revalidate", moves)
        return np.array([row for row in moves.tolist() if row[0] not in self.vetoed], np.int64).reshape(-1, 2)

    def reserve(self, moves: Moves) -> int:
        self._call("reserve", moves)
        self.peak_chunk = max(self.peak_chunk, len(moves))
        destinations = moves[:, 1].tolist()
        self.reserved.update(destinations)
        return sum(self.cached.pop(block, None) is not None for block in destinations)

    def copy(self, moves: Moves) -> None:
        for source, destination in moves.tolist():
            self.contents[destination] = self.contents[source]
        self.clock.now += self.move_seconds * len(moves)
        self._call("copy", moves)

    def digests(self, blocks: NDArray[np.int64]) -> list[bytes]:
        return [str(self.contents[block]).encode() for block in blocks]

    def commit(self, moves: Moves) -> None:
        self._call("commit", moves)
        where = dict(moves.tolist())
        for table in self.tables.values():
            table[:] = [where.get(block, block) for block in table]
        sources, destinations = moves[:, 0], moves[:, 1]
        for column in (self.references, self.owners, self.positions):
            column[destinations] = column[sources]
            column[sources] = 0
        for source in sources.tolist():
            self.contents[source] = -1
        self.reserved.difference_update(destinations.tolist())
        self._call("committed", moves)

    def abandon(self, moves: Moves) -> None:
        self._call("abandon", moves)
        self.reserved.difference_update(moves[:, 1].tolist())

    def give_up(self, moves: Moves) -> None:
        self._call("give_up", moves)
        blocks = set(moves.ravel().tolist())
        self.reserved -= blocks
        self.held -= blocks
        for number in [number for number, table in self.tables.items() if not blocks.isdisjoint(table)]:
            for block in self.tables.pop(number):
                self.references[block] = max(0, self.references[block] - 1)
        for block in blocks:
            self.cached.pop(block, None)
            self.references[block] = self.owners[block] = self.positions[block] = 0


class KeepingMemory(Memory):
    """Swaps: what was cached at a destination is cached at the source afterwards."""

    keeps_cached = True

    def reserve(self, moves: Moves) -> int:
        self.aside = {b: self.cached[b] for b in moves[:, 1].tolist() if b in self.cached}
        super().reserve(moves)
        return 0

    def commit(self, moves: Moves) -> None:
        super().commit(moves)
        for source, destination in moves.tolist():
            if destination in self.aside:
                self.contents[source] = self.cached[source] = self.aside[destination]

    def abandon(self, moves: Moves) -> None:
        super().abandon(moves)
        for block, number in self.aside.items():
            self.contents[block] = self.cached[block] = number


def scattered(
    blocks: int = 200, live: float = 0.4, seed: int = 1, cached: float = 0.2, kind: type[Memory] = Memory
) -> Memory:
    """Sequences 1, 2, .. whose blocks lie anywhere; block 0 is reserved."""
    dice = np.random.default_rng(seed)
    memory = kind(blocks, Clock())
    memory.held.add(0)
    places = (dice.permutation(blocks - 1) + 1).tolist()
    sequence = 0
    for _ in range(int(blocks * live)):
        if sequence == 0 or dice.random() < 0.15:
            sequence += 1
        memory.grow(sequence, places.pop())
    for block in places[: int(blocks * cached)]:
        memory.contents[block] = memory.cached[block] = 500_000 + block
    memory.check()
    return memory


def run_to_end(
    run: CompactionRun, memory: Memory, between: Callable[[int], None] = lambda step: None
) -> CompactionReport:
    """Step until it ends; the engine does `between` after each step. The pool is checked at every boundary."""
    for step in range(2000):
        goes_on = run.step()
        memory.check()
        if not goes_on:
            report = run.report()
            assert report is not None
            return report
        assert run.report() is None
        between(step)
    raise AssertionError("the run does not end")


def make_run(memory: Memory, switch: MoveSwitch | None = None, **budgets: object) -> CompactionRun:
    return CompactionRun(memory, switch or MoveSwitch(), RunSettings(**budgets), clock=memory.clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", [False, True])
def test_a_run_reaches_its_target_and_keeps_every_content(verify: bool) -> None:
    memory = scattered()
    before = {sequence: len(table) for sequence, table in memory.tables.items()}
    report = run_to_end(make_run(memory, verify=verify), memory)
    assert report.outcome is Outcome.REACHED
    assert report.after.fragmentation is not None
    assert report.after.fragmentation <= 0.10
    assert report.after == report.predicted
    assert report.moved_blocks == report.planned_moves > 20
    assert report.moved_bytes == report.moved_blocks * BLOCK_BYTES
    assert report.verified_blocks == (report.moved_blocks if verify else 0)
    assert report.cached_lost == report.cached_lost_predicted
    assert report.before.sequence_runs is not None
    assert report.after.sequence_runs is not None
    assert report.after.sequence_runs < report.before.sequence_runs
    assert (report.dropped, report.replans, report.allocated_in_window) == ({}, 0, 0)
    assert {sequence: len(table) for sequence, table in memory.tables.items()} == before
    assert json.loads(json.dumps(report.to_json()))["outcome"] == "reached"


@pytest.mark.parametrize("fails", [False, True])
def test_cached_contents_can_be_kept(fails: bool) -> None:
    memory = scattered(live=0.45, cached=0.54, kind=KeepingMemory)
    promised = sorted(memory.cached.values())
    if fails:
        raise_at(memory, "commit", 3)
    report = run_to_end(make_run(memory, verify=True), memory)
    assert report.outcome is (Outcome.FAILED if fails else Outcome.REACHED)
    assert report.cached_lost_predicted == report.cached_lost == 0
    assert sorted(memory.cached.values()) == promised


def test_what_is_not_kept_is_lost_as_predicted() -> None:
    memory = scattered(live=0.45, cached=0.54)
    report = run_to_end(make_run(memory), memory)
    assert report.replans == 0
    assert report.cached_lost == report.cached_lost_predicted > 0


def share_of(memory: Memory, share: float, *, idle: bool = False, runs: int = 3) -> tuple[float, float]:
    """The share of the time that runs which follow each other take, in an engine whose steps take 0.3 ms, and the
    longest of their boundaries. All but the first find nothing to do but look."""
    compactor = Compactor(memory, memory.blocks, max_time_share=share, clock=memory.clock)
    columns = memory.columns

    def look() -> BlockFacts:
        memory.clock.now += 0.001
        return columns()

    memory.columns = look  # type: ignore[method-assign]
    reports: list[CompactionReport] = []
    began, spent, longest = memory.clock.now, 0.0, 0.0
    while len(reports) < runs:
        if not compactor.active:
            compactor.start(RunSettings(target=0.0), done=reports.append)
        before = memory.clock.now
        compactor.step(idle=idle)
        assert compactor.rested <= (memory.clock.now == before)
        spent, longest = spent + memory.clock.now - before, max(longest, memory.clock.now - before)
        memory.check()
        memory.clock.now += 0.0003
    assert reports[0].outcome is Outcome.REACHED
    assert reports[0].moved_blocks > 100
    while compactor.step() or memory.clock.now - began < spent / share:  # what is owed at the end is owed for the next
        memory.clock.now += 0.0003
    return spent / (memory.clock.now - began), longest


@pytest.mark.parametrize("share", [0.015, 0.1])
def test_runs_together_keep_to_their_share_of_an_engines_time(share: float) -> None:
    taken, longest = share_of(scattered(blocks=600), share)
    assert taken == pytest.approx(share, rel=0.05)
    assert longest <= 0.002 + 1e-9
    assert share_of(scattered(blocks=600), 1.0)[0] > 0.5  # without a bound


def test_an_idle_engines_time_is_of_no_use_to_others() -> None:
    memory = scattered(blocks=600)
    began = memory.clock.now
    share_of(memory, 1.0)
    unbounded = memory.clock.now - began
    memory = scattered(blocks=600)
    began = memory.clock.now
    share_of(memory, 1.0, idle=True)
    assert memory.clock.now - began == pytest.approx(unbounded)
    memory = scattered(blocks=600)
    compactor = Compactor(memory, memory.blocks, max_time_share=0.015, clock=memory.clock)
    compactor.start(RunSettings(target=0.0))
    while compactor.step(idle=True):
        assert not compactor.rested
    assert memory.clock.now - 100.0 < unbounded


def resting() -> tuple[Memory, Compactor, list[CompactionReport]]:
    """A run that rests between two chunks."""
    memory = scattered(blocks=600)
    compactor = Compactor(memory, memory.blocks, max_time_share=MAX_TIME_SHARE, clock=memory.clock)
    reports: list[CompactionReport] = []
    compactor.start(RunSettings(target=0.0, max_chunk_moves=2), done=reports.append)
    while not compactor.rested:
        assert compactor.step()
    return memory, compactor, reports


def test_a_run_that_rests_ends_when_it_is_told_to() -> None:
    _, compactor, reports = resting()
    assert compactor.step()
    compactor.abort("enough")
    assert not compactor.step()
    assert [(report.outcome, report.reason) for report in reports] == [(Outcome.ABORTED, "enough")]
    memory, compactor, reports = resting()
    compactor.set_moving(False)
    assert not compactor.step()
    assert reports[0].outcome is Outcome.ABORTED
    memory.check()


def test_a_run_that_rests_ends_in_time() -> None:
    memory, compactor, reports = resting()
    memory.clock.now += 61.0
    assert not compactor.step()
    assert reports[0].outcome is Outcome.PARTIAL
    assert reports[0].seconds > 60.0


def test_what_a_run_looks_at_when_it_ends_counts_even_where_it_rested() -> None:
    """Else runs without time, one after the other, would look at the pool as often as they are asked for."""
    memory, compactor, reports = resting()
    columns = memory.columns

    def look() -> BlockFacts:
        memory.clock.now += 0.2
        return columns()

    memory.columns = look  # type: ignore[method-assign]
    compactor.abort("enough")
    assert not compactor.step()
    assert reports[0].outcome is Outcome.ABORTED
    memory.clock.now += 0.2 / MAX_TIME_SHARE - 0.5
    assert compactor.owes


def test_later_runs_begin_with_chunks_that_fit() -> None:
    memory = scattered(blocks=600)
    compactor = Compactor(memory, memory.blocks, clock=memory.clock)
    chunks = []
    for _ in range(2):
        compactor.start(RunSettings(target=0.0, max_moves=8, max_step_seconds=0.003))
        while compactor.step():
            pass
        report = compactor.last_report
        assert report is not None
        assert report.moved_blocks == 8
        chunks.append(report.chunks)
    assert chunks == [4, 1]  # 1, 2, 4 and the last; then all at once


def test_moves_that_are_dropped_do_not_make_others_seem_free() -> None:
    memory = scattered(blocks=600)
    sources = plan_moves(memory.columns().states).moves[:, 0].tolist()
    assert len(sources) > 100
    memory.vetoed = set(sources[:60])
    report = run_to_end(make_run(memory), memory)
    assert report.dropped["engine_refused"] == 60
    assert report.moved_blocks > 40
    assert report.longest_stall_seconds <= 0.002 + 1e-9


def refill(memory: Memory, run: CompactionRun, count: int) -> None:
    """Sequence 900 takes so many blocks of the window, the emptied ones first."""
    window = run.window
    if window is not None:
        inside = [b for b in memory.allocatable() if window.start <= b < window.start + window.length]
        memory.start(900, inside[:count])


@pytest.mark.parametrize(
    ("taken", "until", "hopeless"), [(3, 1000, True), (0, 0, False), (100, 1, False)], ids=["filled", "left", "once"]
)
def test_a_window_that_fills_as_fast_as_it_empties_ends_the_run(taken: int, until: int, hopeless: bool) -> None:
    memory = scattered(blocks=2000, live=0.5)
    run = make_run(memory, max_chunk_moves=2, max_step_seconds=1e-9, max_seconds=1e9)
    report = run_to_end(run, memory, lambda step: refill(memory, run, taken if step < until else 0))
    if hopeless:
        assert report.outcome is Outcome.PARTIAL
        assert "fills as fast as it is emptied" in report.reason
        assert report.moved_blocks < report.planned_moves / 2
    else:
        assert report.outcome is Outcome.REACHED
        assert report.moved_blocks >= report.planned_moves


def test_the_budgets_of_a_step_hold() -> None:
    memory = scattered(blocks=600)
    run = make_run(memory, max_chunk_moves=6, max_step_seconds=0.002)
    report = run_to_end(run, memory)
    assert memory.peak_chunk == 6
    # Copies cost 0.1 ms here, so that 2 ms take 20 of them at most.
    assert 0 < report.longest_stall_seconds <= 0.002 + 1e-9  # sums of tenths are not exact
    assert report.seconds == pytest.approx(report.moving_seconds)
    assert report.moving_seconds == pytest.approx(report.moved_blocks * memory.move_seconds)
    memory = scattered(blocks=600)
    run_to_end(make_run(memory, max_chunk_bytes=3 * BLOCK_BYTES + 1, max_step_seconds=1.0), memory)
    assert memory.peak_chunk == 3
    # A move that does not fit the budget is made all the same, one a step.
    memory = scattered()
    memory.move_seconds = 0.5
    report = run_to_end(make_run(memory, max_seconds=1e9), memory)
    assert memory.peak_chunk == 1
    assert report.longest_stall_seconds == pytest.approx(0.5)


def test_a_budget_of_moves_ends_the_run_at_the_best_within_it() -> None:
    memory = scattered()
    report = run_to_end(make_run(memory, max_moves=7), memory)
    assert report.outcome is Outcome.BEST
    assert 0 < report.moved_blocks <= 7
    assert report.after == report.predicted
    assert "allowed" in report.reason


def test_a_run_out_of_time_stops_in_good_order() -> None:
    memory = scattered()
    report = run_to_end(make_run(memory, max_step_seconds=0.0005, max_seconds=0.001), memory)
    assert report.outcome is Outcome.PARTIAL
    assert "out of time" in report.reason
    assert 0 < report.moved_blocks < report.planned_moves


def finish(memory: Memory) -> None:
    memory.finish(next(iter(memory.tables)), keep=True)


def preempt(memory: Memory) -> None:
    """A sequence loses its blocks and comes back on others, which may be those that it had."""
    sequence = next(iter(memory.tables))
    count = len(memory.tables[sequence])
    memory.finish(sequence)
    memory.start(sequence, memory.allocatable()[-count:])


def fork(memory: Memory) -> None:
    parent = next((sequence for sequence in memory.tables if sequence < 1000), None)
    if parent is not None and parent + 1000 not in memory.tables:
        memory.fork(parent, parent + 1000)


@pytest.mark.parametrize("change", [finish, preempt, fork])
def test_a_sequence_that_changed_since_the_plan_drops_its_moves(change: Callable[[Memory], None]) -> None:
    memory = scattered()
    seen: list[int] = []

    def between(step: int) -> None:
        if step == 0:
            change(memory)
            memory.check()
            seen.append(step)

    report = run_to_end(make_run(memory, max_chunk_moves=3, max_step_seconds=0.0002), memory, between)
    assert seen
    assert sum(report.dropped.values()) > 0
    assert set(report.dropped) <= {"source_released", "source_changed", "source_shared", "destination_taken"}
    assert report.outcome in (Outcome.REACHED, Outcome.PARTIAL)
    # What could not move in the first plan moves in a second one.
    assert report.after.fragmentation is not None
    assert report.after.fragmentation <= 0.10


def test_an_allocation_in_the_window_is_counted_and_planned_around() -> None:
    memory = scattered(live=0.3)
    run = make_run(memory, max_chunk_moves=2, max_step_seconds=0.0002)

    def between(step: int) -> None:
        if step == 3:
            assert run.window is not None
            start, length = run.window
            memory.start(999, [block for block in memory.allocatable() if start <= block < start + length][::4])

    report = run_to_end(run, memory, between)
    assert run.window is None
    assert report.allocated_in_window == len(memory.tables[999])
    assert report.replans >= 1
    assert report.outcome is Outcome.REACHED
    assert report.moved_blocks > report.planned_moves


def test_a_pool_that_changes_faster_than_plans_ends_partial() -> None:
    memory = scattered(live=0.3)
    dice = np.random.default_rng(2)

    def between(step: int) -> None:
        memory.finish(next(iter(memory.tables)))
        memory.start(100 + step, dice.choice(memory.allocatable(), 8, replace=False).tolist())

    report = run_to_end(make_run(memory, max_chunk_moves=1, max_step_seconds=0.0001, max_replans=2), memory, between)
    assert report.outcome is Outcome.PARTIAL
    assert report.replans == 2
    assert "changed faster" in report.reason


def test_references_that_stand_in_no_table_hold_a_block_in_place() -> None:
    memory = scattered(live=0.3)
    where = {sequence: list(table) for sequence, table in memory.tables.items()}
    count = memory.found

    def found(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequence 1 has let go of its table; a connector, say, still holds its blocks."""
        missing: NDArray[np.int64] = count(blocks) - np.isin(blocks, where[1])
        return missing

    memory.found = found  # type: ignore[method-assign]
    report = run_to_end(make_run(memory), memory)
    assert set(report.dropped) == {"references_unaccounted"}
    assert memory.tables[1] == where[1]
    assert memory.tables != where
    assert report.moved_blocks > 0


def test_the_engines_veto_is_respected_and_planned_around() -> None:
    memory = scattered(live=0.3)
    where = {sequence: list(table) for sequence, table in memory.tables.items()}
    memory.vetoed = {where[1][0], where[2][0]}
    report = run_to_end(make_run(memory), memory)
    assert report.dropped.get("engine_refused", 0) <= 2
    assert (memory.tables[1][0], memory.tables[2][0]) == (where[1][0], where[2][0])
    memory = scattered(live=0.3)
    memory.vetoed = set(range(200))
    report = run_to_end(make_run(memory), memory)
    assert (report.outcome, report.moved_blocks) == (Outcome.PARTIAL, 0)
    assert report.dropped["engine_refused"] >= report.planned_moves


# Stopping


def test_an_abort_between_chunks_leaves_what_is_done() -> None:
    memory = scattered()
    run = make_run(memory, max_step_seconds=0.0002)
    report = run_to_end(run, memory, lambda step: run.abort("the operator") if step == 4 else None)
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "the operator")
    assert 0 < report.moved_blocks < report.planned_moves
    assert report.after.largest_run is not None
    assert not run.step()


def test_the_kill_switch_works_in_the_middle_of_a_step() -> None:
    memory = scattered()
    switch = MoveSwitch()
    memory.fault = lambda what, moves: switch.off("kill switch") if what == "committed" else None
    report = run_to_end(make_run(memory, switch, max_step_seconds=1.0), memory)
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "kill switch")
    assert report.chunks == 1
    memory.fault = lambda what, moves: None
    report = run_to_end(make_run(memory, switch), memory)
    assert (report.outcome, report.moved_blocks) == (Outcome.REFUSED, 0)
    assert switch.on()
    assert run_to_end(make_run(memory, switch), memory).outcome is Outcome.REACHED


def test_an_engine_that_does_not_allow_moving_refuses_the_run() -> None:
    memory = scattered()
    memory.why_not = "a KV connector is configured"
    report = run_to_end(make_run(memory), memory)
    assert (report.outcome, report.reason, report.planned_moves) == (Outcome.REFUSED, memory.why_not, 0)
    assert report.after.fragmentation is not None


def test_a_large_pool_is_planned_on_another_thread() -> None:
    memory = scattered()
    run = make_run(memory, plan_here_blocks=10)
    assert run.step()
    assert run.phase is Phase.PLANNING
    assert run.step()  # nothing is done while the plan is not there
    while run.step():
        if run.phase is Phase.PLANNING:
            thread = threading.Thread(target=run.plan)
            thread.start()
            thread.join()
    memory.check()
    report = run.report()
    assert report is not None
    assert report.outcome is Outcome.REACHED


# Faults


def test_a_run_ends_while_the_thread_that_measured_it_still_does() -> None:
    """An engine without work takes one step when it is woken, and none for a thread's end."""
    memory = scattered(blocks=600)
    reports: list[CompactionReport] = []
    measured, engine_waits, woken = threading.Event(), threading.Event(), threading.Event()

    def wake() -> None:
        if threading.current_thread().name == "compaction-report":
            measured.set()
            assert engine_waits.wait(60)
            compactor.step()  # what the engine does now, while this thread has not ended
            woken.set()

    defaults = RunSettings(plan_here_blocks=100)
    compactor = Compactor(memory, memory.blocks, defaults=defaults, wake=wake, clock=memory.clock)
    compactor.start(done=reports.append)
    while not measured.is_set():
        if compactor.wants_step:
            compactor.step()
    engine_waits.set()
    assert woken.wait(60)
    assert reports[0].outcome is Outcome.REACHED


def raise_at(memory: Memory, name: str, count: int = 2) -> list[str]:
    """The mover raises at the count-th call of this name; returns the calls so far, as they come."""
    calls: list[str] = []

    def fault(what: str, moves: Moves) -> None:
        calls.append(what)
        if what == name and calls.count(name) == count:
            raise RuntimeError(f"{name} broke")

    memory.fault = fault
    return calls


@pytest.mark.parametrize("name", ["revalidate", "reserve", "copy", "commit"])
def test_a_mover_that_raises_fails_the_run_and_leaves_the_pool_whole(name: str) -> None:
    memory = scattered()
    switch = MoveSwitch()
    raise_at(memory, name)
    report = run_to_end(make_run(memory, switch, max_chunk_moves=4), memory)
    assert report.outcome is Outcome.FAILED
    assert report.reason == f"RuntimeError: {name} broke"
    assert report.moved_blocks > 0
    assert report.after.fragmentation is not None
    # The pool is proven whole, so that another run may try.
    assert switch.reason == ""
    memory.fault = lambda what, moves: None
    assert run_to_end(make_run(memory, switch), memory).outcome is Outcome.REACHED


def test_a_pool_that_cannot_be_read_fails_the_run_with_nothing_known() -> None:
    memory = scattered()
    memory.fault = lambda what, moves: (_ for _ in ()).throw(OSError("gone")) if what == "facts" else None
    report = run_to_end(make_run(memory), memory)
    assert (report.outcome, report.reason) == (Outcome.FAILED, "OSError: gone")
    assert report.before.fragmentation is report.after.fragmentation is None


def failed_and_off(memory: Memory, **budgets: object) -> str:
    """Run to the end without looking at the contents; moving must be off for good. Returns the reason."""
    switch = MoveSwitch()
    run = make_run(memory, switch, **budgets)
    while run.step():
        pass
    report = run.report()
    assert report is not None
    assert report.outcome is Outcome.FAILED
    assert switch.failed
    assert switch.reason == report.reason
    assert not switch.on()
    switch.off("by hand")
    assert switch.reason == report.reason
    assert not make_run(memory, switch).step()
    if "computed anew" in report.reason:
        memory.check()  # nobody reads what was left in disorder
    return report.reason


def leave_out_last_copy(memory: Memory) -> None:
    original = memory.copy
    memory.copy = lambda moves: original(moves[:-1])  # type: ignore[method-assign]


def test_verify_mode_finds_a_copy_left_out_before_it_is_committed() -> None:
    memory = scattered()
    leave_out_last_copy(memory)
    assert "contents differ" in failed_and_off(memory, verify=True)
    memory.check()


def test_without_verify_mode_a_copy_left_out_is_seen_by_the_check_of_contents() -> None:
    memory = scattered()
    leave_out_last_copy(memory)
    run = make_run(memory)
    while run.step():
        pass
    with pytest.raises(AssertionError):
        memory.check()


def test_a_table_that_is_not_rewritten_is_found() -> None:
    memory = scattered()
    original = memory.commit

    def commit(moves: Moves) -> None:
        kept = {sequence: list(table) for sequence, table in memory.tables.items()}
        original(moves)
        touched = next(sequence for sequence, table in kept.items() if table != memory.tables[sequence])
        memory.tables[touched] = kept[touched]

    memory.commit = commit  # type: ignore[method-assign]
    assert "still named by a table at its old place" in failed_and_off(memory)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("references", "not in use at its new place"),
        ("owners", "of another owner or position"),
        ("positions", "of another owner or position"),
    ],
)
def test_a_column_that_does_not_follow_is_found(column: str, match: str) -> None:
    memory = scattered()
    original = memory.commit

    def commit(moves: Moves) -> None:
        original(moves)
        getattr(memory, column)[moves[:, 1]] = 0

    memory.commit = commit  # type: ignore[method-assign]
    # Every sequence has a position 0 that would look right; a chunk of several blocks has others.
    assert match in failed_and_off(memory, max_chunk_moves=50)


def test_a_source_that_is_not_freed_is_found() -> None:
    memory = scattered()
    original = memory.commit

    def commit(moves: Moves) -> None:
        original(moves)
        memory.held.update(moves[:, 0].tolist())

    memory.commit = commit  # type: ignore[method-assign]
    assert "not free at its old place" in failed_and_off(memory)


def test_a_commit_that_raises_half_way_turns_moving_off() -> None:
    memory = scattered()
    raise_at(memory, "committed", 1)
    reason = failed_and_off(memory)
    assert "left the pool changed" in reason
    assert "committed broke" in reason
    assert "computed anew" in reason


def test_blocks_that_cannot_be_given_up_are_said_to_be() -> None:
    memory = scattered()

    def fault(what: str, moves: Moves) -> None:
        if what in ("committed", "give_up"):
            raise RuntimeError(f"{what} broke")

    memory.fault = fault
    reason = failed_and_off(memory)
    assert "committed broke" in reason
    assert "giving its blocks up failed: RuntimeError('give_up broke')" in reason


def test_a_failure_to_back_out_turns_moving_off() -> None:
    memory = scattered()

    def fault(what: str, moves: Moves) -> None:
        if what in ("copy", "abandon"):
            raise RuntimeError(f"{what} broke")

    memory.fault = fault
    assert "backing out failed too" in failed_and_off(memory)


def test_moved_blocks_that_cannot_be_checked_turn_moving_off() -> None:
    memory = scattered()
    committed: list[str] = []

    def fault(what: str, moves: Moves) -> None:
        if what == "committed":
            committed.append(what)
        if what == "facts" and committed:
            raise RuntimeError("no facts")

    memory.fault = fault
    assert "cannot be checked" in failed_and_off(memory)


def test_an_abandoned_destination_does_not_stay_findable() -> None:
    memory = scattered(live=0.45, cached=0.54)  # hardly a free block, so that cached ones are overwritten
    raise_at(memory, "commit", 1)
    report = run_to_end(make_run(memory), memory)  # checks that what is cached is what its hash promises
    assert report.outcome is Outcome.FAILED


@given(st.integers(0, 10_000), st.floats(0.05, 0.9), st.floats(0, 0.3), st.data())
@settings(max_examples=40)
def test_any_traffic_between_steps_keeps_every_content(
    seed: int, live: float, share: float, data: st.DataObject
) -> None:
    memory = scattered(120, live, seed, min(share, 0.95 - live))
    dice = np.random.default_rng(seed)

    def between(step: int) -> None:
        for _ in range(data.draw(st.integers(0, 2))):
            free = memory.allocatable()
            what = dice.integers(0, 4)
            if what == 0 and len(memory.tables) > 1:
                memory.finish(list(memory.tables)[int(dice.integers(len(memory.tables)))], keep=bool(dice.integers(2)))
            elif what == 1 and len(free) > 3:
                fresh = next(number for number in range(1, 1000) if {number, number + 1000}.isdisjoint(memory.tables))
                memory.start(fresh, dice.choice(free, 3, replace=False).tolist())
            elif what == 2 and memory.tables:
                fork(memory)
            elif what == 3 and memory.tables:
                preempt_one = next(iter(memory.tables))
                if preempt_one < 1000 and preempt_one + 1000 not in memory.tables:
                    preempt(memory)
        memory.check()

    report = run_to_end(make_run(memory, max_chunk_moves=5, max_step_seconds=0.0003, verify=True), memory, between)
    assert report.outcome in (Outcome.REACHED, Outcome.PARTIAL, Outcome.BEST)


@pytest.mark.parametrize(
    "budgets",
    [
        {"target": 2},
        {"max_moves": -1},
        {"max_chunk_moves": 0},
        {"max_chunk_bytes": 0},
        {"max_step_seconds": 0},
        {"max_seconds": float("nan")},
        {"max_replans": -1},
        {"plan_here_blocks": -1},
    ],
)
def test_settings_that_allow_nothing_are_refused(budgets: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(budgets))):
        RunSettings(**budgets)  # type: ignore[arg-type]
