"""Runs a compaction in small steps at an engine's step boundaries: within budgets, checked against the live pool."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.ma  # NumPy's set routines load it at their first call: 6 ms in the middle of a step
from numpy.typing import NDArray

from engine_shim.compaction.chunk_costs import ChunkCosts
from engine_shim.compaction.mover import BlockFacts, Drop, Mover, Moves, MoveSwitch, audit, still_valid
from engine_shim.compaction.planning import MovePlan, Window, plan_moves
from engine_shim.compaction.report import CompactionReport, Measured, Outcome
from engine_shim.compaction.window_watch import WindowWatch
from engine_shim.errors import SettingsError
from engine_shim.layout import BlockState

log = logging.getLogger(__name__)

_OWN_SHARE = 0.75
"""Of the budget of a step that a run plans for itself: the rest is for the chunk that takes longer than the last ones,
and for the caches that it leaves cold to the step."""

_LOOK_AHEAD = 64
"""Moves of a plan that are looked at together, to find those of a chunk. In a pool that changes fast most have lapsed,
and to find that one by one would take most of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Budgets of one run. SettingsError on values that allow nothing."""

    target: float = 0.10
    max_moves: int | None = None  # over the whole run, plans made anew included
    max_chunk_moves: int = 512
    max_chunk_bytes: int = 64 << 20  # of temporary memory
    max_step_seconds: float = 0.002  # that one step boundary may be held up; one block always moves
    max_seconds: float = 60.0  # from the first step of the run to its end
    max_replans: int = 3
    verify: bool = False  # compare digests of every moved block before its move is committed
    plan_here_blocks: int = 50_000  # pools up to here are planned in the engine's step, larger ones by `plan`

    def __post_init__(self) -> None:
        plan_moves((), target=self.target, max_moves=self.max_moves)
        for name in ("max_chunk_moves", "max_chunk_bytes", "max_step_seconds", "max_seconds"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name}={getattr(self, name)}: give more than 0")
        if self.max_replans < 0 or self.plan_here_blocks < 0:
            raise SettingsError("max_replans and plan_here_blocks: give 0 or more")


class Phase(Enum):
    """Where a run stands."""

    LOOKING = "looking"  # the next step takes the columns of the pool
    PLANNING = "planning"  # `plan` is to be called, on any thread
    MOVING = "moving"
    ENDING = "ending"  # the next step looks at the pool a last time
    DONE = "done"


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A plan with the facts that it was made from, and what it is watched by."""

    plan: MovePlan
    planned: BlockFacts  # of the sources, row by row
    watch: WindowWatch


class _CheckFailed(Exception):
    """Contents or tables are not as they must be: moving is unsafe in this process."""


class CompactionRun:
    """One run. `step` is for the engine's thread and never raises; `plan` and `abort` are for any thread.

    A run looks at the pool, plans, moves chunk by chunk, and looks again: where blocks were dropped from the plan, or
    allocated in its window meanwhile, it plans anew within what is left of its budgets.
    """

    def __init__(
        self,
        mover: Mover,
        switch: MoveSwitch,
        settings: RunSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        planner: Callable[..., MovePlan] = plan_moves,
        costs: ChunkCosts | None = None,
    ) -> None:
        """`planner` makes the plans, with the arguments of `plan_moves`: for other ends than a target. `costs` are what
        earlier runs of the same engine learnt, so that this one begins with chunks that fit."""
        self._mover, self._switch, self._clock, self._plan_moves = mover, switch, clock, planner
        self._settings = settings or RunSettings()
        self._own_seconds = self._settings.max_step_seconds * _OWN_SHARE  # in a step
        self._phase = Phase.LOOKING
        self._abort_reason = ""
        self._columns: BlockFacts | None = None
        self._planned: MovePlan | None = None
        self._first: MovePlan | None = None
        self._task: _Task | None = None
        self._next = 0  # the first row of the task's plan that was not tried
        self._undone: list[NDArray[np.int64]] = []  # sources of the task's dropped moves
        self._immovable: list[NDArray[np.int64]] = []  # sources that the engine, or their references, hold in place
        self._outcome, self._reason = Outcome.REACHED, ""
        self._final: MovePlan | None = None
        self._report: CompactionReport | None = None
        self._began = self._ended = 0.0
        self._started = False
        self._longest_stall = self._moving_seconds = 0.0
        self._costs = costs or ChunkCosts()
        self._moved = self._chunks = self._replans = self._allocated = self._verified = self._cached_lost = 0
        self._dropped: Counter[Drop] = Counter()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def window(self) -> Window | None:
        """The blocks that are being emptied, which an allocator had better leave alone; None while nothing moves."""
        task = self._task
        return task.plan.window if task is not None and self._phase is Phase.MOVING else None

    @property
    def _at_plan_edge(self) -> bool:
        """Is the plan one of which nothing, or all, has been tried?"""
        return self._task is not None and self._next in (0, len(self._task.plan.moves))

    @property
    def plans_here(self) -> bool:
        """Is the pool so small that `step` itself makes the plan? Of a larger one somebody is to call `plan`."""
        columns = self._columns
        return columns is not None and columns.states.size <= self._settings.plan_here_blocks

    @property
    def first_plan(self) -> MovePlan | None:
        """What the run set out to do; None before it has a plan."""
        return self._first

    def abort(self, reason: str) -> None:
        """Stop before the next chunk. What is committed stays; nothing is half done."""
        self._abort_reason = reason or "aborted"

    def plan(self) -> None:
        """Make the plan that the run waits for, if it does; the next `step` takes it up. Reads copies alone."""
        columns = self._columns
        if self._phase is not Phase.PLANNING or columns is None or self._planned is not None:
            return
        limit = self._settings.max_moves
        states = columns.states.copy()
        for blocks in self._immovable:
            states[blocks[states[blocks] == BlockState.USED]] = BlockState.PINNED
        self._planned = self._plan_moves(
            states,
            target=self._settings.target,
            owners=columns.owners,
            positions=columns.positions,
            max_moves=None if limit is None else limit - self._moved,
        )

    @property
    def may_rest(self) -> bool:
        """May this boundary pass without harm? A plan that is made is begun with at once, as long as it is true, and
        what came of it is looked at before the pool goes on."""
        if self._phase is Phase.LOOKING:
            return self._task is None
        return self._phase is Phase.MOVING and not self._at_plan_edge

    def rest(self) -> bool:
        """Let a step boundary pass, unless the run is to end there; True while it goes on."""
        return self._timed(self._stopped)[0]

    def step(self) -> bool:
        """Do what fits into one step boundary; True while the run goes on."""
        goes_on, seconds = self._timed(lambda: self._advance(self._clock() + self._own_seconds))
        self._longest_stall = max(self._longest_stall, seconds)
        self._moving_seconds += seconds
        return goes_on

    def _timed(self, action: Callable[[], object]) -> tuple[bool, float]:
        """Carry out a part of the run, whatever it raises: whether the run goes on, and the seconds that it took."""
        if self._done():
            return False, 0.0
        began = self._clock()
        if not self._started:
            self._started, self._began = True, began
        try:
            action()
        except _CheckFailed as error:
            self._switch.off(str(error), failed=True)
            log.error("compaction failed, and moving is off: %s", error)
            self._finish(Outcome.FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a mover raises must not reach the engine's step
            log.warning("compaction failed: %r", error)
            self._finish(Outcome.FAILED, f"{type(error).__name__}: {error}")
        self._ended = self._clock()
        return not self._done(), self._ended - began

    def report(self) -> CompactionReport | None:
        """What the run did; None while it goes on. The first call measures the pool as it was at the end."""
        if self._done() and self._report is None:
            self._report = self._make_report()
        return self._report

    # One step

    def _advance(self, deadline: float) -> None:
        if self._phase is Phase.ENDING:  # of itself, and for a reason of its own, whoever would stop it now
            self._look_last()
            return
        if self._stopped():
            return
        first = self._phase is Phase.MOVING  # a step that looks and plans moves only where time is left
        if self._phase is Phase.LOOKING:
            self._columns = self._mover.columns()
            self._phase = Phase.PLANNING
            if self._clock() >= deadline - self._own_seconds / 2:
                return
        if self._phase is Phase.PLANNING:
            if self._planned is None and self.plans_here:
                self.plan()
            if self._planned is None:
                return
            self._take_up(self._planned)
        while self._phase is Phase.MOVING:
            if not first and self._stopped():
                return
            if self._task is not None and self._next == len(self._task.plan.moves):
                self._phase = Phase.LOOKING  # at the next boundary, so that a look and a chunk never add up
                return
            count = self._chunk_size(deadline - self._clock(), first)
            if count == 0 or (first and self._hopeless()):
                return
            first = not self._move_next(count) and first
            if first and self._clock() >= deadline - self._own_seconds / 2:
                return  # all were dropped so far, and too little time is left for a chunk that is made in any case

    def _stopped(self) -> bool:
        """End the run where somebody or its time says so."""
        refusal = self._switch.reason or self._mover.refusal()
        if self._abort_reason:
            self._finish(Outcome.ABORTED, self._abort_reason)
        elif refusal:
            self._finish(Outcome.ABORTED if self._moved else Outcome.REFUSED, refusal)
        elif self._clock() - self._began > self._settings.max_seconds:
            self._finish(Outcome.PARTIAL, f"out of time after {self._settings.max_seconds:g} s")
        return self._done()

    def _hopeless(self) -> bool:
        """End the run where the window of its plan fills as fast as it is emptied: all further moves would be for
        nothing. Looked at now and then."""
        task = self._task
        if task is None or not task.watch.is_due(self._next):
            return False
        dropped = sum(blocks.size for blocks in self._undone)
        reason = task.watch.problem(self._mover.facts(task.watch.blocks).states, self._next, self._next - dropped)
        if reason:
            self._outcome, self._reason, self._phase = Outcome.PARTIAL, reason, Phase.ENDING
        return bool(reason)

    def _done(self) -> bool:
        return self._phase is Phase.DONE

    def _take_up(self, plan: MovePlan) -> None:
        """Begin a fresh plan, or end the run where there is nothing (more) to do or to spend."""
        columns = self._columns
        if columns is None:
            raise RuntimeError("a plan without the columns that it was made from")
        again = self._task is not None
        self._count_allocated(columns)
        self._first = self._first or plan
        self._planned = self._columns = None
        if not len(plan.moves):
            self._end_of_moves(plan, again)
        elif self._replans >= self._settings.max_replans and again:
            self._finish(Outcome.PARTIAL, f"the pool changed faster than {self._replans} new plans followed it", plan)
        else:
            self._replans += again
            self._task = _Task(plan, columns.of(plan.moves[:, 0]), WindowWatch(plan))
            self._next, self._undone = 0, []
            self._phase = Phase.MOVING

    def _end_of_moves(self, plan: MovePlan, again: bool) -> None:
        if plan.meets_target:
            self._finish(Outcome.REACHED, "the target is met" if again else plan.reason, plan)
        elif sum(self._dropped.values()):
            self._finish(Outcome.PARTIAL, f"{sum(self._dropped.values())} moves were dropped; now: {plan.reason}", plan)
        else:
            self._finish(Outcome.BEST, plan.reason, plan)

    def _count_allocated(self, columns: BlockFacts) -> None:
        """Add the blocks in use in the last plan's window that are not its own dropped sources."""
        if self._task is None:
            return
        start, length = self._task.plan.window
        in_use = int(np.count_nonzero(columns.states[start : start + length] == BlockState.USED))
        undone = np.concatenate(self._undone) if self._undone else np.empty(0, np.int64)
        self._allocated += in_use - int(np.count_nonzero(columns.states[undone] == BlockState.USED))

    # One chunk

    def _chunk_size(self, seconds_left: float, first: bool) -> int:
        """Moves that fit into the rest of this step; at least one in a step, so that every run gets on."""
        settings = self._settings
        most = min(settings.max_chunk_moves, max(1, settings.max_chunk_bytes // max(1, self._mover.block_bytes)))
        return min(most, max(int(first), self._costs.fitting(seconds_left, first)))

    def _move_next(self, count: int) -> int:
        """Try the next moves; returns how many of them were made."""
        task = self._task
        if task is None:
            raise RuntimeError("moving without a plan")
        ahead = np.arange(self._next, min(self._next + max(count, _LOOK_AHEAD), len(task.plan.moves)))
        began = self._clock()
        tried, kept, before = self._validate(task.plan.moves[ahead], task.planned.of(ahead), count)
        self._next += tried
        made = self._move(kept, before)
        if made:  # moves that are dropped cost next to nothing, and would make all others seem so
            self._costs.took(self._clock() - began, made)
        return made

    def _move(self, kept: Moves, before: BlockFacts) -> int:
        """Make these moves, whose sources are as `before` says; returns how many they are."""
        mover = self._mover
        if not len(kept):
            return 0
        sources, destinations = kept[:, 0], kept[:, 1]
        digests = mover.digests(sources) if self._settings.verify else ()
        reserved = False
        try:
            lost = mover.reserve(kept)
            reserved = True
            mover.copy(kept)
            if self._settings.verify and list(mover.digests(destinations)) != list(digests):
                raise _CheckFailed("contents differ after a copy; nothing of that chunk was committed")
            mover.commit(kept)
        except Exception as error:  # whatever an engine's mover raised, its pool must be made whole again
            self._back_out(kept, before, error, reserved)
            raise
        self._moved += len(kept)
        self._chunks += 1
        self._cached_lost += lost
        self._verified += len(kept) if self._settings.verify else 0
        try:
            problem = audit(before, *self._look(kept.T.ravel()))
        except Exception as error:  # blocks that cannot be checked are not trusted, for whatever reason
            raise _CheckFailed(self._give_up(kept, f"moved blocks cannot be checked: {error!r}")) from error
        if problem:
            raise _CheckFailed(self._give_up(kept, problem))
        return len(kept)

    def _validate(self, moves: Moves, planned: BlockFacts, most: int) -> tuple[int, Moves, BlockFacts]:
        """Go through the moves until `most` are found that may still be made: how many that took, those found, and the
        facts of their sources. The others are counted by reason."""
        facts, found = self._look(moves[:, 0])
        there = self._mover.facts(moves[:, 1])
        valid, dropped = still_valid(planned, facts, found, there)
        good = np.flatnonzero(valid)
        if good.size > most:
            tried = np.arange(good[most])  # up to the first that is one too many
            moves, planned, facts, found, there = (
                moves[tried], planned.of(tried), facts.of(tried), found[tried], there.of(tried)
            )  # fmt: skip
            valid, dropped = still_valid(planned, facts, found, there)
            good = np.flatnonzero(valid)
        candidates = moves[good]
        allowed = np.zeros(0, np.bool_)
        if len(candidates):
            allowed = np.isin(candidates[:, 0], self._mover.revalidate(candidates)[:, 0])
        if refused := int(np.count_nonzero(~allowed)):
            dropped[Drop.ENGINE_REFUSED] = refused
        self._dropped += dropped
        kept: Moves = candidates[allowed]
        self._undone.append(np.setdiff1d(moves[:, 0], kept[:, 0]))
        # These would be dropped from the next plan too; it has to do without them.
        self._immovable.append(np.concatenate((moves[facts.references != found, 0], candidates[~allowed, 0])))
        return len(moves), kept, facts.of(good[allowed])

    def _back_out(self, moves: Moves, before: BlockFacts, error: Exception, reserved: bool) -> None:
        """Give destinations back after a failed chunk, and prove that the pool is as it was; else give them up."""
        sources, destinations = moves[:, 0], moves[:, 1]
        try:
            if reserved:
                self._mover.abandon(moves)
            valid, dropped = still_valid(before, *self._look(sources), self._mover.facts(destinations))
        except Exception as second:  # noqa: BLE001 - two faults in a row, whatever they are, leave nothing proven
            text = f"{error!r}, and backing out failed too: {second!r}"
            raise _CheckFailed(self._give_up(moves, text)) from error
        if not valid.all():
            reasons = ", ".join(reason.value for reason in dropped)
            raise _CheckFailed(self._give_up(moves, f"{error!r} left the pool changed: {reasons}")) from error

    def _give_up(self, moves: Moves, reason: str) -> str:
        """Let nobody read a chunk's blocks any more; returns the reason, and what came of that."""
        try:
            self._mover.give_up(moves)
        except Exception as error:  # noqa: BLE001 - there is nothing left to try; the reason tells both
            return f"{reason}; giving its blocks up failed: {error!r}"
        return f"{reason}; whoever held its {moves.size} blocks is computed anew"

    def _look(self, blocks: NDArray[np.int64]) -> tuple[BlockFacts, NDArray[np.int64]]:
        return self._mover.facts(blocks), self._mover.found(blocks)

    # The end

    def _finish(self, outcome: Outcome, reason: str, final: MovePlan | None = None) -> None:
        """End the run. `final` is a plan made for the pool as it is now; without one the pool is looked at again."""
        self._outcome, self._reason = outcome, reason
        self._final = final
        if final is None:
            self._look_last()
        self._phase = Phase.DONE

    def _look_last(self) -> None:
        """Look at the pool as the run leaves it."""
        try:
            self._columns = self._mover.columns()
        except Exception as error:  # noqa: BLE001 - the run has ended, maybe because of this; its report says less
            self._columns = None
            log.warning("the pool cannot be looked at after a compaction: %r", error)
        self._phase = Phase.DONE

    def _make_report(self) -> CompactionReport:
        final, columns = self._final, self._columns
        if final is None and columns is not None:
            try:
                final = plan_moves(columns.states, owners=columns.owners, positions=columns.positions, max_moves=0)
            except Exception as error:  # noqa: BLE001 - as in `_finish`
                log.warning("the pool cannot be measured after a compaction: %r", error)
        first = self._first
        self._columns = None
        return CompactionReport(
            outcome=self._outcome,
            reason=self._reason,
            planned_moves=len(first.moves) if first else 0,
            moved_blocks=self._moved,
            moved_bytes=self._moved * self._mover.block_bytes,
            dropped={reason.name.lower(): count for reason, count in self._dropped.items()},
            chunks=self._chunks,
            replans=self._replans,
            allocated_in_window=self._allocated,
            verified_blocks=self._verified,
            seconds=self._ended - self._began,
            moving_seconds=self._moving_seconds,
            longest_stall_seconds=self._longest_stall,
            before=Measured.before(first),
            predicted=Measured.predicted(first),
            after=Measured.before(final),
            cached_lost_predicted=first.cached_lost if first and not self._mover.keeps_cached else 0,
            cached_lost=self._cached_lost,
        )
