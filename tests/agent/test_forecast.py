"""The exhaustion forecast: a trend where there is one, and the reason where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.forecast import MIN_SAMPLES, forecast_exhaustion

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
