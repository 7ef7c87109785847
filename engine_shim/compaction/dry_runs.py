"""Answers what a run would move: one look and one plan at a time, and within a share of the engine's time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from engine_shim.compaction.mover import BlockFacts, Mover
from engine_shim.compaction.planning import MovePlan, plan_moves
from engine_shim.compaction.time_share import MAX_TIME_SHARE, TimeShare
from engine_shim.errors import ControlRefused

log = logging.getLogger(__name__)

MAX_WAITING = 16  # questions that differ, as many as a control socket has connections
# That one plan counts for at most: at the share of the time that plans may take it is 2 s until the next one, and an
# asker does not wait for more than some 10 s.
_MOST_SECONDS = 2.0 * MAX_TIME_SHARE

Done = Callable[[MovePlan], None]
Failed = Callable[[Exception], None]
_Question = tuple[float, int | None]


class DryRuns:
    """For the engine's thread, at its step boundaries. Who asks the same as another shares the answer."""

    def __init__(
        self,
        mover: Mover,
        *,
        plans_here: Callable[[], bool],
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plans_here`: is the pool so small that it is planned for on the engine's own thread? `wake` rouses an idle
        engine; it is called on other threads."""
        self._mover, self._plans_here, self._wake, self._clock = mover, plans_here, wake, clock
        self._waiting: dict[_Question, list[tuple[Done, Failed]]] = {}
        self._time = TimeShare(most_seconds=_MOST_SECONDS)
        self._planning = self._ringing = False  # is a plan made on a thread; is a timer set
        self._planned_seconds = 0.0  # on a thread, and not counted yet

    @property
    def waiting(self) -> bool:
        """Is there a question that `step` is to answer?"""
        return bool(self._waiting)

    def ask(self, done: Done, failed: Failed, *, target: float, max_moves: int | None) -> None:
        """Tell `done` the plan, or `failed` why there is none: at once where none was made lately and the pool is
        small, else later. ControlRefused where too much is asked for already."""
        question = (target, max_moves)
        if question not in self._waiting and len(self._waiting) >= MAX_WAITING:
            raise ControlRefused(f"{MAX_WAITING} plans are asked for already; ask again later", error="busy")
        self._waiting.setdefault(question, []).append((done, failed))
        self.step()

    def step(self) -> None:
        """Answer what waits longest, if it is time for that. Never raises."""
        if not self._waiting or self._planning:
            return
        began = self._clock()
        if self._planned_seconds:
            self._time.spent(began - self._planned_seconds, began)
            self._planned_seconds = 0.0
        if self._time.owes(began):
            self._wake_later(self._time.owed(began))
            return
        question = next(iter(self._waiting))
        askers = self._waiting.pop(question)
        try:
            columns = self._mover.columns()
            if self._plans_here():
                _answer(columns, question, askers)
            else:
                arguments = (columns, question, askers)
                thread = threading.Thread(target=self._plan, args=arguments, name="compaction-dry-run", daemon=True)
                self._planning = True
                thread.start()
        except Exception as error:  # noqa: BLE001 - whatever a pool or a thread raises: the engine's step goes on
            self._planning = False
            _fail(askers, error)
        now = self._clock()
        self._time.spent(began, now)
        if self._waiting and not self._planning:
            self._wake_later(self._time.owed(now))

    def _plan(self, columns: BlockFacts, question: _Question, askers: list[tuple[Done, Failed]]) -> None:
        began = self._clock()
        _answer(columns, question, askers)
        self._planned_seconds = self._clock() - began
        self._planning = False  # before the engine is woken: it does not come again for this thread's end
        self._wake()

    def _wake_later(self, seconds: float) -> None:
        """An engine without work would not come to the step that is due then."""
        if self._ringing:
            return
        timer = threading.Timer(seconds, self._ring)
        timer.daemon = True
        self._ringing = True
        try:
            timer.start()
        except RuntimeError:  # the process may start no thread: an engine with work comes by anyway
            self._ringing = False

    def _ring(self) -> None:
        self._ringing = False
        self._wake()


def _answer(columns: BlockFacts, question: _Question, askers: list[tuple[Done, Failed]]) -> None:
    target, max_moves = question
    try:
        plan = plan_moves(
            columns.states, target=target, owners=columns.owners, positions=columns.positions, max_moves=max_moves
        )
    except Exception as error:  # noqa: BLE001 - on a thread of its own nobody else would hear of it
        _fail(askers, error)
        return
    for done, _ in askers:
        _tell(done, plan)


def _fail(askers: list[tuple[Done, Failed]], error: Exception) -> None:
    log.warning("what a run would move could not be planned: %r", error)
    for _, failed in askers:
        _tell(failed, error)


def _tell(hear: Callable[[Any], None], what: MovePlan | Exception) -> None:
    try:
        hear(what)
    except Exception as error:  # noqa: BLE001 - whoever waits for a plan must not stop the engine
        log.error("what a run would move was not taken: %r", error)
