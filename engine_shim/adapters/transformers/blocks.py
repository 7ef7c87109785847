"""One allocator's blocks in the map: translates its block numbers into units, and counts what it has told."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from engine_shim.adapters.transformers.sectors import SectorBook
from engine_shim.allocation_map.map_observer import MapObserver


class BlockSpace:
    """What `PoolObserver` says of blocks, for blocks that are `width` neighbouring entries of the map each.

    `named` has the owner that each block names in the map, by block. It is read where a holder leaves.
    """

    def __init__(
        self, allocator: Any, width: int, blocks: int, observer: MapObserver, sectors: SectorBook | None
    ) -> None:
        self.allocator = allocator
        self.width = width
        self.blocks = blocks
        self.group = int(allocator.index)
        self.page = int(allocator.tokens_per_page)
        self.window = int(getattr(allocator, "sliding_window", 0) or 0)
        self.named = array("I", bytes(4 * blocks))
        self.used = self.cached_blocks = self.changes = 0
        self._observer = observer
        self._sectors = sectors
        self._per_sector = int(allocator.blocks_per_sector)

    def allocated(self, blocks: Sequence[int], owner: int, position: int) -> None:
        """FREE to USED, as PoolObserver; `position` counts the allocator's blocks."""
        self._name(blocks, owner)
        self._observer.allocated(self.units(blocks), owner, position * self.width, self.group)
        self._count(blocks, 1, 0)

    def reused(self, blocks: Sequence[int], owner: int, position: int) -> None:
        """CACHED to USED."""
        self._name(blocks, owner)
        self._observer.reused(self.units(blocks), owner, position * self.width, self.group)
        self._count(blocks, 1, -1)

    def shared(self, blocks: Sequence[int], owner: int) -> None:
        """One more reference."""
        self.changes += 1
        self._observer.shared(self.units(blocks), owner)

    def unshared(self, blocks: Sequence[int], owner: int) -> None:
        """One reference fewer."""
        self.changes += 1
        self._observer.unshared(self.units(blocks), owner)

    def held_by(self, blocks: Sequence[int], owner: int, position: int) -> None:
        """Shared blocks whose named holder has left name another."""
        self._name(blocks, owner)
        self._observer.held_by(self.units(blocks), owner, position * self.width, self.group)

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        """USED to FREE."""
        self._observer.freed(self.units(blocks), owner)
        self._count(blocks, -1, 0)

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        """USED to CACHED."""
        self._observer.cached(self.units(blocks), owner)
        self._count(blocks, -1, 1)

    def evicted(self, blocks: Sequence[int]) -> None:
        """CACHED to FREE."""
        self._observer.evicted(self.units(blocks))
        self._count(blocks, 0, -1)

    def filled(self, table: Sequence[int], before: int, after: int, blocks: list[int], tokens: list[int]) -> None:
        """A sequence of `before` tokens has `after`: append the units that changed, and their tokens.

        Sliding attention keeps the last tokens in a ring over its window, so its blocks fill up once.
        """
        if self.window:
            before, after = min(before, self.window), min(after, self.window)
        if after <= before:
            return
        page, width = self.page, self.width
        for place in range(before // page, min((after - 1) // page + 1, len(table))):
            first = table[place] * width
            held = min(page, after - place * page)
            for unit in range(first, first + width):
                blocks.append(unit)
                tokens.append(held)

    def units(self, blocks: Sequence[int]) -> Sequence[int]:
        """The map's entries of these blocks, in order. A copy, since what is journaled must not change any more."""
        if self.width == 1:
            return list(blocks)
        return [unit for block in blocks for unit in range(block * self.width, (block + 1) * self.width)]

    def forget(self) -> None:
        """What was told is void; everything is going to be told anew."""
        self.used = self.cached_blocks = 0
        self.named = array("I", bytes(4 * self.blocks))

    def _name(self, blocks: Sequence[int], owner: int) -> None:
        named = self.named
        for block in blocks:
            named[block] = owner

    def _count(self, blocks: Sequence[int], used: int, cached: int) -> None:
        count = len(blocks)
        self.changes += 1
        self.used += used * count
        self.cached_blocks += cached * count
        if self._sectors is not None and count:
            per_sector = self._per_sector
            self._sectors.changed([block // per_sector for block in blocks], self.group, used, cached)
