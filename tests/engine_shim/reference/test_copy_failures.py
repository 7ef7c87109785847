"""Copies of a step that break off: the pool stays whole, the engine goes on, and nobody is served what they left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import BlockState
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.engine import Engine
from engine_shim.reference.scheduler import Scheduler
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
Copies = Sequence[tuple[int, int]]
REQUESTS = 40
TINY: dict[str, Any] = {"policy": "relocating", "blocks": 90, "headroom": 0.0}


def requests() -> list[TraceRequest]:
    """Four long prompts that come back again and again, between others of their own: hits far up in the pool."""
    asked = []
    for index in range(REQUESTS):
        again = index % 2 == 0
        prompt = 512 if again else 90 + 16 * (index % 5)
        asked.append(TraceRequest(index, 0.0, prompt, 6 + index % 7, (index // 2 % 4,) if again else (1000 + index,)))
    return asked


def drive(engine: Engine, *, samples: int = 1, after_step: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Serve all, one more every third step; their output tokens."""
    model = engine.cache.geometry.vocabulary if not hasattr(engine.runner, "verify_all") else None
    work = [sequence_of(request, 16, vocabulary=model, samples=samples) for request in requests()]
    step = 0
    while step < 3 * len(work) or engine.scheduler.has_work:
        if step % 3 == 0 and step < 3 * len(work):
            assert engine.submit(work[step // 3])
        engine.step()
        after_step()
        step += 1
        assert step < 5000
    return [sequence.tokens[sequence.prompt_tokens :].tolist() for sequence in work]


def check_pool(engine: Engine) -> None:
    """References are those of the tables; states, counts and prefixes agree."""
    pool = engine.pool
    held = Counter(block for sequence in engine.scheduler.running for block in sequence.table)
    references = engine.compaction.mover.facts(np.arange(pool.num_blocks)).references
    assert references.tolist() == [held[block] for block in range(pool.num_blocks)]
    states = pool.states()
    counts = [int(np.count_nonzero(states == state)) for state in (BlockState.FREE, BlockState.CACHED, BlockState.USED)]
    assert counts == [pool.num_free, pool.num_cached, pool.num_used]
    assert set(np.flatnonzero(states == BlockState.CACHED).tolist()) <= set(pool._prefixes.hash_of)


def half(copies: Copies) -> Copies:
    return copies[: len(copies) // 2]


class Fault:
    """Lets one call of all that a step's copies make raise now and then: before, amid or after its work."""

    def __init__(self, engine: Engine, where: str, when: str, error: type[Exception], every: int = 3) -> None:
        holder: Any = {"_take": engine, "copy_blocks": engine.cache, "copy": engine.cache.copier}.get(
            where, engine.runner
        )
        self.right = getattr(holder, where)
        self.when, self.error, self.every = when, error, every
        self.calls = self.raised = 0
        self.armed = False
        copy = engine.scheduler._copy

        def copying(copies: Copies) -> None:
            self.armed = True  # `_take` and the copier are called by others too
            try:
                copy(copies)
            finally:
                self.armed = False

        engine.scheduler._copy = copying
        setattr(holder, where, self)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += self.armed
        if not self.armed or self.calls % self.every:
            return self.right(*arguments)
        self.raised += 1
        if self.when == "midway":
            self.right(
                *(half(list(argument)) if isinstance(argument, list) else half(argument) for argument in arguments)
            )
        elif self.when == "after":
            self.right(*arguments)
        raise self.error("injected")


POINTS = [
    ("_take", "before"),
    ("_take", "after"),
    ("copy_blocks", "before"),
    ("copy_blocks", "midway"),
    ("copy_blocks", "after"),
    ("copy", "before"),
    ("copy", "midway"),
    ("copy", "after"),
    ("copied", "before"),
    ("copied", "after"),
]


@pytest.mark.parametrize(("samples", "error"), [(1, MemoryError), (2, RuntimeError)])
@pytest.mark.parametrize(("where", "when"), POINTS)
def test_wherever_a_copy_raises_every_byte_served_is_right(
    where: str, when: str, error: type[Exception], samples: int, make_engine: EngineMaker
) -> None:
    engine = make_engine(**TINY)
    fault = Fault(engine, where, when, error)

    def check() -> None:
        check_pool(engine)
        assert engine.verify_all() == []

    drive(engine, samples=samples, after_step=check)
    report = engine.report()
    assert fault.raised == report.copy_failures > 3
    assert report.served_requests == REQUESTS
    assert report.relocation_copies > 50
    assert engine.pool.num_allocatable == engine.pool.usable_blocks


def test_the_contents_show_where_nothing_is_given_up(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: an engine that goes on as if the copies had been made."""

    def go_on(self: Scheduler, copies: Copies, batch: Any) -> Any:
        try:
            self._copy(copies)
        except MemoryError:
            engine.runner.copied(copies)
        return batch

    monkeypatch.setattr(Scheduler, "_with_contents", go_on)
    engine = make_engine(**TINY)
    Fault(engine, "copy_blocks", "midway", MemoryError)
    found: list[str] = []
    drive(engine, after_step=lambda: found.extend(engine.verify_all()))
    assert found


@pytest.mark.parametrize("gives_up", [True, False])
def test_the_models_tokens_are_those_of_a_run_without_faults(
    gives_up: bool, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for faulty in (False, True):
        engine = make_engine(**(TINY | {"blocks": 170}), content="model", dtype="float32")
        if faulty:
            fault = Fault(engine, "copy_blocks", "before", MemoryError, every=2)
            if not gives_up:  # the negative control
                monkeypatch.setattr("engine_shim.pool.pool_moves.PoolMoves.distrust", lambda self, blocks: None)
                monkeypatch.setattr(Scheduler, "_preempt_naming", lambda self, lost, freed=(): None)
        said.append(drive(engine))
    assert fault.raised > 3
    assert (said[0] == said[1]) is gives_up


def test_an_engine_whose_copies_never_work_rests_from_them_and_serves(make_engine: EngineMaker) -> None:
    engine = make_engine(**TINY)
    fault = Fault(engine, "copy_blocks", "before", MemoryError, every=1)
    drive(engine, samples=2)
    report = engine.report()
    assert report.served_requests == REQUESTS
    assert engine.verify_all() == []
    assert 1 < fault.raised == report.copy_failures
    assert engine.scheduler._next_rest > 1
    fault.every = 1 << 60
    for sequence in [sequence_of(TraceRequest(900 + i, 0.0, 512, 20, (i,)), 16) for i in range(4)]:
        assert engine.submit(sequence)
    before = engine.cache.copied_blocks
    engine.scheduler._rest = 0
    while engine.scheduler.has_work:
        engine.step()
    assert engine.cache.copied_blocks > before
    assert engine.scheduler._next_rest == 1


def test_the_map_follows(tmp_path: Path) -> None:
    settings = EngineSettings(engine_id="map", model_geometry="test-tiny", device="cpu", **TINY)
    engine, observer = build_engine(settings, VirtualClock(), map_folder=tmp_path)
    assert isinstance(observer, MapObserver)
    assert observer.path is not None
    reader = MapReader(observer.path)
    Fault(engine, "copy_blocks", "midway", MemoryError)

    def compare() -> None:
        assert observer.reason == ""
        assert np.array_equal(reader.read().states, engine.pool.states())

    drive(engine, samples=2, after_step=compare)
    assert engine.report().copy_failures > 3
    reader.close()
    engine.close()
    observer.close()
