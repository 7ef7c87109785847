"""What a chunk of moves costs, learnt from those that were made: something however few its moves are, and each move."""

from __future__ import annotations

import math

# Of the time left in a step, what a chunk is sized for: the rest is for the chunk that takes longer than the last one.
_USABLE_TIME = 0.5
_LEAST_SECONDS = 1e-9  # of a chunk or a move, as a clock may show none at all
# By how much a chunk makes older ones count for less: what was learnt in a hiccup, or of a smaller batch, is unlearnt.
_QUICKEST_AGES, _EACH_AGES = 1.01, 0.95


class ChunkCosts:
    """Two guesses, of a chunk's fixed cost (what the quickest one took) and of a move's (what a larger chunk took
    beyond that). Without the former, small chunks would seem to be dear by the move and stay small."""

    def __init__(self) -> None:
        self._last_count = 0  # moves of the last chunk; 0 before the first
        self._quickest_seconds, self._quickest_count = math.inf, 0
        self._each_seconds = _LEAST_SECONDS  # until a chunk larger than the quickest one tells

    def took(self, seconds: float, count: int) -> None:
        """Learn from a chunk of `count` moves, 1 or more."""
        seconds = max(seconds, _LEAST_SECONDS)
        self._last_count = count
        self._quickest_seconds *= _QUICKEST_AGES
        self._each_seconds = max(_LEAST_SECONDS, self._each_seconds * _EACH_AGES)
        if seconds <= self._quickest_seconds:
            self._quickest_seconds, self._quickest_count = seconds, count
        elif count > self._quickest_count:
            beyond = (seconds - self._quickest_seconds) / (count - self._quickest_count)
            self._each_seconds = max(_LEAST_SECONDS, beyond)

    def fitting(self, seconds_left: float, first: bool) -> int:
        """How many moves fit into so much time; at most twice as many as last time, since all of this is guessed.

        The first chunk of a step is made in any case, so that its fixed cost is spent: what is left beside that is for
        moves. Others must be worth it. 0 where none fit, or nothing is known yet.
        """
        fixed = self._quickest_seconds
        if self._last_count == 0:
            return 0
        left = (seconds_left - fixed) * _USABLE_TIME if first else seconds_left * _USABLE_TIME - fixed
        return 0 if left <= 0 else min(2 * self._last_count, int(left / self._each_seconds))
