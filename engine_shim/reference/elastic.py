"""The consumer *elastic*: whole pages of the KV memory that hold only free blocks go back to the host.

On the CPU the tensors lie in one private anonymous mapping. The kernel drops the pages that `madvise`
names at once, and gives zeroed ones where they are written again; a block is taken again before it is written, so that
the books say what the host really holds.
"""

from __future__ import annotations

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

_SLAB_BYTES = 4 << 20  # looked at and returned between two looks at the clock, over all tensors
_SMAPS = Path("/proc/self/smaps")


class ElasticPages:
    """Which pages of a cache the host holds. The same pages of every tensor go and come together.

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
        self._page_set_bytes = mmap.PAGESIZE * len(cache.tensors)  # one page of every tensor
        self._row_bytes = cache.block_bytes // len(cache.tensors)
        self._tensor_bytes = self._row_bytes * cache.num_blocks
        count = -(-self._tensor_bytes // mmap.PAGESIZE)
        starts = np.arange(count) * mmap.PAGESIZE
        ends = np.minimum(starts + mmap.PAGESIZE, self._tensor_bytes)
        self._first_block = starts // self._row_bytes
        self._past_block = -(-ends // self._row_bytes)
        self._away = np.zeros(count, np.bool_)
        self.given_back_bytes = 0  # in all
        self.taken_again_bytes = 0

    @property
    def away_bytes(self) -> int:
        """What the host does not hold now."""
        return int(np.count_nonzero(self._away)) * self._page_set_bytes

    @property
    def slab_blocks(self) -> int:
        """Blocks that make about one slab."""
        return max(1, _SLAB_BYTES // self._cache.block_bytes)

    @property
    def straddle_blocks(self) -> int:
        """Blocks behind a place that may share a page with those before it."""
        return -(-mmap.PAGESIZE // self._row_bytes)

    def predict(self, start: int, free: NDArray[np.bool_]) -> int:
        """Bytes that giving back the free ones of the blocks from `start` on (a mask) would return."""
        return int(np.count_nonzero(self._pages_within(start, free)[1])) * self._page_set_bytes

    def give_back(self, start: int, free: NDArray[np.bool_]) -> int:
        """Return every page that holds only blocks of the mask, and none that was away; the bytes."""
        first, pages = self._pages_within(start, free)
        starts, lengths = find_runs(pages)
        for tensor in range(len(self._cache.tensors)):
            offset = tensor * self._cache.tensor_stride + first * mmap.PAGESIZE
            for page, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._memory.madvise(mmap.MADV_DONTNEED, offset + page * mmap.PAGESIZE, length * mmap.PAGESIZE)
        self._away[first : first + pages.size] |= pages
        returned = int(lengths.sum()) * self._page_set_bytes
        self.given_back_bytes += returned
        return returned

    def take(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be written: their pages are the host's from now on."""
        if not self._away.any():
            return
        written = np.zeros(self._cache.num_blocks + 1, np.bool_)
        written[np.fromiter(blocks, np.int64)] = True
        before = np.concatenate(([0], np.cumsum(written)))
        back = self._away & (before[self._past_block] != before[self._first_block])
        self._away &= ~back
        self.taken_again_bytes += int(np.count_nonzero(back)) * self._page_set_bytes

    def resident_bytes(self) -> int:
        """What the kernel says of the mapping in smaps (Rss)."""
        start = int(self._cache.tensors[0].data_ptr())
        return resident_bytes(start, start + len(self._memory))

    def _pages_within(self, start: int, free: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """The first page that lies within the blocks from `start` on, and a mask: which are all free, and here."""
        stop = start + free.size
        first = -(-start * self._row_bytes // mmap.PAGESIZE)
        past = self._away.size if stop == self._cache.num_blocks else stop * self._row_bytes // mmap.PAGESIZE
        taken_before = np.concatenate(([0], np.cumsum(~free)))
        pages = slice(first, max(first, past))
        taken = taken_before[self._past_block[pages] - start] - taken_before[self._first_block[pages] - start]
        within: NDArray[np.bool_] = (taken == 0) & ~self._away[pages]
        return first, within


class ElasticConsumer:
    """Gives back what a run has emptied, in slices at step boundaries.

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
        self._predicted = self._returned = 0

    def begin(self, plan: MovePlan | None) -> None:
        self._window = plan.window if plan is not None else Window(0, 0)
        start, length = self._window
        states = self._pool.states()[start : start + length]
        free = states <= BlockState.CACHED if self._evict else states == BlockState.FREE
        self._predicted = self.pages.predict(start, free)
        self._returned = 0
        self._next = start

    def step(self, deadline: float) -> bool:
        start, length = self._window
        end = start + length
        while self._next < end:
            stop = min(end, self._next + self.pages.slab_blocks)
            # A page may lie across two slabs; what the one before has returned is away already.
            first = max(start, self._next - self.pages.straddle_blocks)
            states = np.fromiter(map(self._pool.state, range(first, stop)), np.uint8, stop - first)
            if self._evict:
                self._moves.evict((np.flatnonzero(states == BlockState.CACHED) + first).tolist())
                states[states == BlockState.CACHED] = BlockState.FREE
            self._returned += self.pages.give_back(first, states == BlockState.FREE)
            self._next = stop
            if self._clock() >= deadline:
                break
        return self._next < end

    def complete(self, report: CompactionReport) -> CompactionReport:
        return replace(report, given_back_bytes_predicted=self._predicted, given_back_bytes=self._returned)


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
