"""Compares what the map was told with the cache itself, and tells it anew where they differ.

Every operation is hooked, so a difference is a fault: of ours, or a way around these operations that Transformers has
gained. The counts are compared exactly and cost the same for any pool; of the tables, a part is compared each time.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim.adapters.transformers.blocks import BlockSpace
from engine_shim.adapters.transformers.identity import Geometry
from engine_shim.adapters.transformers.requests import RequestBook
from engine_shim.adapters.transformers.sectors import SectorBook
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.errors import MapCorrupt
from engine_shim.layout import BlockState

log = logging.getLogger("kvatlas.shim")

MOST_REPAIRS = 3  # a map that has to be told anew this often is not understood
_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)


class Audit:
    """Looks at one cache; all spaces of its map are told anew at once where one is wrong."""

    def __init__(
        self,
        cache: Any,
        geometry: Geometry,
        observer: MapObserver,
        spaces: tuple[BlockSpace, ...],
        sectors: SectorBook | None,
        book: RequestBook,
        *,
        blocks_a_turn: int,
    ) -> None:
        self._cache = cache
        self._geometry = geometry
        self._observer = observer
        self._spaces = spaces
        self._sectors = sectors
        self._book = book
        self._turn = blocks_a_turn
        self._next = 0
        self._repairs = 0

    def adopt(self) -> None:
        """Tell a fresh map of the cache as it is: the reserved sectors, and whatever is in use already."""
        self._observer.reserved(range(self._geometry.reserved_sectors * self._geometry.units_per_sector))
        self._tell()

    def take_turn(self) -> bool:
        """Compare, with the map published up to now; whether it had to be repaired.

        Raises:
            MapCorrupt: it was repaired too often.
        """
        problem = self._counts() or self._tables()
        if not problem:
            return False
        self._repairs += 1
        log.error("%s; the map is told anew, and that is counted as a repair", problem)
        if self._repairs > MOST_REPAIRS:
            raise MapCorrupt(f"the map was wrong {self._repairs} times: {problem}")
        wrong = self._clear()
        self._tell()
        self._observer.counted("repairs", max(1, wrong))
        return True

    def _counts(self) -> str:
        """Blocks in use are those of the sectors given out that are neither free nor cached."""
        pool, geometry = self._cache.pool, self._geometry
        held = (int(self._cache.num_sectors) - len(pool.free_sectors)) * geometry.units_per_sector
        held -= sum(int(pool.count_free_blocks(space.group)) * space.width for space in self._spaces)
        told = sum((space.used + space.cached_blocks) * space.width for space in self._spaces)
        if told != held:
            return f"{told} map blocks are in use or cached in the map, {held} in the cache"
        for space in self._spaces:
            if space.cached_blocks != len(space.allocator.ledger.cached_blocks):
                cached = len(space.allocator.ledger.cached_blocks)
                return f"group {space.group} has {space.cached_blocks} cached blocks in the map, {cached} in the cache"
        return ""

    def _tables(self) -> str:
        """One request's blocks, each time another's."""
        states, references = self._observer.columns.get("state"), self._observer.columns.get("references")
        if states is None or references is None:
            return ""
        for space in self._spaces:
            tables, shared = space.allocator.block_table, space.allocator.ledger.shared_ref_counts
            if not tables:
                continue
            names = list(tables)
            table = tables[names[self._next % len(names)]][-self._turn :]
            if not table:
                continue
            units = np.array(table, np.int64) * space.width + space.width - 1
            wanted = np.fromiter((min(shared.get(block, 1), 0xFFFF) for block in table), np.int64, len(table))
            wrong = (states[units] != _USED) | (references[units] != wanted)
            if wrong.any():
                place = int(wrong.argmax())
                return (
                    f"block {table[place]} of group {space.group} has {int(wanted[place])} references in the cache, "
                    f"and {int(references[units[place]])} in the map, in state {int(states[units[place]])}"
                )
        self._next += 1
        return ""

    def _clear(self) -> int:
        """Everything that the map shows in use or cached becomes free; how many entries were not as in the cache."""
        self._observer.publish()
        states = self._observer.columns["state"]
        truth = self._truth()
        wrong = int(np.count_nonzero(states != truth))
        used, cached = np.flatnonzero(states == _USED).tolist(), np.flatnonzero(states == _CACHED).tolist()
        if used:
            self._observer.freed(used)
        if cached:
            self._observer.evicted(cached)
        self._book.forget()
        for space in self._spaces:
            space.forget()
        if self._sectors is not None:
            self._sectors.forget()
        return wrong

    def _truth(self) -> NDArray[np.uint8]:
        """What the cache's own tables say of every entry of the map."""
        geometry = self._geometry
        truth = np.full(geometry.total_units, _FREE, np.uint8)
        truth[: geometry.reserved_sectors * geometry.units_per_sector] = int(BlockState.RESERVED)
        for space in self._spaces:
            for state, blocks in (
                (_CACHED, list(space.allocator.ledger.cached_blocks)),
                (_USED, [block for table in space.allocator.block_table.values() for block in table]),
            ):
                if blocks:
                    truth[np.array(space.units(blocks), np.int64)] = state
        return truth

    def _tell(self) -> None:
        """Tell of everything in the tables and ledgers, over a map in which all is free."""
        book = self._book
        for space in self._spaces:
            references: Counter[int] = Counter()
            for name, table in space.allocator.block_table.items():
                owner = book.owner_of(name)
                for place, block in enumerate(table):
                    if references[block]:
                        space.shared([block], owner)
                    else:
                        space.allocated([block], owner, place)
                    references[block] += 1
            cached = list(space.allocator.ledger.cached_blocks)
            if cached:
                space.allocated(cached, 0, 0)
                units: list[int] = []
                tokens: list[int] = []
                for block in cached:
                    space.filled([block], 0, space.page, units, tokens)  # only complete blocks are cached
                self._observer.wrote(units, tokens, 0)
                space.cached(cached)
        book.tell_again()
