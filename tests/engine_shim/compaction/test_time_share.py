"""The share of an engine's time that work between its steps may take."""

from __future__ import annotations

import pytest

from engine_shim.compaction.time_share import TimeShare
from engine_shim.errors import SettingsError


def test_work_is_paid_off_by_the_time_that_passes() -> None:
    time = TimeShare(0.2)
    assert not time.owes(5.0)
    time.spent(5.0, 6.0)
    assert time.owes(6.0)
    assert time.owes(9.9)
    assert not time.owes(10.0)  # 1 s of 5


def test_what_is_owed_adds_up() -> None:
    time = TimeShare(0.5)
    time.spent(0.0, 1.0)
    time.spent(1.0, 2.0)
    assert time.owes(3.5)
    assert not time.owes(4.0)


def test_time_that_passed_before_is_no_credit() -> None:
    time = TimeShare(0.5)
    time.spent(1000.0, 1001.0)
    assert time.owes(1001.9)


def test_the_whole_time_is_no_bound() -> None:
    time = TimeShare(1.0)
    time.spent(0.0, 9.0)
    assert not time.owes(9.0)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_one(share: float) -> None:
    with pytest.raises(SettingsError, match="more than 0"):
        TimeShare(share)
