"""What a run would move, asked for by many and more often than an engine has time for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from engine_shim.compaction.dry_runs import MAX_WAITING, DryRuns
from engine_shim.compaction.mover import BlockFacts
from engine_shim.compaction.planning import MovePlan
from engine_shim.errors import ControlRefused
from engine_shim.layout import BlockState

LOOK_SECONDS = 0.01


class Pool:
    """As much of a Mover as dry runs use. A look takes some time of its clock."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0
        self.look_seconds = LOOK_SECONDS
        self.fault: Exception | None = None

    def clock(self) -> float:
        return self.now

    def columns(self) -> BlockFacts:
        self.looks += 1
        self.now += self.look_seconds
        if self.fault is not None:
            raise self.fault
        states = np.full(64, BlockState.FREE, np.uint8)
        states[::4] = BlockState.USED
        zeros = np.zeros(64, np.uint32)
        return BlockFacts(states, zeros, zeros, np.zeros(64, np.int64))


def never(what: object) -> None:
    pytest.fail(f"told {what!r}")


def made(pool: Pool, *, plans_here: bool = True, wake: Callable[[], None] = lambda: None) -> DryRuns:
    return DryRuns(pool, plans_here=lambda: plans_here, wake=wake, clock=pool.clock)  # type: ignore[arg-type]


def test_the_first_is_answered_at_once() -> None:
    plans: list[MovePlan] = []
    dry = made(Pool())
    dry.ask(plans.append, never, target=0.0, max_moves=None)
    assert len(plans) == 1
    assert len(plans[0].moves)
    assert not dry.waiting


def test_who_never_stops_asking_gets_a_small_share_of_the_time() -> None:
    pool = Pool()
    dry = made(pool)
    plans: list[MovePlan] = []
    steps = 0
    while pool.now < 160.0:
        for number in range(4):
            try:
                dry.ask(plans.append, never, target=number / 8, max_moves=None)
            except ControlRefused:
                pytest.fail("four questions are not too many")
        dry.step()
        steps += 1
        pool.now += 0.01
    assert pool.looks * LOOK_SECONDS < 0.03 * 60.0
    assert pool.looks > 10
    assert len(plans) > steps  # all others were told the same


def test_a_look_that_takes_long_does_not_let_the_next_asker_wait_for_long() -> None:
    pool = Pool()
    dry = made(pool)
    plans: list[MovePlan] = []
    pool.look_seconds = 3600.0
    for _ in range(2):
        dry.ask(plans.append, never, target=0.0, max_moves=None)
    assert len(plans) == 1
    pool.now += 2.1
    dry.step()
    assert len(plans) == 2


def test_more_questions_than_can_wait_are_refused() -> None:
    pool = Pool()
    dry = made(pool)
    dry.ask(lambda plan: None, never, target=0.0, max_moves=None)
    for number in range(MAX_WAITING):
        dry.ask(lambda plan: None, never, target=0.0, max_moves=number)
    dry.ask(lambda plan: None, never, target=0.0, max_moves=0)  # the same as another
    with pytest.raises(ControlRefused, match="ask again later"):
        dry.ask(lambda plan: None, never, target=0.5, max_moves=None)


def test_a_fault_is_told_and_ends_nothing() -> None:
    pool = Pool()
    dry = made(pool)
    pool.fault = OSError("no pool")
    faults: list[Exception] = []
    dry.ask(never, faults.append, target=0.0, max_moves=None)
    assert faults == [pool.fault]

    def fall(what: object) -> None:
        raise ValueError("an asker of its own kind")

    pool.now += 10.0
    dry.ask(fall, fall, target=0.0, max_moves=None)
    pool.fault, pool.now = None, pool.now + 10.0
    plans: list[MovePlan] = []
    dry.ask(fall, fall, target=0.0, max_moves=None)
    pool.now += 10.0
    dry.ask(plans.append, never, target=0.0, max_moves=None)
    assert len(plans) == 1


def test_an_engine_without_work_is_woken_when_it_is_time() -> None:
    """Once for each wait; and while the thread that made a plan still ends, which nobody tells of again."""
    pool = Pool()
    plans: list[MovePlan] = []
    asked, answered, turn = threading.Event(), threading.Event(), threading.Lock()

    def wake() -> None:
        assert asked.wait(60)
        with turn:
            pool.now += 10.0
            dry.step()
        if len(plans) == 3:
            answered.set()

    dry = made(pool, plans_here=False, wake=wake)
    for target in (0.0, 0.1, 0.2):
        dry.ask(plans.append, never, target=target, max_moves=None)
    asked.set()
    assert answered.wait(60)
