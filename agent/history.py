"""The recent past of every pool, bucketed for charts, behind an interface that a lasting store can fill as well."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

METRICS = (
    "fragmentation",
    "strict_fragmentation",
    "free",
    "cached",
    "used",
    "pinned",
    "largest_allocatable_run",
    "tail_waste_bytes",
    "tokens_per_second",
    "waiting_requests",
)
MAX_POINTS = 3600
_MAX_INDEX = 2**52  # buckets are counted from the epoch; beyond this a float cannot count them


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples with start <= time < start + step; the three values are None where no sample had one."""

    start_unix: float
    minimum: float | None
    mean: float | None
    maximum: float | None


class History(Protocol):
    """Remembers samples. Implementations may be used from several threads."""

    def append(self, pool: str, time_unix: float, values: Mapping[str, float | None]) -> None:
        """Add one sample; times go back only where the clock was set. None: undefined at that time."""
        ...

    def query(self, pool: str, metric: str, start_unix: float, end_unix: float, step_seconds: float) -> list[Bucket]:
        """Buckets that cover start to end, oldest first, aligned to whole steps.

        Raises KeyError for a pool that is not known, ValueError for a metric or range that cannot be answered.
        """
        ...

    def recent(self, pool: str, metric: str, seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and defined values of the last so many seconds of a pool; empty where nothing is known.

        Where the clock was set back, only what came after: the times rise.
        """
        ...

    def drop(self, pool: str) -> None:
        """Forget a pool."""
        ...


class MemoryHistory:
    """A ring a pool, allocated when the pool first has a sample: 48 bytes a sample, 173 kB for an hour at 1 Hz."""

    def __init__(self, *, seconds: float = 3600.0, interval_seconds: float = 1.0, max_pools: int = 256) -> None:
        self._capacity = max(2, math.ceil(seconds / interval_seconds))
        self._max_pools = max_pools
        self._rings: dict[str, _Ring] = {}
        self._lock = threading.Lock()

    def append(self, pool: str, time_unix: float, values: Mapping[str, float | None]) -> None:
        with self._lock:
            ring = self._rings.get(pool)
            if ring is None:
                if len(self._rings) >= self._max_pools:
                    oldest = min(self._rings, key=lambda name: self._rings[name].latest_unix)
                    del self._rings[oldest]
                ring = self._rings[pool] = _Ring(self._capacity)
            ring.append(time_unix, values)

    def query(self, pool: str, metric: str, start_unix: float, end_unix: float, step_seconds: float) -> list[Bucket]:
        if metric not in METRICS:
            raise ValueError(f"no metric {metric!r}")
        if not (math.isfinite(start_unix) and math.isfinite(end_unix) and start_unix < end_unix):
            raise ValueError(f"the range must end after it starts, not run from {start_unix} to {end_unix}")
        if not (math.isfinite(step_seconds) and step_seconds > 0):
            raise ValueError(f"the step must be above 0 seconds, not {step_seconds}")
        if (end_unix - start_unix) / step_seconds > MAX_POINTS:
            raise ValueError(f"more than {MAX_POINTS} points asked for; raise the step or shorten the range")
        if max(abs(start_unix), abs(end_unix)) / step_seconds > _MAX_INDEX:
            raise ValueError(f"a step of {step_seconds} s is too fine for times such as {end_unix}; raise the step")
        first = math.floor(start_unix / step_seconds)
        count = math.ceil(end_unix / step_seconds) - first
        with self._lock:
            times, values = self._rings[pool].column(metric)
        near = (times >= start_unix - step_seconds) & (times <= end_unix + step_seconds)
        times, values = times[near], values[near]
        return _bucket(times, values, first, count, step_seconds)

    def recent(self, pool: str, metric: str, seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        with self._lock:
            ring = self._rings.get(pool)
            if ring is None:
                return np.empty(0), np.empty(0)
            times, values = ring.column(metric)
        steps_back = np.flatnonzero(np.diff(times) < 0)
        if steps_back.size:
            times, values = times[steps_back[-1] + 1 :], values[steps_back[-1] + 1 :]
        keep = (times >= ring.latest_unix - seconds) & ~np.isnan(values)
        return times[keep], values[keep].astype(np.float64)

    def drop(self, pool: str) -> None:
        with self._lock:
            self._rings.pop(pool, None)


class _Ring:
    """The newest `capacity` samples. Undefined values, and times of free slots, are NaN in here and nowhere else."""

    def __init__(self, capacity: int) -> None:
        self._times = np.full(capacity, np.nan)
        self._values = np.zeros((len(METRICS), capacity), np.float32)
        self._written = 0
        self.latest_unix = -math.inf

    def append(self, time_unix: float, values: Mapping[str, float | None]) -> None:
        slot = self._written % self._times.size
        self._times[slot] = time_unix
        for row, metric in enumerate(METRICS):
            value = values.get(metric)
            self._values[row, slot] = math.nan if value is None else value
        self._written += 1
        self.latest_unix = time_unix

    def column(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Copies of the whole ring, oldest first, free slots among them.

        Arrays that are one longer at each sample would each leave something of their own size behind in NumPy's cache
        of small arrays: some 2 MB in the first quarter of an hour.
        """
        cut = self._written % self._times.size
        return np.roll(self._times, -cut), np.roll(self._values[METRICS.index(metric)], -cut)


def _bucket(
    times: NDArray[np.float64], values: NDArray[np.float32], first: int, count: int, step: float
) -> list[Bucket]:
    indices = np.floor(times / step).astype(np.int64) - first
    keep = (indices >= 0) & (indices < count) & ~np.isnan(values)
    indices, kept = indices[keep], values[keep].astype(np.float64)
    numbers = np.bincount(indices, minlength=count)
    sums = np.bincount(indices, weights=kept, minlength=count)
    lows, highs = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lows, indices, kept)
    np.maximum.at(highs, indices, kept)
    return [
        Bucket((first + i) * step, float(lows[i]), float(sums[i] / numbers[i]), float(highs[i]))
        if numbers[i]
        else Bucket((first + i) * step, None, None, None)
        for i in range(count)
    ]
