"""The exhaustion forecast: a trend where there is one, and the reason where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.forecast import MIN_SAMPLES, forecast_exhaustion, judge_admission, queue_grows

SECONDS = np.arange(60.0)


def test_a_steady_fall_is_extended_to_zero() -> None:
    forecast = forecast_exhaustion(SECONDS, 1000 - 10 * SECONDS)
    assert forecast.seconds == pytest.approx(41.0)
    assert forecast.reason == "falls by 10 blocks/s over the last 59 s"


def test_one_burst_does_not_tilt_the_trend() -> None:
    blocks = 1000 - 10 * SECONDS
    blocks[30] = 5000
    assert forecast_exhaustion(SECONDS, blocks).seconds == pytest.approx(41.0, rel=0.02)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        pytest.param(np.full(60, 500.0), "do not fall", id="constant"),
        pytest.param(500 + SECONDS, "do not fall", id="rising"),
        pytest.param(500 + 50 * np.sin(SECONDS), "do not fall", id="up and down"),
        pytest.param(1e9 - SECONDS, "more than a day away", id="far away"),
    ],
)
def test_none_is_in_sight(blocks: np.ndarray, reason: str) -> None:
    forecast = forecast_exhaustion(SECONDS, blocks)
    assert forecast.seconds is None
    assert reason in forecast.reason


def test_too_few_samples_say_nothing() -> None:
    assert forecast_exhaustion([], []).seconds is None
    assert forecast_exhaustion(SECONDS[: MIN_SAMPLES - 1], 100 - SECONDS[: MIN_SAMPLES - 1]).seconds is None
    # Many samples within a moment are no trend either.
    assert forecast_exhaustion(SECONDS / 100, 100 - SECONDS).seconds is None


def test_an_exhausted_pool_is_exhausted_now() -> None:
    assert forecast_exhaustion([0.0], [0]).seconds == 0.0


def test_unequal_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="equal columns"):
        forecast_exhaustion([0.0, 1.0], [1.0])


@given(st.lists(st.integers(0, 10**6), min_size=MIN_SAMPLES, max_size=200))
def test_a_forecast_is_never_negative_nor_nan(blocks: list[int]) -> None:
    seconds = forecast_exhaustion(np.arange(float(len(blocks))), blocks).seconds
    assert seconds is None or 0 <= seconds <= 86_400


def test_the_headroom_is_reached_before_the_end() -> None:
    forecast = forecast_exhaustion(SECONDS, 1000 - 10 * SECONDS, 200)
    assert forecast.seconds == pytest.approx(41.0)
    assert forecast.headroom_seconds == pytest.approx(21.0)
    assert forecast_exhaustion(SECONDS, 1000 - 10 * SECONDS, 500).headroom_seconds == 0.0


def test_a_pool_that_rests_at_its_headroom_says_so() -> None:
    forecast = forecast_exhaustion(SECONDS, np.full(60, 100.0), 100)
    assert (forecast.seconds, forecast.headroom_seconds, forecast.known) == (None, 0.0, True)
    assert forecast_exhaustion(SECONDS, np.full(60, 101.0), 100).headroom_seconds is None
    assert forecast_exhaustion(SECONDS, np.full(60, 101.0)).headroom_seconds is None  # an engine without headroom


def test_too_few_samples_are_not_an_all_clear() -> None:
    assert not forecast_exhaustion(SECONDS[:2], [5, 5]).known
    assert forecast_exhaustion(SECONDS, np.full(60, 500.0)).known


@pytest.mark.parametrize(
    ("allocatable", "waiting", "reason"),
    [
        pytest.param(100, 137, "137 wait; 0 blocks above the headroom of 100", id="at the headroom"),
        pytest.param(90, 1, "1 wait; 10 blocks short of the headroom of 100", id="inside"),
        pytest.param(148, 3, "3 wait; 48 blocks above the headroom of 100", id="less than a running sequence holds"),
        pytest.param(152, 3, "", id="room for a sequence of usual size"),
        pytest.param(100, 0, "", id="nobody waits"),
    ],
)
def test_admission_is_blocked_where_some_wait_near_the_headroom(allocatable: int, waiting: int, reason: str) -> None:
    admission = judge_admission(
        allocatable_blocks=allocatable,
        headroom_blocks=100,
        usable_blocks=1000,
        used_blocks=500,
        running=10,
        waiting=waiting,
    )
    assert (admission.blocked, admission.reason) == (bool(reason), reason)


def test_one_giant_does_not_explain_every_wait() -> None:
    def blocked(allocatable: int) -> bool:
        return judge_admission(
            allocatable_blocks=allocatable,
            headroom_blocks=100,
            usable_blocks=1000,
            used_blocks=600,
            running=1,
            waiting=5,
        ).blocked

    assert blocked(200)
    assert not blocked(201)


def test_a_refusal_tells_that_one_waits_for_blocks_however_many_are_left() -> None:
    pool = {"allocatable_blocks": 600, "headroom_blocks": 100, "usable_blocks": 1000, "used_blocks": 300, "running": 9}
    assert judge_admission(**pool, waiting=2, refused=True).reason == "2 wait; 500 blocks above the headroom of 100"
    assert not judge_admission(**pool, waiting=2, refused=False).blocked
    assert not judge_admission(**pool, waiting=0, refused=True).blocked


def test_a_queue_grows_where_its_trend_rises() -> None:
    assert queue_grows(SECONDS[:30], 3 * SECONDS[:30])
    assert not queue_grows(SECONDS[:30], 90 - 3 * SECONDS[:30])
    assert not queue_grows(SECONDS[:30], np.full(30, 40.0))
    assert not queue_grows(SECONDS[:30], 10 + 5 * np.sin(SECONDS[:30]))
    assert not queue_grows(SECONDS[:5], SECONDS[:5])
    assert not queue_grows([], [])


@pytest.mark.parametrize(
    ("slope", "words"),
    [(1100.0, "1,100"), (1.5, "1.5"), (0.25, "0.25"), (0.004, "less than 0.01"), (123456.0, "123,456")],
)
def test_a_rate_has_no_exponent(slope: float, words: str) -> None:
    forecast = forecast_exhaustion(SECONDS, slope * (100 - SECONDS))
    assert forecast.reason == f"falls by {words} blocks/s over the last 59 s"
