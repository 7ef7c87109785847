"""A set of block ids that gives up its lowest members quickly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEARCHED_BLOCKS = 1 << 17  # by one search for runs: a pass over so many takes at most some 0.2 ms


class AddressMap:
    """One byte a block, searched with memchr: quick to scan, and runs of neighbours are taken in one piece."""

    __slots__ = ("_floor", "_members", "count")

    def __init__(self, blocks: Sequence[int], *, size: int | None = None) -> None:
        """`size` bounds the ids that may ever be added; by default what is above the highest given may not be."""
        column = np.zeros(max(blocks, default=-1) + 1 if size is None else size, np.uint8)
        column[np.asarray(blocks, np.int64)] = 1
        self._members = bytearray(column)
        self._floor = 0  # no member is below it
        self.count = len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks that are not members."""
        members = self._members
        for block in blocks:
            members[block] = 1
        self._floor = min(self._floor, min(blocks, default=self._floor))
        self.count += len(blocks)

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove members."""
        members = self._members
        for block in blocks:
            members[block] = 0
        self.count -= len(blocks)

    def take_lowest(self, count: int, end: int | None = None) -> list[int]:
        """Remove and return the `count` lowest members, ascending: as many as there are, of those below `end`."""
        members = self._members
        limit = len(members) if end is None else max(0, min(end, len(members)))
        taken: list[int] = []
        floor = self._floor
        while len(taken) < count:
            start = members.find(1, floor, limit)
            if start < 0:
                floor = max(floor, limit)
                break
            stop = min(start + count - len(taken), limit)
            gap = members.find(0, start, stop)
            floor = stop if gap < 0 else gap
            taken.extend(range(start, floor))
            members[start:floor] = bytes(floor - start)
        self._floor = floor
        self.count -= len(taken)
        return taken

    def take_runs(self, count: int, least: int, end: int | None = None) -> list[int]:
        """Remove and return up to `count` members, ascending, of those that lie in runs of `least` or more (or of as
        many as are still wanted): of the lowest such runs among the last SEARCHED_BLOCKS below `end`. What is too much
        of a run stays.

        The search is for `least` members in a row, in one pass: single members, however many, do not end it.
        """
        if self.count < min(least, count):
            return []
        members = self._members
        limit = len(members) if end is None else max(0, min(end, len(members)))
        position = max(self._floor, limit - SEARCHED_BLOCKS)
        taken: list[int] = []
        missing = count
        while missing > 0:
            start = members.find(1, position, limit)  # passes over what are no members ten times as fast
            if start >= 0:
                start = members.find(b"\x01" * min(least, missing), start, limit)
            if start < 0:
                break
            stop = min(start + missing, limit)
            gap = members.find(0, start, stop)
            position = stop if gap < 0 else gap
            taken.extend(range(start, position))
            members[start:position] = bytes(position - start)
            missing = count - len(taken)
        self.count -= len(taken)
        return taken

    def members(self) -> list[int]:
        """All members, ascending."""
        found: list[int] = np.flatnonzero(self.mask()).tolist()
        return found

    def mask(self) -> NDArray[np.bool_]:
        """Which ids are members: a view, for reading only, that follows changes."""
        return np.frombuffer(self._members, np.bool_)
