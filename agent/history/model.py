"""What a history of pools is asked, and how its answers are cut into buckets."""

from __future__ import annotations

import math
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
        """Add one sample, without waiting for a disk; times go back only where the clock was set. None: undefined at
        that time."""
        ...

    def query(self, pool: str, metric: str, start_unix: float, end_unix: float, step_seconds: float) -> list[Bucket]:
        """Buckets that cover start to end, oldest first, aligned to whole steps. May wait for a disk.

        Raises KeyError for a pool that is not known, ValueError for a metric or range that cannot be answered.
        """
        ...

    def recent(self, pool: str, metric: str, seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and defined values of the last so many seconds of a pool; empty where nothing is known.

        Where the clock was set back, only what came after: the times rise.
        """
        ...

    def drop(self, pool: str) -> None:
        """A pool has left for good: keep nothing of it in memory."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """The buckets of one question: `count` of them, each `step` seconds, from bucket `first` counted from the epoch."""

    first: int
    count: int
    step: float

    @classmethod
    def covering(cls, metric: str, start_unix: float, end_unix: float, step_seconds: float) -> Grid:
        """Raises ValueError for a metric or range that cannot be answered."""
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
        return cls(first, math.ceil(end_unix / step_seconds) - first, step_seconds)

    def bucket(
        self,
        times: NDArray[np.float64],
        numbers: NDArray[np.float64],
        lows: NDArray[np.float64],
        means: NDArray[np.float64],
        highs: NDArray[np.float64],
    ) -> list[Bucket]:
        """Buckets of what is known at `times`, all (n,): how many samples each stands for, and their extremes and mean.

        What stands for no sample is left out, whatever its values.
        """
        indices = np.floor(times / self.step).astype(np.int64) - self.first
        keep = (indices >= 0) & (indices < self.count) & (numbers > 0)
        indices, weights = indices[keep], numbers[keep]
        totals = np.bincount(indices, weights=weights, minlength=self.count)
        sums = np.bincount(indices, weights=weights * means[keep], minlength=self.count)
        smallest, largest = np.full(self.count, np.inf), np.full(self.count, -np.inf)
        np.minimum.at(smallest, indices, lows[keep])
        np.maximum.at(largest, indices, highs[keep])
        return [
            Bucket((self.first + i) * self.step, float(smallest[i]), float(sums[i] / totals[i]), float(largest[i]))
            if totals[i]
            else Bucket((self.first + i) * self.step, None, None, None)
            for i in range(self.count)
        ]
