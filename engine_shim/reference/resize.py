"""The consumer *shrink*: a pool that is to be smaller empties its tail, which is then reserved; and it grows again.

Nothing of the tail is handed out from the first step on. Live blocks move below the cut, prefixes are copied there
where blocks are free, else evicted; blocks in transfer are waited for. Where the tail is not empty in time, the pool
goes back to the size that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from engine_shim.block_pool import BlockPool
from engine_shim.compaction_report import CompactionReport, Outcome
from engine_shim.compaction_run import RunSettings
from engine_shim.errors import ControlRefused, SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool_moves import PoolMoves
from engine_shim.reference.compactor import Compactor
from engine_shim.reference.sequence import Sequence
from engine_shim.tail_plan import plan_tail

_BLOCKS_A_STEP = 2048  # looked at between two steps, so that a large tail holds no step up

Done = Callable[[CompactionReport], None]
Copy = Callable[[list[tuple[int, int]]], None]


class PoolSize:
    """How many of its blocks a pool uses: the first ones. For the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        moves: PoolMoves,
        compactor: Compactor,
        copy: Copy,
        sequences: Callable[[], Iterable[Sequence]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`copy` copies blocks' contents at once. `sequences` are all that run or wait, whose size a smaller pool must
        still hold."""
        self._pool, self._moves, self._compactor, self._copy = pool, moves, compactor, copy
        self._sequences, self._clock = sequences, clock
        self.blocks = pool.num_blocks
        self._target = pool.num_blocks
        self._withdrawn: set[int] = set()  # by this; others were reserved from the start
        self._settings: RunSettings | None = None
        self._done: Done | None = None
        self._last: CompactionReport | None = None
        self._moved = self._next = 0
        self._began = 0.0
        self._waiting = False  # for blocks in transfer

    @property
    def active(self) -> bool:
        """Is the pool on its way to another size?"""
        return self._settings is not None

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
        self._refuse_where_too_small(blocks)
        self._target, self._next, self._moved, self._last = blocks, blocks, 0, None
        self._settings, self._done = settings or self._compactor.defaults, done
        self._began, self._waiting = self._clock(), False

    def step(self) -> bool:
        """One step boundary, before the compactor's own; True while the pool is on its way."""
        settings = self._settings
        if settings is None:
            return False
        passed = self._sweep()
        if self._compactor.active or not passed:
            return True
        used, pinned = self._count_left()
        self._waiting = pinned > 0 and not used
        if not used and not pinned:
            self._end(Outcome.REACHED, f"the pool uses {self._target} blocks")
            return False
        stopped = self._compactor.switch.reason
        if self._last is not None and self._last.outcome in (Outcome.FAILED, Outcome.ABORTED, Outcome.REFUSED):
            stopped = self._last.reason
        left = settings.max_seconds - (self._clock() - self._began)
        if stopped or left <= 0:
            reason = stopped or f"{used} blocks are in use and {pinned} pinned after {settings.max_seconds:g} s"
            self._end(self._last.outcome if stopped and self._last else Outcome.PARTIAL, reason)
            return False
        if used:
            self._compactor.start(
                replace(settings, max_seconds=left), done=self._note, planner=partial(plan_tail, keep=self._target)
            )
        return True

    def _note(self, report: CompactionReport) -> None:
        self._last = report
        self._moved += report.moved_blocks

    def _sweep(self) -> bool:
        """Withdraw what is free in the next part of the tail, and move prefixes out of it; True at the tail's end."""
        pool, end = self._pool, self.blocks
        stop = min(end, self._next + _BLOCKS_A_STEP)
        part = range(self._next, stop)
        states = np.fromiter(map(pool.state, part), np.uint8, len(part))
        cached = (np.flatnonzero(states == BlockState.CACHED) + self._next).tolist()
        if cached:
            self._clear(cached)
        free = (np.flatnonzero(states <= BlockState.CACHED) + self._next).tolist()
        self._moves.withdraw(free)
        self._withdrawn.update(free)
        self._next = self._target if stop == end else stop
        return stop == end

    def _clear(self, cached: list[int]) -> None:
        homes = np.flatnonzero(self._pool.states()[: self._target] == BlockState.FREE)[: len(cached)].tolist()
        copies = list(zip(cached, homes, strict=False))
        if copies:
            self._copy(copies)
            self._moves.relocate(copies)
        self._moves.evict(cached[len(copies) :])

    def _count_left(self) -> tuple[int, int]:
        tail = self._pool.states()[self._target : self.blocks]
        pinned = int(np.count_nonzero(tail == BlockState.PINNED))
        return int(np.count_nonzero(tail != BlockState.RESERVED)) - pinned, pinned

    def _restore(self, *, below: int) -> None:
        back = sorted(block for block in self._withdrawn if block < below)
        self._moves.restore(back)
        self._withdrawn.difference_update(back)

    def _end(self, outcome: Outcome, reason: str) -> None:
        if outcome is Outcome.REACHED:
            self.blocks = self._target
        else:
            self._restore(below=self.blocks)
            self._target = self.blocks
        done, self._settings, self._done = self._done, None, None
        if done is not None:
            base = self._last or CompactionReport.nothing(outcome, reason)
            done(replace(base, outcome=outcome, reason=reason, moved_blocks=self._moved))

    def _refuse_where_too_small(self, blocks: int) -> None:
        pool = self._pool
        reserved = int(np.count_nonzero(pool.states()[:blocks] == BlockState.RESERVED))
        largest = max((-(-(sequence.max_tokens - 1) // pool.block_tokens) for sequence in self._sequences()), default=0)
        if blocks - reserved < largest + pool.headroom_blocks:
            raise SettingsError(
                f"{blocks} blocks are too few: a sequence that is served here needs {largest}, "
                f"beside {pool.headroom_blocks} of headroom and {reserved} reserved"
            )
