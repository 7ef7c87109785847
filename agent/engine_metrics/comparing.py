"""Holds what an engine says of itself against its map. Pure, but for what one comparison remembers of the last.

The two are never read at the same instant. What the metrics say agrees with the map where it lies within the range that
the map went through in the seconds around the reading, give or take a tolerance; farther off once, a step may have been
published on one side alone; farther off twice in a row, one of the two is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.engine_metrics.model import Comparison, Difference, Values
from agent.engine_metrics.names import MEANINGS, Quantity
from agent.sampling.model import PoolSample

SKEW_SECONDS = 2.0  # between a step, its publish in the map, and its arrival in the metrics; besides the intervals
IN_A_ROW = 2
COMPARED = (
    Quantity.KV_USAGE,
    Quantity.RUNNING,
    Quantity.WAITING,
    Quantity.PREEMPTIONS,
    Quantity.PREFIX_QUERY_TOKENS,
    Quantity.PREFIX_HIT_TOKENS,
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may differ beside the skew: this much, or this share of the larger number."""

    absolute: float
    relative: float = 0.0


# Usage: two engines' blocks held for a step by one side's account. Tokens: one more step's prompts.
TOLERANCES: Mapping[Quantity, Tolerance] = {
    Quantity.KV_USAGE: Tolerance(0.02),
    Quantity.RUNNING: Tolerance(1, 0.05),
    Quantity.WAITING: Tolerance(1, 0.05),
    Quantity.PREEMPTIONS: Tolerance(1, 0.02),
    Quantity.PREFIX_QUERY_TOKENS: Tolerance(1024, 0.02),
    Quantity.PREFIX_HIT_TOKENS: Tolerance(1024, 0.02),
}


@dataclass(frozen=True, slots=True)
class MapPoint:
    """What one sample of the map says of the same quantities, as of `time_unix`."""

    time_unix: float
    incarnation: int
    values: Values

    @classmethod
    def of(cls, sample: PoolSample, time_unix: float) -> MapPoint:
        report, snapshot = sample.report, sample.snapshot
        values: dict[Quantity, float] = {
            Quantity.RUNNING: snapshot.running_requests,
            Quantity.WAITING: snapshot.waiting_requests,
        }
        if report.usable_blocks:
            values[Quantity.KV_USAGE] = (report.used_blocks + report.pinned_blocks) / report.usable_blocks
        for quantity in (Quantity.PREEMPTIONS, Quantity.PREFIX_QUERY_TOKENS, Quantity.PREFIX_HIT_TOKENS):
            if quantity.value in snapshot.counters:
                values[quantity] = snapshot.counters[quantity.value]
        return cls(time_unix, sample.identity.incarnation, values)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Where a counter stood on both sides when they were first held against each other."""

    metrics: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a comparison needs of the ones before it."""

    incarnation: int | None = None
    baselines: Mapping[Quantity, Baseline] = field(default_factory=dict)
    in_a_row: Mapping[Quantity, int] = field(default_factory=dict)  # readings that differed


def window_of(
    points: Sequence[MapPoint], began_unix: float, read_unix: float, interval_seconds: float
) -> Sequence[MapPoint] | None:
    """The points around a reading, from before it to after it; None while the later ones are not there yet, empty where
    the earlier ones are not."""
    start, end = began_unix - SKEW_SECONDS - interval_seconds, read_unix + SKEW_SECONDS
    if not points or points[-1].time_unix < end:
        return None
    if points[0].time_unix > began_unix:
        return ()
    # Up to the first point beyond the end: the map may have changed right after the last one within.
    return [one for one in points if start <= one.time_unix <= end + interval_seconds]


def compare(
    memory: Memory, pool_id: str, values: Values, window: Sequence[MapPoint], now_unix: float
) -> tuple[Memory, Comparison]:
    """Judge one reading against the map's points around it, all of one incarnation."""
    incarnation = window[-1].incarnation
    if memory.incarnation != incarnation:
        memory = Memory(incarnation)
    baselines, in_a_row = dict(memory.baselines), dict(memory.in_a_row)
    differences = []
    for quantity in COMPARED:
        of_map = [point.values[quantity] for point in window if quantity in point.values]
        if quantity not in values or len(of_map) < len(window):
            continue
        said, low, high = values[quantity], min(of_map), max(of_map)
        if MEANINGS[quantity].is_counter:
            base = baselines.get(quantity)
            if base is None or said < base.metrics or high < base.low:
                baselines[quantity] = Baseline(said, low, high)
                in_a_row.pop(quantity, None)
                continue
            said, low, high = said - base.metrics, max(0.0, low - base.high), high - base.low
        one = _difference(quantity, said, low, high)
        in_a_row[quantity] = in_a_row.get(quantity, 0) + 1 if one.beyond else 0
        differences.append(one)
    lasting = [one for one in differences if in_a_row[one.quantity] >= IN_A_ROW]
    comparison = Comparison(
        pool_id=pool_id,
        made_unix=now_unix,
        differences=tuple(differences),
        disagrees=bool(lasting),
        reason="; ".join(_say(one) for one in lasting),
    )
    return replace(memory, baselines=baselines, in_a_row=in_a_row), comparison


def _difference(quantity: Quantity, said: float, low: float, high: float) -> Difference:
    distance = max(low - said, said - high, 0.0)
    larger = max(said, low if said < low else high)
    tolerance = TOLERANCES[quantity]
    beyond = distance > max(tolerance.absolute, tolerance.relative * larger)
    ratio = min(1.0, distance if MEANINGS[quantity].is_ratio else distance / larger if larger else 0.0)
    return Difference(quantity, said, low, high, ratio, beyond)


def _say(one: Difference) -> str:
    meaning = MEANINGS[one.quantity]

    def text(value: float) -> str:
        return f"{value:.3f}" if meaning.is_ratio else f"{value:,.0f}"

    low, high = text(one.map_low), text(one.map_high)
    name = one.quantity.value.removesuffix("_ratio").replace("_", " ").replace("kv", "KV")
    of_map = low if low == high else f"{low} to {high}"
    since = " since they were first compared" if meaning.is_counter else ""
    return f"{name}{since}: {text(one.metrics)} by the engine's metrics, {of_map} by its map"
