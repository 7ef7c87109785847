"""How many moves fit into a step: learnt from the chunks that were made, each of which costs something however few its
moves are, and something by the move."""

from __future__ import annotations

# Of the time left in a step, what a chunk is sized for: the rest is for the chunk that takes longer than the last one.
_USABLE_TIME = 0.5
_LEAST_SECONDS = 1e-9  # of a chunk or a move, as a clock may show none at all
_FEW = 4  # moves: what is no more than these is a small chunk
_SLOPE_AGES = 0.95  # by a chunk: what a hiccup or a chance made to seem dear is tried again some time


class ChunkCosts:
    """Remembers a small chunk and a large one. A chunk of n moves takes a line through both; and since no chunk is free
    of cost for being small, one of k times as many moves takes no more than k times as long, which needs no line.

    A small chunk, as the last one of a plan is, tells what chunks cost however few their moves are; it does not make
    the next ones small. One that the machine broke in on makes them small until they have doubled up again.
    """

    def __init__(self) -> None:
        self._small = self._large = (0, _LEAST_SECONDS)  # moves, seconds; (0, …) before the first chunk
        self._last_count = 0
        self._each_seconds = _LEAST_SECONDS  # by the move beyond the small chunk; the least until something tells

    def took(self, seconds: float, count: int) -> None:
        """Learn from a chunk of `count` moves, 1 or more."""
        chunk = (count, max(seconds, _LEAST_SECONDS))
        self._last_count = count
        if not self._small[0]:
            self._small = self._large = chunk
            return
        self._each_seconds = max(_LEAST_SECONDS, self._each_seconds * _SLOPE_AGES)
        few, many = self._small[0], self._large[0]
        if count >= many or (count > max(few, _FEW) and count * count >= few * many):
            self._large = chunk
        else:
            self._small = chunk
        (few, least), (many, most) = self._small, self._large
        self._small = (few, min(least, most))  # more moves than these took no longer
        if count > few:
            self._each_seconds = max(_LEAST_SECONDS, (chunk[1] - least) / (count - few))

    def fitting(self, seconds_left: float, first: bool) -> int:
        """How many moves fit into so much time; at most twice as many as in the large chunk, since all of this is
        guessed. 0 where none fit, or nothing is known yet.

        The first chunk of a step is made in any case, so that its fixed cost is spent: what is left beside that is for
        moves. Another one must be larger than the last.
        """
        (few, least), (many, most) = self._small, self._large
        if not few or seconds_left <= 0:
            return 0
        usable = seconds_left * _USABLE_TIME
        fits = max(few * usable / least, many * usable / most)
        beyond = (seconds_left - least) * _USABLE_TIME if first else usable - least
        if beyond > 0:
            fits = max(fits, beyond / self._each_seconds)
        fits = min(fits, 2 * max(few, many))
        return int(fits) if first or fits > self._last_count else 0
