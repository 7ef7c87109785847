"""The share of an engine's time that work between its steps may take."""

from __future__ import annotations

import pytest

from engine_shim.compaction.time_share import TimeShare
from engine_shim.errors import SettingsError


def test_work_is_paid_off_by_the_time_that_passes() -> None:
    time = TimeShare(0.2)
    assert not time.owes(5.0)
    time.spent(5.0, 5.1)
    assert time.owes(5.1)
    assert time.owes(5.49)
    assert not time.owes(5.51)  # 0.1 s of 0.5


def test_what_is_owed_adds_up() -> None:
    time = TimeShare(0.5)
    time.spent(0.0, 0.1)
    time.spent(0.1, 0.2)
    assert time.owes(0.35)
    assert not time.owes(0.41)


def test_time_that_passed_before_is_no_credit() -> None:
    time = TimeShare(0.5)
    time.spent(1000.0, 1000.1)
    assert time.owes(1000.19)


def test_the_whole_time_is_no_bound() -> None:
    time = TimeShare(1.0)
    time.spent(0.0, 9.0)
    assert not time.owes(9.0)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_one(share: float) -> None:
    with pytest.raises(SettingsError, match="more than 0"):
        TimeShare(share)


def test_a_process_that_was_stopped_may_work_again_soon() -> None:
    time = TimeShare(0.015)
    time.spent(100.0, 3700.0)  # an hour, of which next to nothing was work
    assert time.owes(3716.0)
    assert not time.owes(3717.0)
    time = TimeShare(0.015)
    time.spent(100.0, 100.2)
    assert time.owes(113.0)  # what may have been work counts in full
    assert not time.owes(113.4)


def test_a_clock_that_was_set_back_forbids_nothing() -> None:
    time = TimeShare(0.5)
    time.spent(10.0, 9.0)
    assert not time.owes(9.0)
    assert time.owed(9.0) == 0.0
