"""When a pool runs out of blocks at its present trend, or why that cannot be said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MIN_SAMPLES = 10
MIN_SPAN_SECONDS = 10.0
MAX_SAMPLES = 60
# A steady pool goes up and down; a trend is a fall that most pairs of samples agree on.
MIN_FALLING_SHARE = 0.7
HORIZON_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class ExhaustionForecast:
    """Seconds until no block is allocatable, None where none is in sight; `reason` says how it came about."""

    seconds: float | None
    reason: str


def forecast_exhaustion(times_seconds: ArrayLike, allocatable_blocks: ArrayLike) -> ExhaustionForecast:
    """Extend the trend of recent samples to zero allocatable blocks.

    Both arrays have one entry a sample, oldest first; at most MAX_SAMPLES of them, evenly spread, are used. The trend
    is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968), which one burst does not tilt.
    """
    times = np.asarray(times_seconds, np.float64)
    blocks = np.asarray(allocatable_blocks, np.float64)
    if times.shape != blocks.shape or times.ndim != 1:
        raise ValueError(f"times {times.shape} and blocks {blocks.shape} must be two equal columns")
    if times.size and blocks[-1] <= 0:
        return ExhaustionForecast(0.0, "no block is allocatable now")
    if times.size < MIN_SAMPLES or times[-1] - times[0] < MIN_SPAN_SECONDS:
        return ExhaustionForecast(None, f"needs {MIN_SAMPLES} samples over {MIN_SPAN_SECONDS:.0f} s")
    if times.size > MAX_SAMPLES:
        chosen = np.linspace(0, times.size - 1, MAX_SAMPLES).astype(np.int64)
        times, blocks = times[chosen], blocks[chosen]
    earlier, later = np.triu_indices(times.size, k=1)
    spans = times[later] - times[earlier]
    slopes = (blocks[later] - blocks[earlier])[spans > 0] / spans[spans > 0]
    slope = float(np.median(slopes)) if slopes.size else 0.0
    span = times[-1] - times[0]
    if slope >= 0 or float(np.mean(slopes < 0)) < MIN_FALLING_SHARE:
        return ExhaustionForecast(None, f"allocatable blocks do not fall over the last {span:.0f} s")
    seconds = float(blocks[-1]) / -slope
    if seconds > HORIZON_SECONDS:
        return ExhaustionForecast(None, f"falls by {-slope:.3g} blocks/s: more than a day away")
    return ExhaustionForecast(seconds, f"falls by {-slope:.3g} blocks/s over the last {span:.0f} s")
