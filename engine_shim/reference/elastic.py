"""The consumer *elastic*: whole pages of the KV memory that hold only free blocks go back to the host.

On the CPU the cache lies in one private anonymous mapping, block after block. The kernel drops the pages that `madvise`
names at once, and gives zeroed ones where they are written again; a block is taken again before it is written, so that
the books say what the host really holds.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_shim.compaction.planning import MovePlan, Window
from engine_shim.compaction.report import CompactionReport
from engine_shim.errors import SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.pool_moves import PoolMoves
from engine_shim.reference.kv_cache import KVCache
from engine_shim.runs import find_runs

_SLAB_BYTES, _SLAB_BLOCKS = 4 << 20, 512  # looked at and returned, at most, between two looks at the clock
_SMAPS = Path("/proc/self/smaps")


class ElasticPages:
    """Which pages of a cache the host holds.

    SettingsError where the memory is not the host's.
    """

    def __init__(self, cache: KVCache) -> None:
        if cache.memory is None:
            raise SettingsError(
                f"giving memory back is not supported here: the KV cache lies on {cache.device.type}, "
                "and only memory of the host (device cpu) can be returned page by page"
            )
        with suppress(OSError):  # else a page that is written again could bring its neighbours along
            cache.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._cache, self._memory = cache, cache.memory
        self._block_bytes = cache.block_bytes
        self._away = np.zeros(-(-cache.nbytes // mmap.PAGESIZE), np.bool_)
        self._pages_away = 0
        self.given_back_bytes = 0  # in all
        self.taken_again_bytes = 0

    @property
    def away_bytes(self) -> int:
        """What the host does not hold now."""
        return self._pages_away * mmap.PAGESIZE

    @property
    def slab_blocks(self) -> int:
        """Blocks to look at in one go: some MiB, or as few as begin and end with a page."""
        whole = mmap.PAGESIZE // math.gcd(self._block_bytes, mmap.PAGESIZE)
        return whole * max(1, min(_SLAB_BYTES // self._block_bytes, _SLAB_BLOCKS) // whole)

    def predict(self, start: int, free: NDArray[np.bool_]) -> int:
        """Bytes that giving back the free ones of the blocks from `start` on (a mask) would return."""
        here = (
            last - first - int(np.count_nonzero(self._away[first:last])) for first, last in self._within(start, free)
        )
        return sum(here) * mmap.PAGESIZE

    def give_back(self, start: int, free: NDArray[np.bool_]) -> int:
        """Return every page that holds only blocks of the mask; the bytes, without those that were away."""
        returned = 0
        for first, last in self._within(start, free):
            here = last - first - int(np.count_nonzero(self._away[first:last]))
            if here:
                self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
                self._away[first:last] = True
                self._pages_away += here
                returned += here * mmap.PAGESIZE
        self.given_back_bytes += returned
        return returned

    def take(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be written: their pages are the host's from now on."""
        if not self._pages_away:
            return
        written = np.fromiter(blocks, np.int64)
        firsts = written * self._block_bytes // mmap.PAGESIZE
        counts = -(-(written + 1) * self._block_bytes // mmap.PAGESIZE) - firsts
        ends = np.cumsum(counts)
        pages = np.arange(counts.sum()) + np.repeat(firsts - (ends - counts), counts)
        back = np.sort(pages[self._away[pages]])
        self._away[back] = False
        count = int(np.count_nonzero(np.diff(back, prepend=-1)))  # neighbours share pages
        self._pages_away -= count
        self.taken_again_bytes += count * mmap.PAGESIZE

    def resident_bytes(self) -> int:
        """What the kernel says of the mapping in smaps (Rss)."""
        start = self._cache.blocks.data_ptr()
        return resident_bytes(start, start + len(self._memory))

    def _within(self, start: int, free: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
        """First and one past the last page of each piece of memory that is whole pages of free blocks alone."""
        starts, lengths = find_runs(free)
        ends = (starts + lengths + start) * self._block_bytes
        firsts = -(-(starts + start) * self._block_bytes // mmap.PAGESIZE)
        # What is left of the last page belongs to nobody.
        lasts = np.where(ends == self._cache.nbytes, self._away.size, ends // mmap.PAGESIZE)
        whole = firsts < lasts
        return zip(firsts[whole].tolist(), lasts[whole].tolist(), strict=True)


class ElasticConsumer:
    """Gives back what a run has emptied, in slices at step boundaries: first it is counted, then it is returned.

    Prefixes in the way are kept, unless `evict` is set. What allocation takes meanwhile is left alone.
    """

    def __init__(
        self,
        pages: ElasticPages,
        pool: BlockPool,
        moves: PoolMoves,
        *,
        evict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages, self._pool, self._moves, self._evict, self._clock = pages, pool, moves, evict, clock
        self._window = Window(0, 0)
        self._next = 0
        self._counting = False
        self._predicted = self._returned = 0

    def begin(self, plan: MovePlan | None) -> None:
        self._window = plan.window if plan is not None else Window(0, 0)
        self._predicted = self._returned = 0
        self._next, self._counting = self._window.start, True

    def step(self, deadline: float) -> bool:
        start, length = self._window
        end, slab = start + length, self.pages.slab_blocks
        while self._next < end:
            first, stop = self._next, min(end, (self._next // slab + 1) * slab)
            states = np.fromiter(map(self._pool.state, range(first, stop)), np.uint8, stop - first)
            if self._counting:
                free = states <= BlockState.CACHED if self._evict else states == BlockState.FREE
                self._predicted += self.pages.predict(first, free)
            else:
                self._give_back(first, states)
            self._next = stop
            if self._counting and stop == end:
                self._next, self._counting = start, False
            if self._clock() >= deadline:
                break
        return self._next < end

    def complete(self, report: CompactionReport) -> CompactionReport:
        return replace(report, given_back_bytes_predicted=self._predicted, given_back_bytes=self._returned)

    def _give_back(self, first: int, states: NDArray[np.uint8]) -> None:
        if self._evict:
            self._moves.evict((np.flatnonzero(states == BlockState.CACHED) + first).tolist())
            states[states == BlockState.CACHED] = BlockState.FREE
        self._returned += self.pages.give_back(first, states == BlockState.FREE)


def resident_bytes(start: int, stop: int, smaps: Path = _SMAPS) -> int:
    """Rss in bytes of the mappings between two addresses. One that reaches beyond them counts in whole: the kernel
    merges neighbours of one kind."""
    total, inside = 0, False
    for line in smaps.read_text(encoding="ascii", errors="replace").splitlines():
        word = line.split(" ", 1)[0]
        if "-" in word and not word.endswith(":"):
            first, end = (int(part, 16) for part in word.split("-"))
            inside = first < stop and end > start
        elif inside and word == "Rss:":
            total += int(line.split()[1]) * 1024
    return total
