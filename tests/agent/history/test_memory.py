"""The history in memory against a plain list of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.history import METRICS, Bucket, MemoryHistory

values = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))


def oracle(samples: list[tuple[float, float | None]], start: float, end: float, step: float) -> list[Bucket]:
    first, last = math.floor(start / step), math.ceil(end / step)
    buckets = []
    for index in range(first, last):
        inside = [v for t, v in samples if v is not None and math.floor(t / step) == index]
        if inside:
            buckets.append(Bucket(index * step, min(inside), sum(inside) / len(inside), max(inside)))
        else:
            buckets.append(Bucket(index * step, None, None, None))
    return buckets


@given(
    st.lists(st.tuples(st.integers(0, 3), values), max_size=60),
    st.integers(0, 50),
    st.integers(1, 60),
    st.sampled_from([0.5, 1.0, 2.0, 7.0]),
)
def test_buckets_equal_the_oracle(gaps: list[tuple[int, float | None]], start: int, length: int, step: float) -> None:
    history = MemoryHistory(seconds=1000)
    time, samples = 0.0, []
    for gap, value in gaps:
        time += gap
        samples.append((time, value))
        history.append("a", time, {"free": value})
    if not samples:
        with pytest.raises(KeyError):
            history.query("a", "free", start, start + length, step)
        return
    found = history.query("a", "free", start, start + length, step)
    for one, wanted in zip(found, oracle(samples, start, start + length, step), strict=True):
        assert one.start_unix == wanted.start_unix
        assert (one.minimum, one.maximum) == (wanted.minimum, wanted.maximum)
        assert one.mean == (None if wanted.mean is None else pytest.approx(wanted.mean, rel=1e-9, abs=1e-6))


def test_the_oldest_samples_make_room() -> None:
    history = MemoryHistory(seconds=10)
    for second in range(25):
        history.append("a", second, {"used": second})
    times, used = history.recent("a", "used", 3600)
    assert times.tolist() == list(range(15, 25))
    assert used.tolist() == list(range(15, 25))
    assert [one.mean for one in history.query("a", "used", 10, 16, 1)] == [None] * 5 + [15]


def test_undefined_values_are_left_out() -> None:
    history = MemoryHistory()
    history.append("a", 1.0, {"fragmentation": None})
    assert history.query("a", "fragmentation", 0, 2, 1)[1].mean is None
    assert history.recent("a", "fragmentation", 60)[0].size == 0


def test_memory_is_bounded_by_pools() -> None:
    history = MemoryHistory(max_pools=3)
    for index in range(10):
        history.append(f"pool {index}", index, {"free": 1})
    assert history.recent("pool 9", "free", 1)[0].size == 1
    assert history.recent("pool 6", "free", 1)[0].size == 0
    history.drop("pool 9")
    history.drop("never there")
    assert history.recent("pool 9", "free", 1)[0].size == 0


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (("nonsense", 0, 1, 1), "no metric 'nonsense'"),
        (("free", 2, 1, 1), "end after it starts"),
        (("free", 1, 1, 1), "end after it starts"),
        (("free", math.nan, 1, 1), "end after it starts"),
        (("free", 0, math.inf, 1), "end after it starts"),
        (("free", 0, 1, 0), "step must be above 0"),
        (("free", 0, 1, math.nan), "step must be above 0"),
        (("free", 0, 1e9, 1), "raise the step"),
        (("free", 0, 1e308, 1e-300), "raise the step"),
    ],
)
def test_questions_that_cannot_be_answered(query: tuple[str, float, float, float], message: str) -> None:
    history = MemoryHistory()
    history.append("a", 1.0, {"free": 1.0})
    with pytest.raises(ValueError, match=message):
        history.query("a", *query)


def test_every_metric_can_be_kept() -> None:
    history = MemoryHistory()
    history.append("a", 5.0, {metric: float(index) for index, metric in enumerate(METRICS)})
    assert [history.query("a", metric, 5, 6, 1)[0].mean for metric in METRICS] == pytest.approx(np.arange(len(METRICS)))


@pytest.mark.parametrize("back", [3600, 30])
def test_recent_is_of_the_time_since_the_clock_was_set_back(back: int) -> None:
    """An hour: what lies ahead of the latest is not recent. Half a minute: two pasts must not be mixed."""
    history = MemoryHistory()
    for second in range(600):
        history.append("a", 1e9 + second, {"free": 10_000})
    set_back = 1e9 + 600 - back
    for second in range(20):
        history.append("a", set_back + second, {"free": 9000 - second})
    times, free = history.recent("a", "free", 120)
    assert times.tolist() == [set_back + second for second in range(20)]
    assert free.tolist() == [9000 - second for second in range(20)]
