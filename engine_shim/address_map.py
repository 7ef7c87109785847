"""A set of block ids that gives up its lowest members quickly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_RUNS_PASSED = 1024  # by one search: it must stay quick where free blocks lie one by one


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
        """Remove and return up to `count` members, ascending, of those that lie in runs of `least` or more below `end`:
        of the lowest such runs, and of no more than were found in a short search. What is too much of a run stays."""
        members = self._members
        limit = len(members) if end is None else max(0, min(end, len(members)))
        taken: list[int] = []
        position = self._floor
        missing = count
        passed = 0
        while missing > 0 and passed < MAX_RUNS_PASSED:
            start = members.find(1, position, limit)
            if start < 0:
                break
            stop = min(start + missing, limit)
            gap = members.find(0, start, stop)
            position = stop if gap < 0 else gap
            if position - start >= min(least, missing):
                taken.extend(range(start, position))
                members[start:position] = bytes(position - start)
                missing = count - len(taken)
            else:
                passed += 1
        self.count -= len(taken)
        return taken

    def members(self) -> list[int]:
        """All members, ascending."""
        found: list[int] = np.flatnonzero(np.frombuffer(self._members, np.uint8)).tolist()
        return found
