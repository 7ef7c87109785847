"""The engine's own figures of its pool, once a second of trace time: they need neither map nor agent."""

from __future__ import annotations

import math
from statistics import median

import numpy as np

from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import BlockPool
from engine_shim.runs import find_runs

SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 100_000  # more than a day at one a second


class PoolMonitor:
    """Samples of fragmentation and of the live share (used and pinned blocks over usable ones)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._due = -math.inf
        self._fragmentation: list[float] = []
        self._live: list[float] = []
        self._seen: set[BlockState] = set()

    def sample(self, trace_seconds: float) -> None:
        """Take a sample where one is due."""
        pool = self._pool
        if pool.num_pinned:
            self._seen.add(BlockState.PINNED)
        if trace_seconds < self._due or len(self._live) >= MAX_SAMPLES:
            return
        self._due = trace_seconds + SAMPLE_SECONDS
        states = pool.states()
        self._seen.update(BlockState(int(state)) for state in np.unique(states))
        if pool.usable_blocks:
            self._live.append((pool.num_used + pool.num_pinned) / pool.usable_blocks)
        _, lengths = find_runs((states == BlockState.FREE) | (states == BlockState.CACHED))
        if lengths.size:
            self._fragmentation.append(1.0 - int(lengths.max()) / int(lengths.sum()))

    @property
    def fragmentation_p50(self) -> float | None:
        """Median of 1 - largest allocatable run / allocatable blocks; None where no sample had a free block."""
        return median(self._fragmentation) if self._fragmentation else None

    @property
    def live_share_p50(self) -> float | None:
        return median(self._live) if self._live else None

    @property
    def live_share_max(self) -> float | None:
        return max(self._live, default=None)

    @property
    def states_seen(self) -> tuple[str, ...]:
        """Names of the block states that occurred, in the order of their numbers."""
        return tuple(state.name.lower() for state in sorted(self._seen))

    def cached_blocks(self) -> list[int]:
        """Blocks that hold an evictable prefix now."""
        cached: list[int] = np.flatnonzero(self._pool.states() == BlockState.CACHED).tolist()
        return cached

    def cached_window(self, turn: int, count: int) -> list[int]:
        """`count` of the cached blocks, others each turn, until all had theirs."""
        cached = self.cached_blocks()
        if not cached:
            return []
        start = turn * count % len(cached)
        return cached[start : start + count]
