"""Histograms as the map keeps them, pages counted one by one, and where a request's blocks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import PoolSample
from agent.web.cells import map_cells
from agent.web.profile import page_occupancy, pool_profile
from agent.wire.profile import PageOccupancy
from engine_shim.snapshot import GroupEntry, MapSnapshot, OwnerEntry

NOW = 1_700_000_100.0
Make = Callable[..., MapSnapshot]


def sample_of(snapshot: MapSnapshot, known: bool = True) -> PoolSample:
    return PoolSample(
        id="engine.dp0.tp0.pp0.kv",
        state="live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=known,
        waste=None,
        oldest_pinned_seconds=None,
        forecast=ExhaustionForecast(None, "no trend"),
        tokens_per_second=None,
        torn_reads=0,
        read_seconds=0.0,
    )


def occupancy(states: list[int], per_page: int) -> PageOccupancy:
    column = np.array(states, np.uint8)
    return page_occupancy(column, per_page, page_bytes=1, block_bytes=1, per_layer=False)


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 9]), max_size=120), st.integers(1, 20))
def test_pages_are_counted(states: list[int], per_page: int) -> None:
    found = occupancy(states, per_page)
    pages = [states[at : at + per_page] for at in range(0, len(states), per_page)]
    assert found.pages == len(pages)
    assert found.free_pages == sum(set(page) == {0} for page in pages)
    assert found.evictable_pages == sum(1 in page and set(page) <= {0, 1} for page in pages)
    held = [sum(state > 1 for state in page) / len(page) for page in pages]
    for tenth, number in enumerate(found.by_held_tenth):
        assert number == sum(tenth < round(10 * share, 9) <= tenth + 1 for share in held)
    assert found.free_pages + found.evictable_pages + sum(found.by_held_tenth) == found.pages


def test_one_held_block_keeps_its_page() -> None:
    assert occupancy([0] * 8, 4).free_pages == 2
    assert occupancy([0] * 7 + [2], 4).free_pages == 1


def test_a_page_holds_blocks_of_one_layer(make_snapshot: Make) -> None:
    snapshot = make_snapshot([0, 2, 1, 0])
    whole = pool_profile(sample_of(snapshot), page_bytes=2 * snapshot.identity.block_bytes).pages
    assert whole is not None
    assert (whole.per_layer, whole.blocks_per_page) == (False, 2)
    layered = replace(snapshot, groups=(GroupEntry(0, "full", 16, 8, 8 * 512, 0),))
    pages = pool_profile(sample_of(layered), page_bytes=2048).pages
    assert pages is not None
    assert (pages.per_layer, pages.block_bytes, pages.blocks_per_page, pages.pages) == (True, 512, 4, 1)
    assert pool_profile(sample_of(layered, known=False)).pages is None


@pytest.mark.parametrize("name", ["lifetime", "idle_before_evict", "reuse_gap"])
def test_histograms_are_the_map_s(name: str, make_snapshot: Make) -> None:
    snapshot = make_snapshot([0])
    found = getattr(pool_profile(sample_of(snapshot)), name)
    kept = snapshot.histograms[name]
    assert (found.bounds_seconds, found.counts) == (list(kept.bounds_seconds), list(kept.counts))
    assert getattr(pool_profile(sample_of(replace(snapshot, histograms={}))), name) is None


def test_a_request_s_blocks_are_found(make_snapshot: Make) -> None:
    owners = tuple(OwnerEntry(owner, f"request-{owner}", "", "", 1, 1, 0) for owner in (5, 6))
    snapshot = make_snapshot([2, 2, 1, 0, 2], owner=[5, 6, 5, 5, 5], owners=owners)
    sample = sample_of(snapshot)
    assert map_cells(sample, 3, NOW, "request-5").requested == [1, 1, 1]
    assert map_cells(sample, 3, NOW, "request-6").requested == [1, 0, 0]
    assert map_cells(sample, 3, NOW, "request-7").requested is None
    assert map_cells(sample, 3, NOW).requested is None
