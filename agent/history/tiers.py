"""How finely the past is kept, by age, and how samples are summed up for it. Pure: no disk, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.history.model import METRICS

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Tier:
    """One resolution. `keep_seconds` is how old its entries may become."""

    step_seconds: int
    keep_seconds: float


SAMPLE_TIERS = (Tier(1, 3600.0), Tier(10, DAY), Tier(60, 30 * DAY))

FRAME_TIERS = (Tier(1, 600.0), Tier(10, 7200.0), Tier(60, 30 * DAY))
CHAINS = (60, 30, 10)
"""Frames of each tier from one that is whole to the next: what is read to show one frame at most."""

RECORD = np.dtype([("count", "<u4"), ("minimum", "<f4"), ("mean", "<f4"), ("maximum", "<f4")])
"""One metric in one bucket. A `count` of 0: no sample had a value."""

LARGEST = float(np.finfo(np.float32).max)

Summary = NDArray[Any]
"""(len(METRICS),) of RECORD: one bucket, in the order of METRICS."""


def summarize_sample(values: Mapping[str, float | None]) -> Summary:
    """One sample as a bucket of its own; what is undefined, and what is no finite number of a record, counts as no
    sample."""
    summary = np.zeros(len(METRICS), RECORD)
    for row, metric in enumerate(METRICS):
        value = values.get(metric)
        if value is not None and abs(value) <= LARGEST:
            summary[row] = (1, value, value, value)
    return summary


def merge(one: Summary, other: Summary) -> Summary:
    """Both buckets in one: the order does not matter, beyond rounding of the mean to single precision."""
    counts = one["count"].astype(np.int64) + other["count"]
    weighted = one["mean"].astype(np.float64) * one["count"] + other["mean"].astype(np.float64) * other["count"]
    merged = np.zeros_like(one)
    merged["count"] = np.minimum(counts, np.iinfo(np.uint32).max)
    merged["mean"] = weighted / np.maximum(counts, 1)
    for name, of in (("minimum", np.minimum), ("maximum", np.maximum)):
        both = of(one[name], other[name])
        merged[name] = np.where(one["count"] == 0, other[name], np.where(other["count"] == 0, one[name], both))
    return merged


def start_of(time_unix: float, tier: Tier) -> int:
    """The Unix second that the tier's bucket of this time starts at."""
    return math.floor(time_unix / tier.step_seconds) * tier.step_seconds


def choose_tier(tiers: Sequence[Tier], step_seconds: float) -> int:
    """The index of the tier that buckets of `step_seconds` are best made of.

    The coarsest that divides them evenly; else the coarsest of which four or more go into one; else the finest.
    """
    indices = range(len(tiers) - 1, -1, -1)
    for index in indices:
        step = tiers[index].step_seconds
        if step_seconds >= step and math.isclose(math.remainder(step_seconds, step), 0.0, abs_tol=1e-9):
            return index
    return next((index for index in indices if step_seconds >= 4 * tiers[index].step_seconds), 0)
