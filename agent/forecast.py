"""When a pool runs out of blocks, or of blocks for new sequences, at its present trend; or why that cannot be said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_SAMPLES = 10
MIN_SPAN_SECONDS = 10.0
MAX_SAMPLES = 60
# A steady pool goes up and down; a trend is a change that most pairs of samples agree on.
MIN_AGREEING_SHARE = 0.7
HORIZON_SECONDS = 86_400.0
# Below this share of the usable blocks beside the headroom, hardly a new sequence fits.
NARROW_SHARE = 0.02
# At most this share is taken as what one more sequence may need: one giant must not explain every wait.
WIDEST_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class ExhaustionForecast:
    """Seconds until no block is allocatable, None where none is in sight; `reason` says how it came about.

    `headroom_seconds`: until only the headroom is left, which new sequences may not take; 0 where that is so now.
    `known`: whether there was anything to judge by; without, None does not mean that none is in sight.
    """

    seconds: float | None
    reason: str
    headroom_seconds: float | None = None
    known: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether sequences wait for blocks; `reason` is "" where none does."""

    blocked: bool
    reason: str


NOT_BLOCKED = Admission(False, "")


def forecast_exhaustion(
    times_seconds: ArrayLike, allocatable_blocks: ArrayLike, headroom_blocks: int = 0
) -> ExhaustionForecast:
    """Extend the trend of recent samples to zero allocatable blocks, and to the headroom.

    Both arrays have one entry a sample, oldest first; at most MAX_SAMPLES of them, evenly spread, are used. The trend
    is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968), which one burst does not tilt.
    """
    times, blocks = _columns(times_seconds, allocatable_blocks)
    if times.size and blocks[-1] <= 0:
        return ExhaustionForecast(0.0, "no block is allocatable now", 0.0)
    spare = float(blocks[-1]) - headroom_blocks if times.size else 0.0
    reached = 0.0 if times.size and headroom_blocks > 0 and spare <= 0 else None
    if _too_few(times):
        return ExhaustionForecast(None, f"needs {MIN_SAMPLES} samples over {MIN_SPAN_SECONDS:.0f} s", reached, False)
    slope, falling, _ = _trend(times, blocks)
    span = times[-1] - times[0]
    if slope >= 0 or falling < MIN_AGREEING_SHARE:
        return ExhaustionForecast(None, f"allocatable blocks do not fall over the last {span:.0f} s", reached)
    seconds = float(blocks[-1]) / -slope
    until = _within_horizon(max(spare, 0.0) / -slope)
    if seconds > HORIZON_SECONDS:
        return ExhaustionForecast(None, f"falls by {_plain(-slope)} blocks/s: more than a day away", until)
    return ExhaustionForecast(seconds, f"falls by {_plain(-slope)} blocks/s over the last {span:.0f} s", until)


def judge_admission(
    *,
    allocatable_blocks: int,
    headroom_blocks: int,
    usable_blocks: int,
    used_blocks: int,
    running: int,
    waiting: int,
    refused: bool = False,
) -> Admission:
    """Whether waiting requests wait for blocks: the engine was just refused some (`refused`, by its own count), or too
    few are left beside the headroom for a sequence of usual size.

    Usual is what a running sequence holds on the average, at least NARROW_SHARE and at most WIDEST_SHARE of the pool.
    Otherwise they wait for something else, such as the engine's limit of sequences, which the map does not tell.
    """
    spare = allocatable_blocks - headroom_blocks
    usual = min(max(NARROW_SHARE * usable_blocks, used_blocks / max(running, 1)), WIDEST_SHARE * usable_blocks)
    if waiting <= 0 or (spare > usual and not refused):
        return NOT_BLOCKED
    left = f"{spare:,} blocks above" if spare >= 0 else f"{-spare:,} blocks short of"
    return Admission(True, f"{waiting:,} wait; {left} the headroom of {headroom_blocks:,}")


def queue_grows(times_seconds: ArrayLike, waiting: ArrayLike) -> bool:
    """Whether ever more requests wait: the trend of recent samples rises, and one waits now. Columns as above."""
    times, numbers = _columns(times_seconds, waiting)
    if _too_few(times) or numbers[-1] <= 0:
        return False
    slope, _, rising = _trend(times, numbers)
    return slope > 0 and rising >= MIN_AGREEING_SHARE


def _plain(rate: float) -> str:
    """A rate without an exponent: whole from 10 on, else two digits after the point."""
    if rate >= 10:
        return f"{rate:,.0f}"
    return f"{rate:.2f}".rstrip("0").rstrip(".") if rate >= 0.01 else "less than 0.01"


def _columns(times: ArrayLike, values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most MAX_SAMPLES of two equal columns, the last one among them."""
    times, values = np.asarray(times, np.float64), np.asarray(values, np.float64)
    if times.shape != values.shape or times.ndim != 1:
        raise ValueError(f"times {times.shape} and values {values.shape} must be two equal columns")
    if times.size > MAX_SAMPLES:
        chosen = np.linspace(0, times.size - 1, MAX_SAMPLES).astype(np.int64)
        times, values = times[chosen], values[chosen]
    return times, values


def _too_few(times: NDArray[np.float64]) -> bool:
    return bool(times.size < MIN_SAMPLES or times[-1] - times[0] < MIN_SPAN_SECONDS)


def _trend(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median slope between all pairs, and the shares of pairs that fall and that rise."""
    earlier, later = np.triu_indices(times.size, k=1)
    spans = times[later] - times[earlier]
    slopes = (values[later] - values[earlier])[spans > 0] / spans[spans > 0]
    if not slopes.size:
        return 0.0, 0.0, 0.0
    return float(np.median(slopes)), float(np.mean(slopes < 0)), float(np.mean(slopes > 0))


def _within_horizon(seconds: float) -> float | None:
    return seconds if seconds <= HORIZON_SECONDS else None
