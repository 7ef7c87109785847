"""The heatmap and the pages: what a cell says equals what its blocks say, on any pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import PoolSample, measure_waste, oldest_pinned
from agent.web.cells import UNKNOWN_STATE, map_cells
from agent.web.presenter import block_page, summarize
from agent.web.request_page import RequestQuery, request_page
from agent.wire import STATE_NAMES, MapCells
from engine_shim.snapshot import MapFlags, MapSnapshot, OwnerEntry

NOW = 1_700_000_100.0
Make = Callable[..., MapSnapshot]


def sample_of(snapshot: MapSnapshot) -> PoolSample:
    return PoolSample(
        id="engine.dp0.tp0.pp0.kv",
        state="sleeping" if snapshot.flags.sleeping else "live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=not snapshot.flags.sleeping,
        waste=measure_waste(snapshot),
        oldest_pinned_seconds=oldest_pinned(snapshot, NOW),
        forecast=ExhaustionForecast(None, "no trend"),
        tokens_per_second=None,
        torn_reads=0,
        read_seconds=0.0,
    )


pools = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 3, 4, 7]),
        st.integers(0, 5),  # references
        st.sampled_from([0, 0, 11, 12, 13]),  # owner
        st.integers(0, 100_000),  # touched
    ),
    min_size=1,
    max_size=200,
)


# The fixture is a function without state.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(pools, st.integers(1, 64))
def test_cells_equal_their_blocks(make_snapshot: Make, pool: list[tuple[int, int, int, int]], cells: int) -> None:
    states, references, owners, touched = (list(column) for column in zip(*pool, strict=True))
    entries = tuple(OwnerEntry(owner, f"request {owner}", "", "", 1, 1, 0) for owner in (11, 12, 13))
    snapshot = make_snapshot(states, references=references, owner=owners, touched_ms=touched, owners=entries)
    found = map_cells(sample_of(snapshot), cells, NOW)
    pages = block_page(sample_of(snapshot), 0, len(states), NOW).blocks

    assert found.cells <= cells
    assert found.references is not None
    assert found.age_seconds is not None
    assert found.owner is not None
    starts = range(0, len(states), found.blocks_per_cell)
    assert found.cells == len(starts)
    for index, start in enumerate(starts):
        blocks = pages[start : start + found.blocks_per_cell]
        counts = Counter(block.state for block in blocks)
        assert {name: column[index] for name, column in found.counts.items() if column[index]} == counts
        most = max(counts.values())
        values = [UNKNOWN_STATE if n == "unknown" else STATE_NAMES.index(n) for n, c in counts.items() if c == most]
        assert found.state[index] == max(values)
        assert found.references[index] == max(block.references or 0 for block in blocks)
        assert found.age_seconds[index] == min(block.age_seconds or 0.0 for block in blocks)
        holders = Counter(block.owner for block in blocks if block.owner)
        if holders:
            assert holders[found.owners[found.owner[index]]] == max(holders.values())
        else:
            assert found.owner[index] == -1


def test_a_million_blocks_fit_4096_cells(make_snapshot: Make) -> None:
    states = np.tile(np.array([0, 1, 2, 3], np.uint8), 250_000)
    found = map_cells(sample_of(make_snapshot(states)), 4096, NOW)
    assert found.cells == 4082
    assert found.blocks_per_cell == 245
    assert sum(sum(column) for column in found.counts.values()) == 1_000_000
    assert MapCells.model_validate_json(found.model_dump_json()) == found


def test_columns_that_the_writer_dropped_are_none(make_snapshot: Make) -> None:
    names = ("references", "tokens", "owner", "position", "touched_ms", "group")
    sample = sample_of(make_snapshot([0, 2, 4], **dict.fromkeys(names)))
    found = map_cells(sample, 2, NOW)
    assert (found.references, found.age_seconds, found.owner, found.owners) == (None, None, None, [])
    block = block_page(sample, 1, 1, NOW).blocks[0]
    assert (block.state, block.references, block.tokens, block.owner, block.age_seconds) == ("used", *[None] * 4)
    assert summarize(sample, NOW).tail_waste_tokens is None


def test_a_page_ends_with_the_pool(make_snapshot: Make) -> None:
    page = block_page(sample_of(make_snapshot([0, 2, 9])), 1, 100, NOW)
    assert [(block.block, block.state) for block in page.blocks] == [(1, "used"), (2, "unknown")]


def test_an_owner_whose_row_is_gone_has_ended(make_snapshot: Make) -> None:
    page = block_page(sample_of(make_snapshot([2], owner=[(3 << 24) | 17])), 0, 1, NOW)
    assert page.blocks[0].owner == "ended sequence"


def test_requests_and_what_they_hold(make_snapshot: Make) -> None:
    owners = (
        OwnerEntry(1, "small", "", "", 20, 2, int((NOW - 5) * 1e9)),
        OwnerEntry(2, "large", "adapter", "salt", 60, 4, int((NOW - 9) * 1e9)),
    )
    snapshot = make_snapshot(
        [2, 2, 0, 2, 2, 2, 2],
        owner=[1, 1, 0, 2, 2, 2, 2],
        references=[1, 1, 0, 2, 1, 1, 1],
        tokens=[16, 4, 0, 16, 16, 16, 12],
        owners=owners,
    )
    page = request_page(sample_of(snapshot), RequestQuery(10), NOW)
    assert page.total == 2
    large, small = page.requests
    assert (large.request_id, large.lora, large.blocks, large.exclusive_blocks, large.runs) == (
        "large",
        "adapter",
        4,
        3,
        1,
    )
    assert (large.tail_waste_tokens, small.tail_waste_tokens) == (4, 12)
    assert large.age_seconds == pytest.approx(9)
    assert [one.request_id for one in request_page(sample_of(snapshot), RequestQuery(1), NOW).requests] == ["large"]


def test_a_block_may_hold_more_tokens_than_31_bits_count(make_snapshot: Make) -> None:
    entry = OwnerEntry(1, "a", "", "", 1, 1, 0)
    snapshot = make_snapshot([2, 0], owner=[1, 0], tokens=[5, 0], owners=(entry,), block_tokens=2**32 - 1)
    assert request_page(sample_of(snapshot), RequestQuery(1), NOW).requests[0].tail_waste_tokens == 2**32 - 6


def test_scattered_blocks_are_many_runs(make_snapshot: Make) -> None:
    snapshot = make_snapshot([2] * 6, owner=[1, 2, 1, 2, 2, 1], owners=(OwnerEntry(1, "a", "", "", 1, 3, 0),))
    assert request_page(sample_of(snapshot), RequestQuery(1), NOW).requests[0].runs == 3


def test_fragmentation_of_a_sleeping_engine_is_not_computed(make_snapshot: Make) -> None:
    """The old states are still in the map, and mean nothing."""
    summary = summarize(sample_of(make_snapshot([0, 2, 0], flags=MapFlags(sleeping=True))), NOW)
    assert (summary.fragmentation.rate, summary.fragmentation.strict_rate) == (None, None)
    awake = summarize(sample_of(make_snapshot([0, 2, 0])), NOW)
    assert awake.fragmentation.rate == 0.5


def test_ages_of_a_snapshot(make_snapshot: Make) -> None:
    """An idle pool is as its heartbeat vouches; a busy one is as old as its last publish."""
    later = int((NOW + 30) * 1e9)
    idle = summarize(sample_of(make_snapshot([0], heartbeat_unix_ns=later)), NOW + 31)
    busy = summarize(sample_of(make_snapshot([0], heartbeat_unix_ns=later, running_requests=1)), NOW + 31)
    assert idle.snapshot_age_seconds == pytest.approx(1.0)
    assert busy.snapshot_age_seconds == pytest.approx(31.0)
    assert busy.heartbeat_age_seconds == pytest.approx(1.0)
