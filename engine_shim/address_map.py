"""A set of block ids that gives up its lowest members quickly."""

from __future__ import annotations

from collections.abc import Sequence


class AddressMap:
    """One byte a block, searched with memchr: quick to scan, and runs of neighbours are taken in one piece."""

    __slots__ = ("_floor", "_members", "count")

    def __init__(self, blocks: Sequence[int]) -> None:
        self._members = bytearray(max(blocks, default=-1) + 1)
        for block in blocks:
            self._members[block] = 1
        self._floor = 0  # no member is below it
        self.count = len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks that are not members; they are below the highest that there was at first, or equal to it."""
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

    def take_lowest(self, count: int) -> list[int]:
        """Remove and return the `count` lowest members, ascending; there must be as many."""
        members = self._members
        taken: list[int] = []
        floor = self._floor
        while len(taken) < count:
            start = members.find(1, floor)
            end = members.find(0, start, start + count - len(taken))
            floor = end if end >= 0 else min(start + count - len(taken), len(members))
            taken.extend(range(start, floor))
            members[start:floor] = bytes(floor - start)
        self._floor = floor
        self.count -= count
        return taken
