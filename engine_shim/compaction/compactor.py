"""Drives compaction in an engine: one run at a time, a slice of it at each step boundary."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from engine_shim.compaction.chunk_costs import ChunkCosts
from engine_shim.compaction.dry_runs import DryRuns
from engine_shim.compaction.mover import Mover, MoveSwitch
from engine_shim.compaction.planning import MovePlan, plan_moves
from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import CompactionRun, Phase, RunSettings
from engine_shim.compaction.time_share import TimeShare
from engine_shim.errors import ControlRefused

log = logging.getLogger(__name__)

Done = Callable[[CompactionReport], None]
Planner = Callable[..., MovePlan]


class Consumer(Protocol):
    """Uses what a run has made contiguous. Called on the engine's thread at step boundaries, like the run itself."""

    def begin(self, plan: MovePlan | None) -> None:
        """The run has ended; `plan` is what it set out to do."""
        ...

    def step(self, deadline: float) -> bool:
        """Do some of the work until `deadline` (of the compactor's clock); True while there is more."""
        ...

    def complete(self, report: CompactionReport) -> CompactionReport:
        """The report with what was predicted for this consumer, and what came of it."""
        ...


class Compactor:
    """All is for the engine's thread, except `abort` and `set_moving`, which any thread may call."""

    def __init__(
        self,
        mover: Mover,
        num_blocks: int,
        *,
        defaults: RunSettings | None = None,
        switch: MoveSwitch | None = None,
        consumer: Consumer | None = None,
        max_time_share: float = 1.0,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` rouses an idle engine; it is called on other threads. `defaults` are the budgets of a run that is
        started without any; `max_time_share` is of the time of an engine that has work, for all runs together: 1 is no
        bound, and less asks for `idle` in each step of an engine without work."""
        self.mover, self.defaults = mover, defaults or RunSettings()
        self.switch = switch or MoveSwitch()
        self.consumer = consumer
        self.last_report: CompactionReport | None = None
        self._wake, self._clock = wake, clock
        self._run: CompactionRun | None = None
        self._report: CompactionReport | None = None  # of a run that has ended, while its consumer works
        self._done: Done | None = None
        self._num_blocks = num_blocks
        # What chunks cost, by whether contents are compared, which costs more: later runs know it from the beginning.
        self._costs = {False: ChunkCosts(), True: ChunkCosts()}
        self._time = TimeShare(max_time_share)
        self._dry_runs = DryRuns(mover, plans_here=lambda: self._plans_here, wake=wake, clock=clock)
        self._rested = False
        self._planning: threading.Thread | None = None
        self._reporting: threading.Thread | None = None
        self._measured = False  # has that thread done its work?

    @property
    def active(self) -> bool:
        """Is a run under way: anything to do at the next step boundary, or being planned?"""
        return self._run is not None

    @property
    def wants_boundary(self) -> bool:
        """Is `step` to be called at the next step boundary? For a run, or for dry runs that wait."""
        return self._run is not None or self._dry_runs.waiting

    @property
    def owes(self) -> bool:
        """Has so much been spent that the next slice of work is to wait?"""
        return self._time.owes(self._clock())

    @property
    def rested(self) -> bool:
        """Did the last step let its boundary pass, to keep to the share of the engine's time that a run may take?"""
        return self._rested

    @property
    def wants_step(self) -> bool:
        """Should an idle engine take its next step at once? Not while a plan is made on another thread."""
        working = (self._planning, self._reporting)
        return self._run is not None and not any(thread is not None and thread.is_alive() for thread in working)

    @property
    def _plans_here(self) -> bool:
        return self._num_blocks <= self.defaults.plan_here_blocks

    def start(
        self, settings: RunSettings | None = None, *, done: Done | None = None, planner: Planner = plan_moves
    ) -> CompactionRun:
        """Begin a run at the next step boundary; `done` gets its report. ControlRefused while another one goes on.

        A run that moving is switched off for ends at once, and its report says so.
        """
        if self._run is not None:
            raise ControlRefused("a run is in progress; wait for it to end, or abort it", error="busy")
        chosen = settings or self.defaults
        costs = self._costs[chosen.verify]
        self._run = CompactionRun(self.mover, self.switch, chosen, clock=self._clock, planner=planner, costs=costs)
        self._report, self._done = None, done
        return self._run

    def step(self, *, idle: bool = False) -> bool:
        """One step boundary: True while the run goes on. Never raises.

        What is spent here is at most `max_time_share` of the time that passes, over some steps; but for that of an
        `idle` engine, which is of no use to anybody else.
        """
        self._dry_runs.step()
        run = self._run
        if run is None:
            return False
        began = self._clock()
        self._rested = not idle and self._time.owes(began) and (self._report is not None or run.may_rest)
        try:
            goes_on = self._advance(run)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's step goes on without the run
            log.error("a compaction was given up: %r", error)
            self._planning = self._reporting = None
            self._end(CompactionReport.nothing(Outcome.FAILED, f"{type(error).__name__}: {error}"))
            goes_on = False
        if not idle and not (self._rested and goes_on):  # a run that ends looks at the pool, even where it rested
            self._time.spent(began, self._clock())
        return goes_on

    def _advance(self, run: CompactionRun) -> bool:
        if self._report is not None:
            if not self._rested:
                self._consume(self._report, self._clock() + self.defaults.max_step_seconds)
            return self.active
        if run.rest() if self._rested else run.step():
            if run.phase is Phase.PLANNING and self._planning is None and not run.plans_here:
                self._planning = _started(self._plan, run, "compaction-plan")
                if self._planning is None:
                    run.abort("no thread could be started to plan on")
            elif run.phase is not Phase.PLANNING:
                self._planning = None
            return True
        if self._report_later(run):
            return True
        report = run.report()
        self._planning = None
        if report is not None:
            self._begin_consuming(run, report)
        return self.active

    def dry_run(
        self,
        done: Callable[[MovePlan], None],
        *,
        target: float,
        max_moves: int | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Tell `done` what a run would set out to do with the pool as it is: at once, or, of a large pool or where
        plans have taken their share of the engine's time, later and maybe on another thread. `failed` hears why there
        is no plan. ControlRefused where too many are asked for."""
        self._dry_runs.ask(done, failed, target=target, max_moves=max_moves)

    def abort(self, reason: str) -> None:
        """End the run in progress before its next chunk, if there is one."""
        run = self._run
        if run is not None:
            run.abort(reason)
            self._wake()

    def set_moving(self, on: bool, reason: str = "moving is switched off", at_start: bool = False) -> bool:
        """The kill switch; returns whether blocks may be moved now. After a failed check they stay where they are."""
        if on:
            return self.switch.on()
        self.switch.off(reason, at_start=at_start)
        self._wake()
        return False

    def _report_later(self, run: CompactionRun) -> bool:
        """The report measures the whole pool: of a large one on another thread. True until it is there."""
        if self._plans_here:
            return False
        if self._reporting is None:
            self._measured = False
            self._reporting = _started(self._measure, run, "compaction-report")
        if self._reporting is not None and not self._measured:
            return True
        self._reporting = None
        return False

    def _measure(self, run: CompactionRun) -> None:
        try:
            run.report()
        except Exception as error:  # noqa: BLE001 - the next step asks again, and says it where it is heard
            log.warning("a compaction could not be reported on: %r", error)
        self._measured = True  # before the engine is woken: it does not come again for this thread's end
        self._wake()

    def _plan(self, run: CompactionRun) -> None:
        try:
            run.plan()
        except Exception as error:  # noqa: BLE001 - on a thread of its own nobody else would hear of it
            log.warning("a compaction could not be planned: %r", error)
            run.abort(f"planning failed: {error!r}")
        self._wake()

    def _begin_consuming(self, run: CompactionRun, report: CompactionReport) -> None:
        if self.consumer is None:
            self._end(report)
            return
        self._report = report
        try:
            self.consumer.begin(run.first_plan)
        except Exception as error:  # noqa: BLE001 - what a consumer raises must not reach the engine's step
            log.warning("the consumer of a compaction failed: %r", error)
            self._end(report)

    def _consume(self, report: CompactionReport, deadline: float) -> None:
        if self.consumer is None:
            self._end(report)
            return
        try:
            if self.consumer.step(deadline):
                return
            report = self.consumer.complete(report)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("the consumer of a compaction failed: %r", error)
            report = replace(report, reason=f"{report.reason}; the consumer failed: {error!r}")
        self._end(report)

    def _end(self, report: CompactionReport) -> None:
        done, self._run, self._report, self._done = self._done, None, None, None
        self.last_report = report
        log.info("compaction %s: %d blocks moved, %s", report.outcome.value, report.moved_blocks, report.reason)
        if done is not None:
            try:
                done(report)
            except Exception as error:  # noqa: BLE001 - whoever waits for a report must not stop the engine
                log.error("the report of a compaction was not taken: %r", error)


def _started(work: Callable[[CompactionRun], None], run: CompactionRun, name: str) -> threading.Thread | None:
    """A thread that does this work, or None where the process may not start one."""
    thread = threading.Thread(target=work, args=(run,), name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        log.warning("the thread %s could not be started: %s", name, error)
        return None
    return thread
