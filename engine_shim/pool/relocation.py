"""The policy `relocating`: evicts what vLLM would evict, and keeps what is in use together at low addresses.

A cached prefix is worth what its contents are worth, not where it lies. So the order of eviction is kept over contents
(as in `vllm`: nothing cached is evicted while anything is free, then the least recently used), and where the next
block lies is chosen apart from it. A block that is to be handed out and holds a prefix has it copied first to one that
holds nothing. What is in use thereby stays below a *ceiling*, and above it lies one large allocatable run.

The ceiling leaves `slack`: of A allocatable blocks it keeps the highest (1 - slack) * A clear. Below it a block that
holds nothing is taken without a copy, and prefixes there grow old and are evicted in place; so a larger slack costs
fewer copies and more fragmentation. Each block in use below the ceiling ends as a prefix that is either evicted in
place, of which there is room for about F * A, or copied away: about 1 - F copies an allocated block are the least
for any policy of this kind, and two more for each block of a hit that is pulled down.

Several blocks at once (a prompt) are taken from runs of `RUN_BLOCKS` or more, or of as many as are wanted; one block
(decoding) fills the lowest hole. So the single holes that decoding leaves behind are not what prompts are made of.
Where hundreds of sequences decode there may be nothing else below the ceiling: a prompt then takes the bottom of the
large run, up to `STRETCH` of the allocatable blocks above the ceiling, before it is made of single holes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_shim.layout import BlockState
from engine_shim.pool.address_map import AddressMap
from engine_shim.pool.allocation_policy import UNLIMITED, AllocationPolicy, Taken

SLACK = 0.1
STRETCH = 0.1
RUN_BLOCKS = 8


class RelocatingPolicy(AllocationPolicy):
    """Stock's evictions, hits and order of eviction, by contents; low addresses for what is in use.

    Each cached prefix has a ticket, and tickets are in the order of eviction: a prefix that is copied elsewhere keeps
    its ticket. Tickets are never given twice.
    """

    name = "relocating"

    def __init__(self, blocks: Sequence[int], *, size: int | None = None, slack: float = SLACK) -> None:
        """`blocks` are free, in any order; ids stay below `size`, which is one more than the highest by default."""
        self._size = max(blocks, default=-1) + 1 if size is None else size
        self._end = self._size  # of what is in service
        self._clear_share = 1.0 - slack
        self._free = AddressMap(blocks, size=self._size)
        self._cached = AddressMap((), size=self._size)
        self._order: OrderedDict[int, int] = OrderedDict()  # ticket to block
        self._tickets = [0] * self._size  # by block; 0 where it holds no prefix
        self._next_ticket = 1
        self.copies_left = UNLIMITED

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_cached(self) -> int:
        return self._cached.count

    def take(self, count: int) -> Taken:
        free, cached = self._free, self._cached
        ceiling = self._ceiling(count)
        evicted = self._evict(count - free.count) if count > free.count else []
        sources: list[int] = []
        if count == 1:
            blocks = free.take_lowest(count, ceiling)
        else:
            blocks, sources = self._take_runs(count, ceiling)
            blocks += free.take_lowest(count - len(blocks) - len(sources), ceiling)
        missing = count - len(blocks)
        if not missing:
            return Taken(sorted(blocks), evicted, [])
        sources += cached.take_lowest(min(missing, self.copies_left) - len(sources), ceiling)
        homes = free.take_lowest(missing)  # at least as many as there are evicted or were free
        copies = list(zip(sources, homes, strict=False))
        for source, home in copies:
            self._rename(source, home)
        cached.add(homes[: len(copies)])
        self.copies_left -= len(copies)
        return Taken(sorted(blocks + sources + homes[len(copies) :]), evicted, copies)

    def pull(self, hits: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        tickets, free, cached = self._tickets, self._free, self._cached
        idle = [block for block in dict.fromkeys(hits) if tickets[block]]
        ceiling = self._ceiling(len(idle))
        high = [block for block in idle if block >= ceiling]
        if not high or self.copies_left < 1:
            return list(hits), []
        places = free.take_lowest(min(len(high), self.copies_left), ceiling)
        plain = len(places)  # these hold nothing; any other changes places with a hit, which takes two copies
        low = [block for block in idle if block < ceiling]
        places += self._lowest_beside(low, min(len(high) - plain, (self.copies_left - plain) // 2), ceiling)
        del high[len(places) :]
        copies = list(zip(high, places, strict=True))
        for hit, place in copies[:plain]:
            self._rename(hit, place)
        for hit, place in copies[plain:]:
            self._exchange(hit, place)
        copies += [(place, hit) for hit, place in copies[plain:]]
        cached.remove(high[:plain])
        cached.add(places)
        free.add(high[:plain])
        self.copies_left -= len(copies)
        moved = dict(zip(high, places, strict=True))
        return [moved.get(block, block) for block in hits], copies

    def give_free(self, blocks: Sequence[int]) -> None:
        self._free.add(blocks)

    def give_cached(self, blocks: Sequence[int]) -> None:
        tickets, first = self._tickets, self._next_ticket
        self._order.update(enumerate(blocks, first))
        for ticket, block in enumerate(blocks, first):
            tickets[block] = ticket
        self._next_ticket = first + len(blocks)
        self._cached.add(blocks)

    def remove_cached(self, blocks: Sequence[int]) -> None:
        order, tickets = self._order, self._tickets
        for block in blocks:
            del order[tickets[block]]
            tickets[block] = 0
        self._cached.remove(blocks)

    def remove_free(self, blocks: Sequence[int]) -> None:
        self._free.remove(blocks)

    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        for block, other in moves:
            self._rename(block, other)
        self._cached.remove([block for block, _ in moves])
        self._cached.add([other for _, other in moves])

    def forget_cached(self) -> list[int]:
        forgotten = list(self._order.values())
        self.remove_cached(forgotten)
        self._free.add(forgotten)
        return forgotten

    def is_cached(self, block: int) -> bool:
        return 0 <= block < self._size and self._tickets[block] != 0

    def cached_blocks(self) -> Collection[int]:
        return self._order.values()

    def mark(self, column: NDArray[np.uint8]) -> bool:
        column[: self._size][self._free.mask()] = BlockState.FREE
        column[: self._size][self._cached.mask()] = BlockState.CACHED
        return True

    def free_blocks(self) -> list[int]:
        return self._free.members()

    def set_end(self, end: int) -> None:
        self._end = end

    def _lowest_beside(self, hits: Sequence[int], count: int, ceiling: int) -> list[int]:
        """The lowest cached blocks but for `hits`: one hit of a request must not give way to another."""
        self._cached.remove(hits)
        places = self._cached.take_lowest(count, ceiling)
        self._cached.add(hits)
        return places

    def _ceiling(self, count: int) -> int:
        """What is in use lies below it once `count` more are; `count` allocatable ones lie there in any case, for of
        the A that there are at most A - count are kept clear above it."""
        left = self._free.count + self._cached.count - count
        return self._end - int(self._clear_share * left)

    def _take_runs(self, count: int, ceiling: int) -> tuple[list[int], list[int]]:
        """Up to `count` blocks in runs, below the ceiling where there are such: those that hold nothing, and those that
        hold a prefix, of which there are no more than may be copied away."""
        blocks: list[int] = []
        sources: list[int] = []
        stretch = int(STRETCH * (self._free.count + self._cached.count - count))
        for end in (ceiling, ceiling + stretch):
            blocks += self._free.take_runs(count - len(blocks) - len(sources), RUN_BLOCKS, end)
            missing = count - len(blocks) - len(sources)
            sources += self._cached.take_runs(min(missing, self.copies_left - len(sources)), RUN_BLOCKS, end)
            if len(blocks) + len(sources) == count:
                break
        return blocks, sources

    def _evict(self, count: int) -> list[int]:
        pop, tickets = self._order.popitem, self._tickets
        evicted = [pop(last=False)[1] for _ in range(count)]
        for block in evicted:
            tickets[block] = 0
        self._cached.remove(evicted)
        self._free.add(evicted)
        return evicted

    def _rename(self, source: int, home: int) -> None:
        tickets = self._tickets
        ticket = tickets[home] = tickets[source]
        tickets[source] = 0
        self._order[ticket] = home

    def _exchange(self, one: int, other: int) -> None:
        tickets = self._tickets
        first, second = tickets[one], tickets[other]
        tickets[one], tickets[other] = second, first
        self._order[first], self._order[second] = other, one
