"""Tells when a window fills as fast as it is emptied, so that a run that cannot reach its goal ends early."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_shim.compaction.planning import MovePlan
from engine_shim.layout import BlockState

SAMPLE_BLOCKS = 256
_LOOKS = 16  # over the moves of a plan: one does not cost more than a chunk
_LEAST_MOVES = 32  # between two looks
_LEAST_FILLED = 8  # of the sample: fewer may be chance


class WindowWatch:
    """Watches some blocks of one plan's window, evenly spread over it. Counts are blocks."""

    def __init__(self, plan: MovePlan) -> None:
        start, length = plan.window
        count = min(SAMPLE_BLOCKS, length)
        self.blocks: NDArray[np.int64] = start + np.arange(count) * length // max(1, count)
        self._length = length
        self._sources = plan.moves[:, 0]
        self._between = max(_LEAST_MOVES, len(plan.moves) // _LOOKS)
        self._due = self._between
        self._filled_before = 0  # at the last look, where that was as much as had been moved; else 0

    def is_due(self, tried: int) -> bool:
        """Is it time for a look, after so many moves of the plan?"""
        return tried >= self._due

    def problem(self, states: NDArray[np.uint8], tried: int, moved: int) -> str:
        """Why going on is of no use, "" where it may be of some. `states` are those of the watched blocks after `tried`
        moves, of which `moved` were made.

        It is of none where, at two looks in a row, at least as many blocks of the window are in use that are none of
        the plan's own as were moved out of it, and more at the second look than at the first: what was allocated there
        once, a next plan can move.
        """
        self._due = tried + self._between
        taken = (states == BlockState.USED) | (states == BlockState.PINNED)
        taken &= ~np.isin(self.blocks, self._sources[tried:])
        count = int(np.count_nonzero(taken))
        filled = round(count / self.blocks.size * self._length) - (tried - moved)  # what was dropped is in use too
        before, self._filled_before = self._filled_before, filled if filled >= max(moved, 1) else 0
        if not 0 < before < self._filled_before or count < min(_LEAST_FILLED, self.blocks.size):
            return ""
        return f"the window fills as fast as it is emptied: {filled} of its blocks, while {moved} were moved"
