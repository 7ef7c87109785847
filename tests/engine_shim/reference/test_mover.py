"""Live blocks move while the engine serves: contents, tables, prefixes, counts and the map stay right, or it shows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.compaction.mover import MoveSwitch
from engine_shim.compaction.planning import MovePlan
from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import CompactionRun, Phase, RunSettings
from engine_shim.errors import ControlRefused, PoolError
from engine_shim.layout import BlockState
from engine_shim.pool.policies import POLICIES
from engine_shim.pool.prefix import hash_prefix_blocks
from engine_shim.reference.block_copy import BlockCopier
from engine_shim.reference.block_tables import BlockTables
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.engine import Engine
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
BLOCKS = 128
EAGER = RunSettings(target=0.02, max_step_seconds=1.0)  # every run to its end in a few steps, however slow the machine


def requests(count: int) -> list[TraceRequest]:
    """Prompts of 1 to 14 blocks; every third shares the first block of 512 tokens with others."""
    asked = []
    for index in range(count):
        shared = index % 3 == 2
        hash_ids = (7, 100 + index) if shared else (1000 + index,)
        prompt = 560 if shared else 16 + 37 * (index % 6)
        asked.append(TraceRequest(index, 0.0, prompt, 20 + 7 * (index % 8), hash_ids))
    return asked


def sequences(engine: Engine, count: int, *, vocabulary: int | None = None, samples: int = 1) -> list[Sequence]:
    return [
        sequence_of(request, engine.pool.block_tokens, vocabulary=vocabulary, samples=samples)
        for request in requests(count)
    ]


def drive(engine: Engine, work: list[Sequence], each_step: Callable[[int], None], *, apart: int = 2) -> None:
    """Submit one sequence every `apart` steps, and serve all to the end."""
    upcoming = iter(work)
    step = 0
    left = True
    while left or engine.scheduler.has_work:
        if step % apart == 0:
            sequence = next(upcoming, None)
            left = sequence is not None
            if sequence is not None:
                assert engine.submit(sequence)
        each_step(step)
        engine.step()
        step += 1
        assert step < 5000


class Compacting:
    """Starts a run whenever none is on; keeps the reports and the number of live blocks."""

    def __init__(self, engine: Engine, wanted: RunSettings = EAGER, *, verify: bool = True) -> None:
        self.engine, self.wanted, self.verify = engine, wanted, verify
        self.reports: list[CompactionReport] = []
        self.live: list[int] = []
        self.problems: list[str] = []

    def __call__(self, step: int) -> None:
        engine = self.engine
        if not engine.compaction.active:
            engine.compaction.start(self.wanted, done=self.reports.append)
        self.live.append(engine.pool.num_used)
        if self.verify and step % 4 == 0:
            self.problems += engine.verify_all()

    @property
    def moved(self) -> int:
        return sum(report.moved_blocks for report in self.reports)

    @property
    def moved_share(self) -> float:
        return self.moved / max(1.0, float(np.mean(self.live or [1])))


def check_pool(engine: Engine) -> None:
    """References are those of the tables; policy, states and prefixes agree."""
    pool = engine.pool
    held = Counter(block for sequence in engine.scheduler.running for block in sequence.table)
    states = pool.states()
    assert engine.compaction.mover.facts(np.arange(pool.num_blocks)).references.tolist() == [
        held[block] for block in range(pool.num_blocks)
    ]
    assert pool.num_cached == int(np.count_nonzero(states == BlockState.CACHED))
    assert pool.num_free == int(np.count_nonzero(states == BlockState.FREE))
    assert pool.num_used == len(held)


# Contents


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_live_block_equals_its_pattern_while_blocks_move(
    policy: str, make_engine: EngineMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(blocks=BLOCKS, policy=policy)
    moving = Compacting(engine)
    drive(engine, sequences(engine, 40), moving)
    check_pool(engine)
    with capsys.disabled():
        print(f"\n{policy}: {moving.moved} moves, {100 * moving.moved_share:.0f} % of {np.mean(moving.live):.0f} live")
    assert moving.problems == engine.verify_all() == []
    assert moving.moved_share >= 0.05
    assert not {report.outcome for report in moving.reports} & {Outcome.FAILED, Outcome.REFUSED}
    assert sum(report.cached_lost for report in moving.reports) == 0


@pytest.mark.parametrize("samples", [1, 3])
def test_the_models_tokens_equal_a_run_without_moves(samples: int, device: str, make_engine: EngineMaker) -> None:
    tokens, moves, hits = [], [], []
    for move in (False, True):
        engine = make_engine(blocks=BLOCKS, content="model", device=device)
        work = sequences(engine, 24, vocabulary=1024, samples=samples)
        moving = Compacting(engine, verify=False)
        drive(engine, work, moving if move else lambda step: None)
        tokens.append([sequence.tokens.tolist() for sequence in work])
        moves.append(moving.moved_share)
        hits.append(engine.report().prefix_hit_tokens)
        assert engine.report().output_tokens == samples * sum(len(s.tokens) - s.prompt_tokens for s in work)
    assert tokens[0] == tokens[1]
    assert hits[0] == hits[1] > 0
    assert moves[1] >= 0.05


def leave_a_copy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = BlockCopier.copy
    monkeypatch.setattr(BlockCopier, "copy", lambda self, sources, places: copy(self, sources[:-1], places[:-1]))


def leave_a_table_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(self: BlockTables, moves: Any) -> None:
        where = dict(moves.tolist())
        touched = [s for s in self._sequences() if any(block in where for block in s.table)]
        for sequence in touched[1:]:
            for index, block in enumerate(sequence.table):
                sequence.table[index] = where.get(block, block)

    monkeypatch.setattr(BlockTables, "rename", rename)
    # The audit after each commit would stop it at once; here the contents alone must show it.
    monkeypatch.setattr("engine_shim.compaction.run.audit", lambda before, after, found: "")


@pytest.mark.parametrize("spoil", [leave_a_copy_out, leave_a_table_as_it_is])
@pytest.mark.parametrize("content", ["pattern", "model"])
def test_a_spoilt_move_shows(
    content: str, spoil: Callable[[pytest.MonkeyPatch], None], make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the two tests above: each of them turns red where a move is not whole."""
    model = content == "model"

    def serve(*, move: bool) -> tuple[list[list[int]], list[str]]:
        engine = make_engine(blocks=BLOCKS, content=content)
        work = sequences(engine, 24, vocabulary=1024 if model else None)
        moving = Compacting(engine, verify=not model)
        try:
            drive(engine, work, moving if move else lambda step: None)
        except PoolError as error:
            engine.scheduler.running.clear()  # the pool is not whole any more: nothing can be released in order
            moving.problems.append(str(error))
        return [sequence.tokens.tolist() for sequence in work], moving.problems

    right, _ = serve(move=False)
    spoil(monkeypatch)
    tokens, problems = serve(move=True)
    assert (tokens != right) if model else problems


def test_verify_mode_stops_before_a_wrong_copy_is_committed(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=BLOCKS)
    leave_a_copy_out(monkeypatch)
    moving = Compacting(engine, RunSettings(target=0.02, verify=True))
    drive(engine, sequences(engine, 24), moving)
    assert moving.problems == engine.verify_all() == []
    assert moving.moved == 0
    assert Outcome.FAILED in {report.outcome for report in moving.reports}
    assert engine.compaction.switch.failed
    assert not engine.compaction.set_moving(True)
    assert moving.reports[-1].outcome is Outcome.REFUSED
    check_pool(engine)


def test_the_audit_finds_a_table_that_was_not_rewritten(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=BLOCKS)
    monkeypatch.setattr(BlockTables, "rename", lambda self, moves: None)
    (report,) = compact(scattered(engine))
    assert report.outcome is Outcome.FAILED
    assert "still named by a table at its old place" in report.reason
    assert engine.compaction.switch.failed
    engine.scheduler.running.clear()


def test_verify_mode_passes_where_moves_are_right(device: str, make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=BLOCKS, device=device)
    (report,) = compact(scattered(engine), RunSettings(target=0.0, verify=True, max_step_seconds=1.0))
    assert report.outcome is Outcome.REACHED
    assert report.verified_blocks == report.moved_blocks > 10
    assert engine.verify_all() == []


# Between plan and chunk


def scattered(engine: Engine, *, samples: int = 1) -> Engine:
    """Serve until about half of the pool is in use, with gaps between what is."""
    work = [
        sequence_of(TraceRequest(i, 0.0, 60 + 16 * (i % 3), 120 if i % 2 else 6, (5000 + i,)), 16, samples=samples)
        for i in range(24 if samples == 1 else 12)
    ]
    for sequence in work:
        assert engine.submit(sequence)
    for _ in range(8):
        engine.step()
    assert engine.scheduler.running
    assert all(sequence.length > sequence.prompt_tokens for sequence in engine.scheduler.running)
    return engine


def compact(engine: Engine, wanted: RunSettings = EAGER) -> list[CompactionReport]:
    reports: list[CompactionReport] = []
    engine.compaction.start(wanted, done=reports.append)
    while engine.compaction.active:
        engine.compaction.step()
    return reports


def dry_run(engine: Engine) -> MovePlan:
    plans: list[MovePlan] = []
    engine.compaction.dry_run(plans.append, target=0.0)
    return plans[0]


def planned(engine: Engine, **limits: Any) -> CompactionRun:
    """A run that has a plan and has not moved anything."""
    values: dict[str, Any] = {"target": 0.0, "plan_here_blocks": 0, "max_chunk_moves": 2, "max_step_seconds": 1e-9}
    run = CompactionRun(engine.compaction.mover, MoveSwitch(), RunSettings(**(values | limits)))
    assert run.step()
    run.plan()
    assert run.phase is Phase.PLANNING
    return run


def finish(run: CompactionRun) -> CompactionReport:
    while run.step():
        run.plan()
    report = run.report()
    assert report is not None
    return report


def test_sequences_that_finish_fork_or_are_preempted_after_the_plan_are_left_alone(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    run = planned(engine)
    sources = set(dry_run(engine).moves[:, 0].tolist())
    moving = [sequence for sequence in engine.scheduler.running if sources.intersection(sequence.table)]
    finishing, forked, preempted = moving[:3]
    engine.scheduler.finish(finishing)
    engine.scheduler.release(finishing)
    engine.scheduler.branch(forked, 1)
    engine.scheduler.running.remove(preempted)
    engine.scheduler._preempt(preempted)
    report = finish(run)
    assert report.outcome in (Outcome.REACHED, Outcome.PARTIAL)
    assert {"source_released", "source_shared"} <= set(report.dropped)
    assert engine.verify_all() == []
    check_pool(engine)


def test_forked_sequences_move_together(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS), samples=2)
    before = engine.compaction.mover.columns()
    (report,) = compact(engine, RunSettings(target=0.0, max_step_seconds=1.0))
    assert report.outcome is Outcome.REACHED
    assert int((before.references > 1).sum()) > 3
    assert engine.verify_all() == []
    check_pool(engine)


def test_blocks_allocated_in_the_window_between_chunks(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    run = planned(engine)
    run.step()
    window = run.window
    assert window is not None
    inside = [b for b in range(window.start, window.start + window.length) if engine.pool.state(b) <= BlockState.CACHED]
    others = [b for b in range(BLOCKS) if b not in inside and engine.pool.state(b) <= BlockState.CACHED]
    # Fill all that is allocatable, then give back what lies outside: what stays are blocks in the window.
    taken = engine.pool.allocate(engine.pool.num_allocatable).blocks
    stays = [block for block in taken if block in inside][:3]
    assert stays
    assert others
    engine.pool.release([block for block in taken if block not in stays])
    report = finish(run)
    assert report.allocated_in_window >= len(stays)
    assert engine.verify_all() == []
    engine.pool.release(stays)
    check_pool(engine)


def test_a_block_with_a_reference_that_no_table_names_stays(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    plan = dry_run(engine)
    held = int(plan.moves[0, 0])
    engine.pool.fork([held])
    (report,) = compact(engine, RunSettings(target=0.0, max_step_seconds=1.0))
    assert report.dropped.get("references_unaccounted", 0) >= 1
    assert engine.pool.references(held) == 2
    assert engine.verify_all() == []
    engine.pool.release([held])
    check_pool(engine)


def test_blocks_in_transfer_stay(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    sequence = engine.scheduler.running[-1]
    engine.pool.pin(list(sequence.table))
    table = list(sequence.table)
    (report,) = compact(engine, RunSettings(target=0.0, max_step_seconds=1.0))
    assert report.moved_blocks > 0
    assert list(sequence.table) == table
    assert all(engine.pool.state(block) is BlockState.PINNED for block in table)
    engine.pool.unpin(table)
    assert engine.verify_all() == []


# Faults of the mover


@pytest.mark.parametrize("method", ["columns", "facts", "found", "revalidate", "reserve", "copy", "commit"])
def test_a_mover_that_raises_leaves_the_pool_consistent(
    method: str, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=BLOCKS)
    mover = engine.compaction.mover
    right = getattr(mover, method)
    calls = Counter[str]()

    def faulty(*arguments: Any) -> Any:
        calls[method] += 1
        if calls[method] % 3 == 0:
            raise RuntimeError(f"{method} fell over")
        return right(*arguments)

    monkeypatch.setattr(mover, method, faulty)
    moving = Compacting(engine)
    drive(engine, sequences(engine, 30), moving)
    failed = [report for report in moving.reports if report.outcome is Outcome.FAILED]
    assert failed
    assert all(f"{method} fell over" in report.reason for report in failed)
    assert moving.problems == []
    assert engine.report().served_requests == 30
    monkeypatch.undo()
    assert engine.verify_all() == []
    check_pool(engine)


INNER_CALLS: dict[str, Callable[[Any], Any]] = {
    "moves.reserve": lambda engine: engine.compaction.mover.moves,
    "moves.commit": lambda engine: engine.compaction.mover.moves,
    "tables.find": lambda engine: engine.compaction.mover._tables,
    "tables.rename": lambda engine: engine.compaction.mover._tables,
    "runner.copied": lambda engine: engine.runner,
    "copier.save": lambda engine: engine.cache.copier,
    "copier.copy": lambda engine: engine.cache.copier,
    "copier.settle": lambda engine: engine.cache.copier,
    "copier.restore": lambda engine: engine.cache.copier,
    "prefixes.relocate": lambda engine: engine.pool._prefixes,
    "policy.move_cached": lambda engine: engine.pool._policy,
    "policy.remove_free": lambda engine: engine.pool._policy,
    "policy.give_vacated": lambda engine: engine.pool._policy,
    "observer.moved": lambda engine: engine.pool._observer,
}


@pytest.mark.parametrize("late", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("inner", INNER_CALLS)
def test_whatever_raises_within_a_chunk_no_sequence_reads_wrong_contents(
    inner: str, error: type[Exception], late: bool, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that a chunk makes fails once, before or after it did its work, while prefixes lie in the way."""
    engine = make_engine(blocks=60, block_tokens=4, headroom=0.0, limits=Limits(64, 1000))
    for index in range(10):
        length = 17 + (3 if index % 2 else 25)
        tokens = np.arange(length, dtype=np.int64) + 1000 * index
        hashes = hash_prefix_blocks(tokens.tolist(), 4)
        assert engine.submit(Sequence(str(index), tokens, prompt_tokens=17, length=17, hashes=hashes))
    for _ in range(4):
        engine.step()
    name = inner.split(".")[1]
    holder = INNER_CALLS[inner](engine)
    right = getattr(holder, name)
    calls: list[str] = []

    def once(*arguments: Any, **named: Any) -> Any:
        calls.append(inner)
        if len(calls) > 1:
            return right(*arguments, **named)
        if late:
            right(*arguments, **named)
        raise error("injected")

    monkeypatch.setattr(holder, name, once)
    engine.compaction.start(RunSettings(target=0.0, max_step_seconds=1.0))
    for _ in range(6):
        engine.step()
        assert engine.verify_all() == []
        check_pool(engine)
    assert calls
    while engine.scheduler.has_work:
        engine.step()
    assert engine.report().served_requests == 10
    assert engine.verify_all() == []
    check_pool(engine)
    assert engine.pool.num_allocatable == engine.pool.usable_blocks


def test_a_copy_that_breaks_off_loses_no_prefix(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destinations that hold prefixes were overwritten already; their contents come back."""
    engine = make_engine(blocks=BLOCKS)
    copy = BlockCopier.copy

    def break_off(self: BlockCopier, sources: Any, places: Any) -> None:
        copy(self, sources[: len(sources) // 2 + 1], places[: len(sources) // 2 + 1])
        raise RuntimeError("the device fell over")

    drive(engine, sequences(engine, 30), lambda step: None)
    for sequence in sequences(engine, 9):
        assert engine.submit(sequence)
    for _ in range(3):
        engine.step()
    cached = engine.pool.num_cached
    assert cached > 20
    assert engine.pool.num_free == 0
    monkeypatch.setattr(BlockCopier, "copy", break_off)
    reports = [compact(engine, RunSettings(target=0.0, max_step_seconds=1.0))[0] for _ in range(3)]
    assert all("the device fell over" in report.reason for report in reports)
    assert engine.pool.num_cached == cached
    assert engine.verify_all() == []
    check_pool(engine)


def test_a_prefix_that_cannot_be_written_back_is_given_up(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=BLOCKS)

    def fail(self: BlockCopier, saved: Any, blocks: Any) -> None:
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(BlockCopier, "restore", fail)
    moving = Compacting(engine)
    drive(engine, sequences(engine, 40), moving)
    assert moving.moved > 0
    assert moving.problems == engine.verify_all() == []
    check_pool(engine)


# The engine's part


def test_the_kill_switch_works_in_mid_run(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    reports: list[CompactionReport] = []
    engine.compaction.start(RunSettings(target=0.0, max_chunk_moves=1, max_step_seconds=1e-9), done=reports.append)
    for _ in range(3):
        engine.compaction.step()
    with pytest.raises(ControlRefused, match="in progress"):
        engine.compaction.start()
    engine.compaction.set_moving(False, "the operator said so")
    engine.compaction.step()
    assert [(report.outcome, report.reason) for report in reports] == [(Outcome.ABORTED, "the operator said so")]
    assert compact(engine)[0].outcome is Outcome.REFUSED
    assert engine.compaction.set_moving(True)
    assert compact(engine)[0].outcome is Outcome.REACHED
    assert engine.verify_all() == []


def test_runs_rest_while_there_is_work(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS, moving_time_share=1e-9))
    engine.compaction.start(RunSettings(target=0.0, max_chunk_moves=1))
    while not engine.compaction.rested:  # looks, plans, moves a block: it is owed for longer than this test takes
        assert engine.step()
    moved = engine.cache.copied_blocks
    assert moved > 0
    for _ in range(5):
        assert engine.step()
        assert engine.compaction.rested
    assert engine.cache.copied_blocks == moved
    assert engine.compaction.active


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_an_idle_engine_compacts_without_waiting(share: float, make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS, moving_time_share=share))
    kept, engine.scheduler.running = engine.scheduler.running, []
    mover_tables = engine.compaction.mover._tables  # type: ignore[attr-defined]
    mover_tables._sequences = lambda: kept
    reports: list[CompactionReport] = []
    engine.compaction.start(RunSettings(target=0.0, max_chunk_moves=4), done=reports.append)
    engine.serve(iter(()), EngineSettings(engine_id="x").pace, until_idle=True)
    assert [report.outcome for report in reports] == [Outcome.REACHED]
    assert engine._clock.now() == 0.0
    engine.scheduler.running = kept
    assert engine.verify_all() == []


def test_large_pools_are_planned_on_another_thread(make_engine: EngineMaker) -> None:
    engine = scattered(make_engine(blocks=BLOCKS))
    engine.compaction.defaults = RunSettings(target=0.0, plan_here_blocks=0, max_step_seconds=1.0)
    reports: list[CompactionReport] = []
    engine.compaction.start(done=reports.append)
    engine.serve(iter(()), EngineSettings(engine_id="x").pace, until_idle=True, stop=lambda: bool(reports))
    assert reports[0].outcome in (Outcome.REACHED, Outcome.PARTIAL)
    assert engine.verify_all() == []


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def no_measure(*columns: Any, **named: Any) -> MovePlan:
    raise MemoryError


def no_report(self: CompactionRun) -> CompactionReport:
    raise ValueError("no report")


@pytest.mark.parametrize(
    ("where", "what", "how", "reason"),
    [
        ("threading.Thread", "start", no_thread, "no thread could be started to plan on"),
        ("engine_shim.compaction.run", "plan_moves", no_measure, "enough"),
        ("engine_shim.compaction.run.CompactionRun", "report", no_report, "ValueError: no report"),
    ],
)
@pytest.mark.parametrize("plan_here", [0, 50_000])
def test_a_run_that_cannot_be_planned_or_reported_on_ends_and_the_engine_goes_on(
    plan_here: int, where: str, what: str, how: Any, reason: str, make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where who asked for the run cannot take its report."""
    wanted = RunSettings(target=0.0, plan_here_blocks=plan_here, max_step_seconds=1.0)
    engine = scattered(make_engine(blocks=BLOCKS))
    engine.compaction.defaults = wanted
    reports: list[CompactionReport] = []

    def done(report: CompactionReport) -> None:
        reports.append(report)
        raise OSError("nobody listens")

    with monkeypatch.context() as patch:
        patch.setattr(f"{where}.{what}", how)
        engine.compaction.start(wanted, done=done)
        if reason == "enough":  # a run that is broken off measures the pool for its report
            engine.compaction.abort(reason)
        deadline = time.monotonic() + 120
        while engine.compaction.active:
            engine.compaction.step()
            assert time.monotonic() < deadline
    if not (what == "start" and plan_here):
        assert reason in reports[0].reason
    assert len(reports) == 1
    assert engine.verify_all() == []
    (report,) = compact(engine, wanted)
    assert report.outcome is Outcome.REACHED
    check_pool(engine)


@settings(max_examples=25)
@given(st.data())
def test_any_traffic_between_steps(data: st.DataObject) -> None:
    """Hypothesis chooses arrivals, forks, ends and preemptions between steps of a run; all is checked after each."""
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    values = EngineSettings(
        engine_id="x", blocks=48, block_tokens=4, policy=policy, model_geometry="test-tiny", device="cpu",
        limits=Limits(step_tokens=64), moving_time_share=1.0,
    )  # fmt: skip
    engine, _ = build_engine(values, VirtualClock(), observer=None, map_folder=Path("/nonexistent"))
    try:
        for number in range(data.draw(st.integers(5, 25))):
            running = engine.scheduler.running
            what = data.draw(st.sampled_from(["arrive", "arrive", "fork", "end", "preempt", "none"]))
            if what == "arrive":
                prompt = data.draw(st.integers(1, 40))
                shared = data.draw(st.booleans())
                request = TraceRequest(
                    number, 0.0, prompt, data.draw(st.integers(1, 20)), (7,) if shared else (50 + number,)
                )
                engine.submit(sequence_of(request, 4))
            elif what == "fork" and running and running[0].computed:
                engine.scheduler.branch(running[0], 1 + number)
            elif what == "end" and running:
                sequence = running[-1]
                engine.scheduler.finish(sequence)
                engine.scheduler.release(sequence)
            elif what == "preempt" and len(running) > 1:
                engine.scheduler._preempt(running.pop())
            if not engine.compaction.active:
                chunk = data.draw(st.integers(1, 4))
                engine.compaction.start(RunSettings(target=0.0, max_chunk_moves=chunk, max_step_seconds=1e-9))
            engine.step()
            report = engine.compaction.last_report
            assert report is None or report.outcome not in (Outcome.FAILED, Outcome.REFUSED)
            assert engine.verify_all() == []
            check_pool(engine)
    finally:
        engine.close()


# The map


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[Engine, MapReader]]:
    observer = MapObserver.create(
        MapSpec(engine_id="moves", kind="reference", model="none", pool="kv", total_blocks=BLOCKS, block_tokens=16,
                block_bytes=1, dtype="none"), tmp_path)  # fmt: skip
    assert observer.path is not None
    values = EngineSettings(
        engine_id="moves", blocks=BLOCKS, model_geometry="test-tiny", device="cpu", control=False, moving_time_share=1.0
    )
    engine, _ = build_engine(values, VirtualClock(), observer=observer)
    reader = MapReader(observer.path)
    yield engine, reader
    reader.close()
    engine.close()
    observer.close()


def test_the_map_is_exact_after_every_step(mapped: tuple[Engine, MapReader]) -> None:
    engine, reader = mapped
    moving = Compacting(engine, verify=False)
    checked = 0

    def audit(step: int) -> None:
        nonlocal checked
        if step:
            snapshot = reader.read()
            facts = engine.compaction.mover.facts(np.arange(BLOCKS))
            assert np.array_equal(snapshot.states, engine.pool.states())
            assert snapshot.references is not None
            assert np.array_equal(snapshot.references, facts.references)
            assert snapshot.owner is not None
            assert snapshot.position is not None
            for sequence in engine.scheduler.running:
                # Of a block that was shared the map names the first holder, which may have left.
                own = 32 if int(sequence.request_id) % 3 == 2 else 0
                sole = [(i, b) for i, b in enumerate(sequence.table) if facts.references[b] == 1 and i >= own]
                assert all(snapshot.position[block] == index for index, block in sole)
                assert {int(snapshot.owner[block]) for _, block in sole} <= {sequence.owner}
            checked += 1
        moving(step)

    drive(engine, sequences(engine, 30), audit)
    assert checked > 50
    assert moving.moved_share >= 0.05
    assert reader.read().counters["live_moves"] == moving.moved
