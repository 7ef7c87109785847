"""How fragmented a pool is: counts, free runs and fragmentation rates of one column of block states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine_shim.layout import BlockState
from engine_shim.runs import find_runs

# Below one state change in so many blocks it pays to look at runs instead of blocks (measured: the two ways cross
# between 8 and 32).
BLOCKS_PER_RUN_TO_COUNT_RUNS = 16
# Run lengths up to here are tallied in one table; the few longer ones are classed one by one.
TABLED_RUN_LENGTH = 4096
_KNOWN_STATES = len(BlockState)
_UNKNOWN = 255


@dataclass(frozen=True, slots=True)
class FragmentationReport:
    """One pool at one instant. Counts are blocks; free + cached + used + pinned + reserved + unknown == total.

    *Free* blocks hold nothing; *allocatable* ones are free or cached. A run is a stretch of consecutive block ids.
    Each rate is 1 - largest run / total of its set, from 0.0 to below 1.0, and None where the set is empty.
    Class i of the two histograms takes runs with 2**i <= length < 2**(i + 1).
    """

    total_blocks: int
    usable_blocks: int  # total less reserved
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    unknown_blocks: int  # states that this version does not know: neither free nor movable
    allocatable_blocks: int
    largest_allocatable_run: int
    allocatable_runs: int
    largest_free_run: int
    free_runs: int
    fragmentation_rate: float | None  # over the allocatable set
    strict_fragmentation_rate: float | None  # over the free set
    run_length_histogram: tuple[int, ...]  # allocatable runs by class
    run_length_blocks: tuple[int, ...]  # blocks in those runs, by class

    def unusable_ratio(self, order: int) -> float | None:
        """Share of allocatable blocks in runs shorter than 2**order: of no use to who needs that many in a row.

        None where nothing is allocatable. (The unusable free space index of Gorman and Whitcroft, 2005.)
        """
        if self.allocatable_blocks == 0:
            return None
        return sum(self.run_length_blocks[:order]) / self.allocatable_blocks


def analyze(states: ArrayLike) -> FragmentationReport:
    """Analyse a column of BlockState values, one entry a block, in order of block id.

    Takes any one-dimensional integers; an empty column is a pool without blocks. Raises ValueError for anything else.
    """
    column = _as_column(states)
    changes = column[1:] != column[:-1]
    if np.count_nonzero(changes) * BLOCKS_PER_RUN_TO_COUNT_RUNS <= column.size:
        counts, allocatable, free = _by_runs(column, changes)
    else:
        counts, allocatable, free = _by_blocks(column)
    return _report(column.size, counts, allocatable, free)


def _as_column(states: ArrayLike) -> NDArray[np.uint8]:
    values = np.asarray(states)
    if values.size == 0 and values.ndim == 1:
        return np.empty(0, np.uint8)
    if values.ndim != 1 or not (np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_):
        raise ValueError(f"block states are a one-dimensional column of integers, not {values.dtype} {values.shape}")
    if values.dtype == np.uint8:
        return values
    # A wider number must not wrap round to a state that means something.
    known = (values >= 0) & (values < _KNOWN_STATES)
    return np.where(known, values, _UNKNOWN).astype(np.uint8)


def _by_runs(
    column: NDArray[np.uint8], changes: NDArray[np.bool_]
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Blocks by state, and the lengths of allocatable and of free runs, from the few runs of equal state."""
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1)) if column.size else np.empty(0, np.int64)
    lengths = np.diff(starts, append=column.size)
    run_states = column[starts]
    counts = [int(lengths[run_states == state].sum()) for state in range(_KNOWN_STATES)]
    free = lengths[run_states == BlockState.FREE]
    is_allocatable = run_states <= BlockState.CACHED
    # A free run beside a cached one is a single allocatable run.
    opens = is_allocatable.copy()
    opens[1:] &= ~is_allocatable[:-1]
    closes = is_allocatable.copy()
    closes[:-1] &= ~is_allocatable[1:]
    ends = starts + lengths
    return counts, ends[closes] - starts[opens], free


def _by_blocks(column: NDArray[np.uint8]) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """The same from whole masks, which is quicker where almost every block is a run of its own."""
    counts = [int(np.count_nonzero(column == state)) for state in range(_KNOWN_STATES)]
    _, allocatable = find_runs(column <= BlockState.CACHED)
    _, free = find_runs(column == BlockState.FREE)
    return counts, allocatable, free


def _report(
    total: int, counts: list[int], allocatable: NDArray[np.int64], free: NDArray[np.int64]
) -> FragmentationReport:
    free_blocks, cached_blocks, used_blocks, pinned_blocks, reserved_blocks = counts
    allocatable_blocks = free_blocks + cached_blocks
    largest_allocatable = int(allocatable.max(initial=0))
    largest_free = int(free.max(initial=0))
    histogram, histogram_blocks = _classes(allocatable, largest_allocatable)
    return FragmentationReport(
        total_blocks=total,
        usable_blocks=total - reserved_blocks,
        free_blocks=free_blocks,
        cached_blocks=cached_blocks,
        used_blocks=used_blocks,
        pinned_blocks=pinned_blocks,
        reserved_blocks=reserved_blocks,
        unknown_blocks=total - sum(counts),
        allocatable_blocks=allocatable_blocks,
        largest_allocatable_run=largest_allocatable,
        allocatable_runs=int(allocatable.size),
        largest_free_run=largest_free,
        free_runs=int(free.size),
        fragmentation_rate=_rate(largest_allocatable, allocatable_blocks),
        strict_fragmentation_rate=_rate(largest_free, free_blocks),
        run_length_histogram=histogram,
        run_length_blocks=histogram_blocks,
    )


def _rate(largest: int, total: int) -> float | None:
    return None if total == 0 else 1.0 - largest / total


def _classes(lengths: NDArray[np.int64], largest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Runs, and blocks in them, by power-of-two class of length; as many classes as the largest run needs."""
    classes = largest.bit_length()
    runs, blocks = [0] * classes, [0] * classes
    if largest > TABLED_RUN_LENGTH:
        long_lengths = lengths[lengths > TABLED_RUN_LENGTH]
        lengths = lengths[lengths <= TABLED_RUN_LENGTH]
        for length in long_lengths.tolist():
            runs[length.bit_length() - 1] += 1
            blocks[length.bit_length() - 1] += length
    table = np.bincount(lengths)
    weighted = table * np.arange(table.size)
    for index in range(min(classes, table.size.bit_length())):
        runs[index] += int(table[1 << index : 2 << index].sum())
        blocks[index] += int(weighted[1 << index : 2 << index].sum())
    return tuple(runs), tuple(blocks)
