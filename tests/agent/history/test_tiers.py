"""Summaries of samples against a plain list of them."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.history.model import METRICS
from agent.history.tiers import SAMPLE_TIERS, choose_tier, merge, start_of, summarize_sample

values = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))
ROW = METRICS.index("used")


@given(st.lists(values, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_merged_in_any_order_they_are_the_list(given_values: list[float | None], order: object) -> None:
    summaries = [summarize_sample({"used": value}) for value in given_values]
    order.shuffle(summaries)  # type: ignore[attr-defined]
    merged = reduce(merge, summaries)
    known = [value for value in given_values if value is not None]
    assert merged[ROW]["count"] == len(known)
    assert merged[METRICS.index("free")]["count"] == 0
    if known:
        assert (merged[ROW]["minimum"], merged[ROW]["maximum"]) == (min(known), max(known))
        scale = max(abs(value) for value in known)
        assert merged[ROW]["mean"] == pytest.approx(np.mean(known), rel=1e-5, abs=1e-5 * scale + 1e-30)


def test_a_mean_is_weighted_by_its_samples() -> None:
    """The negative control: a mean of means would be 5.5."""
    ten = reduce(merge, [summarize_sample({"used": 10.0})] * 9)
    assert merge(ten, summarize_sample({"used": 1.0}))[ROW]["mean"] == pytest.approx(9.1)


def test_what_is_no_finite_number_is_no_sample() -> None:
    assert summarize_sample({"used": float("nan"), "free": float("inf")})["count"].tolist() == [0] * len(METRICS)


@pytest.mark.parametrize(
    ("step", "tier"),
    [(0.5, 1), (1, 1), (7, 1), (10, 10), (15, 1), (45.5, 10), (60, 60), (70, 10), (90, 10), (720, 60), (4320.5, 60)],
)
def test_the_coarsest_tier_that_suits_a_step(step: float, tier: int) -> None:
    assert SAMPLE_TIERS[choose_tier(SAMPLE_TIERS, step)].step_seconds == tier


def test_buckets_start_at_whole_steps() -> None:
    assert [start_of(1_700_000_079.9, tier) for tier in SAMPLE_TIERS] == [1_700_000_079, 1_700_000_070, 1_700_000_040]
    assert start_of(-0.5, SAMPLE_TIERS[1]) == -10
