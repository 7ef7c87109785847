"""Map against metrics: skew is no disagreement, and a disagreement has both numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engine_metrics.comparing import IN_A_ROW, SKEW_SECONDS, MapPoint, Memory, compare, window_of
from agent.engine_metrics.model import Comparison
from agent.engine_metrics.names import Quantity
from engine_shim.snapshot import MapSnapshot
from tests.agent.test_exporter import sample_of

POOL = "engine.dp0.tp0.pp0.kv"


def points(*usages: float, start: float = 100.0, incarnation: int = 1, counter: Sequence[float] = ()) -> list[MapPoint]:
    """One a second."""
    made = []
    for i, usage in enumerate(usages):
        values: dict[Quantity, float] = {Quantity.KV_USAGE: usage}
        if counter:
            values[Quantity.PREFIX_QUERY_TOKENS] = counter[i]
        made.append(MapPoint(start + i, incarnation, values))
    return made


def judge(readings: Sequence[Mapping[Quantity, float]], window: Sequence[MapPoint]) -> Comparison:
    """The last of several comparisons."""
    memory, made = Memory(), Comparison(POOL)
    for values in readings:
        memory, made = compare(memory, POOL, values, window, 200.0)
    return made


@pytest.mark.parametrize(
    ("said", "disagrees", "ratio"),
    [
        pytest.param(0.50, False, 0.0, id="a value that the map went through"),
        pytest.param(0.315, False, 0.0, id="beside the range, within the tolerance"),
        pytest.param(0.90, True, 0.30, id="above"),
        pytest.param(0.00, True, 0.33, id="below"),
    ],
)
def test_a_reading_agrees_with_the_range_that_the_map_went_through(said: float, disagrees: bool, ratio: float) -> None:
    made = judge([{Quantity.KV_USAGE: said}] * IN_A_ROW, points(0.33, 0.60, 0.40))
    assert made.disagrees is disagrees
    assert made.ratio == pytest.approx(ratio)
    if disagrees:
        assert f"{said:.3f} by the engine's metrics, 0.330 to 0.600 by its map" in made.reason
    else:
        assert made.reason == ""


def test_once_is_not_enough_and_twice_must_be_in_a_row() -> None:
    far, near = {Quantity.KV_USAGE: 0.9}, {Quantity.KV_USAGE: 0.5}
    window = points(0.5, 0.5)
    assert not judge([far], window).disagrees
    assert judge([far], window).ratio == 0.0
    assert not judge([far, near, far], window).disagrees
    assert judge([near, far, far], window).disagrees


def test_counters_are_compared_by_what_was_added() -> None:
    """The metrics may have counted since before the map was made."""
    memory = Memory()
    first = points(0.1, 0.1, counter=(500, 600))
    memory, made = compare(memory, POOL, {Quantity.PREFIX_QUERY_TOKENS: 1_000_000}, first, 200.0)
    assert made.differences == ()
    later = points(0.1, 0.1, counter=(10_500, 10_600), start=110)
    memory, made = compare(memory, POOL, {Quantity.PREFIX_QUERY_TOKENS: 1_010_000}, later, 210.0)
    (one,) = made.differences
    assert (one.metrics, one.map_low, one.map_high, one.beyond) == (10_000, 9_900, 10_100, False)
    for _ in range(IN_A_ROW):
        memory, made = compare(memory, POOL, {Quantity.PREFIX_QUERY_TOKENS: 1_050_000}, later, 220.0)
    assert made.disagrees
    assert "prefix query tokens since they were first compared: 50,000" in made.reason
    assert made.ratio == pytest.approx((50_000 - 10_100) / 50_000)


def test_a_counter_that_went_back_begins_anew() -> None:
    memory = Memory()
    for said in (9_000_000, 10):
        memory, made = compare(memory, POOL, {Quantity.PREFIX_QUERY_TOKENS: said}, points(0.1, counter=(5,)), 200.0)
    assert made.differences == ()


def test_another_incarnation_forgets_what_was() -> None:
    far = {Quantity.KV_USAGE: 0.9}
    memory, _ = compare(Memory(), POOL, far, points(0.1), 200.0)
    memory, made = compare(memory, POOL, far, points(0.1, incarnation=2), 201.0)
    assert not made.disagrees
    assert compare(memory, POOL, far, points(0.1, incarnation=2), 202.0)[1].disagrees


def test_what_either_side_does_not_know_is_not_compared() -> None:
    assert judge([{Quantity.RUNNING: 5.0}] * 3, points(0.1, 0.2)).differences == ()
    assert judge([{}] * 3, points(0.1, 0.2)).differences == ()


def test_a_reading_waits_for_the_samples_after_it() -> None:
    seconds = [0.1 * i for i in range(20)]
    later = 106.0 + SKEW_SECONDS
    assert window_of(points(*seconds[:7]), 105.9, 106.0, 1.0) is None
    window = window_of(points(*seconds), 105.9, 106.0, 1.0)
    assert window is not None
    assert [point.time_unix for point in window] == [103, 104, 105, 106, 107, 108, 109]
    assert window[-1].time_unix >= later
    assert window_of(points(*seconds, start=107), 105.9, 106.0, 1.0) == ()  # nothing is known of before
    assert window_of([], 105.9, 106.0, 1.0) is None


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=10),
    st.integers(0, 9),
    st.lists(st.integers(0, 3), min_size=2, max_size=5),
)
def test_a_value_of_the_window_never_disagrees(usages: list[float], which: int, repeat: list[int]) -> None:
    said = usages[which % len(usages)]
    made = judge([{Quantity.KV_USAGE: said}] * len(repeat), points(*usages))
    assert made.ratio == 0.0


def test_a_point_is_what_the_engine_would_report(make_snapshot: Callable[..., MapSnapshot]) -> None:
    """RESERVED blocks do not count; pinned ones are in use."""
    sample = sample_of(make_snapshot([4, 0, 1, 2, 2, 3], counters={"preemptions": 7}, running_requests=3))
    point = MapPoint.of(sample, 55.0)
    assert point.values[Quantity.KV_USAGE] == pytest.approx(3 / 5)
    assert point.values[Quantity.PREEMPTIONS] == 7
    assert point.values[Quantity.RUNNING] == 3
    assert Quantity.PREFIX_HIT_TOKENS not in point.values
