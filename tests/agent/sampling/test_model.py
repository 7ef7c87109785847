"""What is derived from a snapshot: waste at the ends of sequences, ages, and the oldest pinned block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from agent.sampling.model import ages_seconds, measure_waste, oldest_pinned
from engine_shim.snapshot import GroupEntry, MapSnapshot

PUBLISHED = 1_700_000_100
Make = Callable[..., MapSnapshot]


def test_block_usage_hides_internal_waste(make_snapshot: Make) -> None:
    """30 sequences of 17 tokens in blocks of 16: 60 % of 100 blocks, and 46.9 % of their slots are empty."""
    snapshot = make_snapshot([2] * 60 + [0] * 40, tokens=[16, 1] * 30 + [0] * 40)
    waste = measure_waste(snapshot)
    assert waste is not None
    assert (waste.tokens, waste.slots) == (450, 960)
    assert round(waste.tokens / waste.slots, 3) == 0.469
    assert waste.bytes == 450 * 4096 // 16


def test_only_used_and_pinned_blocks_waste(make_snapshot: Make) -> None:
    waste = measure_waste(make_snapshot([0, 1, 2, 3, 4, 9], tokens=[1, 1, 1, 2, 1, 1]))
    assert waste is not None
    assert waste.tokens == 15 + 14


def test_waste_is_unknown_without_a_tokens_column(make_snapshot: Make) -> None:
    assert measure_waste(make_snapshot([2, 2], tokens=None)) is None


def test_groups_of_one_pool_have_block_sizes_of_their_own(make_snapshot: Make) -> None:
    groups = (GroupEntry(0, "full", 16, 4, 4096, 0), GroupEntry(1, "sliding", 32, 4, 4096, 512))
    waste = measure_waste(make_snapshot([2, 2], tokens=[16, 16], group=[0, 1], groups=groups))
    assert waste is not None
    assert (waste.tokens, waste.bytes) == (16, 2048)


def test_more_tokens_than_slots_are_no_negative_waste(make_snapshot: Make) -> None:
    waste = measure_waste(make_snapshot([2, 2], tokens=[40, 10]))
    assert waste is not None
    assert waste.tokens == 6


def test_the_oldest_pinned_block(make_snapshot: Make) -> None:
    snapshot = make_snapshot([3, 3, 2], touched_ms=[90_000, 40_000, 0])
    assert oldest_pinned(snapshot, PUBLISHED) == pytest.approx(60.0)
    assert oldest_pinned(make_snapshot([2]), PUBLISHED) is None
    assert oldest_pinned(make_snapshot([3], touched_ms=None), PUBLISHED) is None


def test_ages_survive_the_wrap_of_the_column(make_snapshot: Make) -> None:
    """After 49.7 days the column starts again at 0; a touch just before that is still recent just after."""
    wrap = 2**32 / 1000
    snapshot = make_snapshot([2, 2])
    now = snapshot.identity.created_unix_ns / 1e9 + wrap + 10
    touched = np.array([2**32 - 5_000, 4_000], np.uint32)
    assert ages_seconds(touched, snapshot, now) == pytest.approx([15.0, 6.0], abs=0.01)


def test_a_touch_after_our_look_at_the_clock_is_of_now(make_snapshot: Make) -> None:
    snapshot = make_snapshot([2])
    assert ages_seconds(np.array([100_020], np.uint32), snapshot, PUBLISHED) == pytest.approx([0.0])


@pytest.mark.parametrize(("back", "uptime"), [(7200, 30 * 86_400), (7200, 80 * 86_400), (70, 100)])
def test_a_clock_that_was_set_back_makes_nothing_49_days_old(make_snapshot: Make, back: int, uptime: int) -> None:
    snapshot = make_snapshot([3])
    touched = np.array([(uptime * 1000) & 0xFFFFFFFF], np.uint32)
    created = snapshot.identity.created_unix_ns / 1e9
    assert ages_seconds(touched, snapshot, created + uptime - back) == pytest.approx([0.0])
    assert ages_seconds(touched, snapshot, created + uptime + 20) == pytest.approx([20.0], abs=0.01)


def test_the_age_of_a_young_engine_s_block_is_right_up_to_49_days(make_snapshot: Make) -> None:
    snapshot = make_snapshot([3])
    created, days = snapshot.identity.created_unix_ns / 1e9, 49 * 86_400
    assert ages_seconds(np.array([0], np.uint32), snapshot, created + days) == pytest.approx([days], abs=0.01)


def test_clocks_before_the_map_was_made(make_snapshot: Make) -> None:
    snapshot = make_snapshot([2])
    early = replace(snapshot, identity=replace(snapshot.identity, created_unix_ns=(PUBLISHED + 50) * 10**9))
    assert ages_seconds(np.array([0], np.uint32), early, PUBLISHED) == pytest.approx([0.0])
