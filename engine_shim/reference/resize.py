"""The consumer *shrink*: a pool that is to be smaller empties its tail, which is then reserved; and it grows again.

Nothing of the tail is handed out from the first step on. Live blocks move below the cut, prefixes are copied there
where blocks are free, else evicted; blocks in transfer are waited for. Where the tail is not empty in time, the pool
goes back to the size that it had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from engine_shim.compaction.compactor import Compactor
from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.tail_plan import plan_tail
from engine_shim.errors import ControlRefused, SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.pool_moves import PoolMoves
from engine_shim.reference.sequence import Sequence

log = logging.getLogger(__name__)

_LOOKED_AT = 256  # blocks at once, so that a large tail holds no step up

Done = Callable[[CompactionReport], None]
Copy = Callable[[list[tuple[int, int]]], None]
Refusal = Callable[[Sequence, int], str | None]


class PoolSize:
    """How many of its blocks a pool uses: the first ones. For the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        moves: PoolMoves,
        compactor: Compactor,
        copy: Copy,
        sequences: Callable[[], Iterable[Sequence]],
        refusal: Refusal,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`copy` copies blocks' contents at once. `sequences` are all that run or wait, and `refusal` says why one can
        never be served by so many usable blocks, or None where it can."""
        self._pool, self._moves, self._compactor, self._copy = pool, moves, compactor, copy
        self._sequences, self._refusal, self._clock = sequences, refusal, clock
        self.blocks = pool.num_blocks
        self._target = pool.num_blocks
        self._withdrawn: set[int] = set()  # by this; others were reserved from the start
        self._settings: RunSettings | None = None
        self._done: Done | None = None
        self._last: CompactionReport | None = None
        self._own_reserved = 0  # below the target, and not by this
        self._next = 0  # the first block of the tail that this pass has not looked at
        self._used = self._pinned = 0  # of the tail, as far as this pass has looked
        self._homes: list[int] | None = None  # free blocks below the target when this pass needed the first one
        self._touched: list[int] = []  # blocks whose books are being changed
        self._cleared_at_once = 1  # prefixes, by what the last ones took
        self._moved = self._copied = self._lost = 0  # by runs; prefixes copied; prefixes evicted
        self._began = self._longest_stall = self._moving_seconds = 0.0
        self._waiting = False  # for blocks in transfer

    @property
    def active(self) -> bool:
        """Is the pool on its way to another size?"""
        return self._settings is not None

    @property
    def usable_blocks(self) -> int:
        """What a sequence that comes now can count on: of a pool that shrinks, what will be left."""
        return min(self._pool.usable_blocks, self._usable(self._target)) if self.active else self._pool.usable_blocks

    @property
    def wants_step(self) -> bool:
        """Should an idle engine take its next step at once? Not where a transfer must end first."""
        return self.active and not self._waiting

    def resize(self, blocks: int, *, settings: RunSettings | None = None, done: Done | None = None) -> None:
        """Use the first `blocks` of the pool. Growing is done at once; shrinking goes on step by step, and `done` gets
        a report: REACHED, or what stood in the way.

        Raises:
            SettingsError: the pool never had so many, or a sequence that it serves does not fit into so few.
            ControlRefused: a run is in progress.
        """
        if self.active or self._compactor.active:
            raise ControlRefused("a run is in progress; wait for it to end, or abort it", error="busy")
        if not 1 <= blocks <= self._pool.num_blocks:
            raise SettingsError(f"{blocks} blocks: this pool can use 1 to {self._pool.num_blocks}")
        if blocks >= self.blocks:
            self._restore(below=blocks)
            self.blocks = self._target = blocks
            return
        states = self._pool.states()[:blocks]
        self._own_reserved = int(np.count_nonzero(states == BlockState.RESERVED))
        if problem := self._too_small(blocks):
            raise SettingsError(problem)
        self._target, self._last = blocks, None
        self._begin_pass()
        self._moved = self._copied = self._lost = 0
        self._longest_stall = self._moving_seconds = 0.0
        self._settings, self._done = settings or self._compactor.defaults, done
        self._began, self._waiting = self._clock(), False

    def step(self) -> bool:
        """One step boundary, before the compactor's own; True while the pool is on its way. Never raises."""
        settings = self._settings
        if settings is None:
            return False
        began = self._clock()
        try:
            end = self._advance(settings, began + settings.max_step_seconds)
        except Exception as error:  # noqa: BLE001 - whatever a copy or the pool raises must not reach the engine's step
            log.warning("a pool could not be made smaller: %r", error)
            self._compactor.abort("the pool's change of size failed")
            end = (Outcome.FAILED, f"{type(error).__name__}: {error}")
        stall = self._clock() - began
        self._longest_stall = max(self._longest_stall, stall)
        self._moving_seconds += stall
        if end is not None:
            self._end(*end)
        return self.active

    def _advance(self, settings: RunSettings, deadline: float) -> tuple[Outcome, str] | None:
        """Do what fits into one step boundary; how it ended, None while it goes on."""
        switched_off = self._compactor.switch.reason
        if switched_off:  # a run in progress ends by itself, and is waited for
            stopped = Outcome.ABORTED if self._moved or self._copied else Outcome.REFUSED
            return None if self._compactor.active else (stopped, switched_off)
        passed = self._sweep(settings, deadline)
        if self._compactor.active:
            if passed:
                self._begin_pass()
            return None
        if self._last is not None and self._last.outcome in (Outcome.FAILED, Outcome.ABORTED, Outcome.REFUSED):
            return self._last.outcome, self._last.reason
        left = settings.max_seconds - (self._clock() - self._began)
        if not passed and left > 0:
            return None
        used, pinned = self._used, self._pinned
        if passed:
            self._begin_pass()
            self._waiting = pinned > 0 and not used
            if not used and not pinned:
                problem = self._too_small(self._target)
                return (
                    (Outcome.PARTIAL, problem) if problem else (Outcome.REACHED, f"the pool uses {self._target} blocks")
                )
        if left <= 0:
            return Outcome.PARTIAL, f"{used} blocks are in use and {pinned} pinned after {settings.max_seconds:g} s"
        if used:
            self._compactor.start(
                replace(settings, max_seconds=left), done=self._note, planner=partial(plan_tail, keep=self._target)
            )
        return None

    def _note(self, report: CompactionReport) -> None:
        self._last = report
        self._moved += report.moved_blocks
        self._lost += report.cached_lost
        self._moving_seconds += report.moving_seconds
        self._longest_stall = max(self._longest_stall, report.longest_stall_seconds)
        self._begin_pass()  # what it has moved away is to be looked at again

    # One pass over the tail

    def _begin_pass(self) -> None:
        self._next, self._homes = self._target, None
        self._used = self._pinned = 0

    def _sweep(self, settings: RunSettings, deadline: float) -> bool:
        """Withdraw what is free in the tail, and move prefixes out of it, until `deadline`; True at the tail's end.

        At least one part of it is done in each step, so that every pass gets to its end.
        """
        room = max(1, settings.max_chunk_bytes // max(1, self._compactor.mover.block_bytes))
        until = self._copied + room
        while self._next < self.blocks:
            began = self._clock()
            count = min(self._cleared_at_once, settings.max_chunk_moves, until - self._copied)
            cleared = self._clear_part(count)
            now = self._clock()
            spent = now - began
            if spent > settings.max_step_seconds / 4:
                self._cleared_at_once = max(1, count // 2)
            elif cleared == count and spent < settings.max_step_seconds / 16:
                self._cleared_at_once = 2 * count
            if now + 2 * spent >= deadline or self._copied >= until:
                break
        return self._next >= self.blocks

    def _clear_part(self, most: int) -> int:
        """Look at the next blocks, as far as there are at most so many prefixes to move or evict; returns how many
        there were."""
        part = range(self._next, min(self.blocks, self._next + _LOOKED_AT))
        states = np.fromiter(map(self._pool.state, part), np.uint8, len(part))
        where = np.flatnonzero(states == BlockState.CACHED)
        if len(where) > most:
            states = states[: where[most]]
            where = where[:most]
        cached = (where + part.start).tolist()
        free = (np.flatnonzero(states <= BlockState.CACHED) + part.start).tolist()
        copies = self._copies(cached)
        if copies:
            self._copy(copies)
        self._touched = [*free, *(home for _, home in copies)]
        self._moves.relocate(copies)
        self._moves.evict(cached[len(copies) :])
        self._moves.withdraw(free)
        self._withdrawn.update(free)
        self._touched = []
        self._copied += len(copies)
        self._lost += len(cached) - len(copies)
        self._used += int(np.count_nonzero(states == BlockState.USED))
        self._pinned += int(np.count_nonzero(states == BlockState.PINNED))
        self._next += len(states)
        return len(cached)

    def _copies(self, cached: list[int]) -> list[tuple[int, int]]:
        """A home below the target for each prefix, as far as there are such."""
        copies: list[tuple[int, int]] = []
        if cached and self._homes is None:
            self._homes = np.flatnonzero(self._pool.states()[: self._target] == BlockState.FREE)[::-1].tolist()
        while self._homes and len(copies) < len(cached):
            home = self._homes.pop()
            if self._pool.state(home) is BlockState.FREE:
                copies.append((cached[len(copies)], home))
        return copies

    # The end

    def _restore(self, *, below: int) -> None:
        back = sorted(block for block in self._withdrawn if block < below)
        self._moves.restore(back)
        self._withdrawn.difference_update(back)

    def _end(self, outcome: Outcome, reason: str) -> None:
        """Never raises: what fails here is logged, and the pool goes on with the blocks that it has."""
        done, self._settings, self._done = self._done, None, None
        try:
            if self._touched:  # the books of these were being changed; they hold prefixes at most
                touched, self._touched = self._touched, []
                self._moves.scrap(touched)
                out = [block for block in touched if self._pool.state(block) is BlockState.RESERVED]
                self._withdrawn.difference_update(touched)
                self._withdrawn.update(out)
            if outcome is Outcome.REACHED:
                self.blocks = self._target
            else:
                self._target = self.blocks
                self._restore(below=self.blocks)
            if done is not None:
                done(self._report(outcome, reason))
        except Exception as error:  # noqa: BLE001 - as in `step`
            log.error("a pool could not go back to the size that it had, or tell of it: %r", error)

    def _report(self, outcome: Outcome, reason: str) -> CompactionReport:
        moved = self._moved + self._copied
        return replace(
            self._last or CompactionReport.nothing(outcome, reason),
            outcome=outcome,
            reason=reason,
            moved_blocks=moved,
            moved_bytes=moved * self._compactor.mover.block_bytes,
            cached_lost=self._lost,
            seconds=self._clock() - self._began,
            moving_seconds=self._moving_seconds,
            longest_stall_seconds=self._longest_stall,
        )

    def _usable(self, blocks: int) -> int:
        return blocks - self._own_reserved

    def _too_small(self, blocks: int) -> str:
        """Why so few blocks cannot serve all that runs or waits, "" where they can."""
        usable = self._usable(blocks)
        reasons = (self._refusal(sequence, usable) for sequence in self._sequences())
        reason = next((reason for reason in reasons if reason is not None), None)
        return "" if reason is None else f"{blocks} blocks are too few for what is served here: {reason}"
