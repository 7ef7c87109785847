"""The list of live sequences: whatever is asked for, it equals what the blocks of the map say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import wire
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import PoolSample, measure_waste
from agent.web.request_page import MAX_GROUPS, RequestQuery, request_page
from engine_shim.snapshot import MapSnapshot, OwnerEntry

CREATED_UNIX = 1_700_000_000
NOW = CREATED_UNIX + 100.0
Make = Callable[..., MapSnapshot]


def sample_of(snapshot: MapSnapshot) -> PoolSample:
    return PoolSample(
        id="engine.dp0.tp0.pp0.kv",
        state="live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=True,
        waste=measure_waste(snapshot),
        oldest_pinned_seconds=None,
        forecast=ExhaustionForecast(None, "no trend"),
        tokens_per_second=None,
        torn_reads=0,
        read_seconds=0.0,
    )


OWNERS = tuple(
    OwnerEntry(
        owner=slot | generation << 24,
        request_id=f"request-{slot}",
        lora=("", "French", "law")[slot % 3],
        cache_salt=("", "tenant")[slot % 2],
        tokens=slot * 7,
        blocks=10 - slot,
        first_seen_unix_ns=int((CREATED_UNIX + 10 * slot) * 1e9),
    )
    for slot, generation in ((1, 0), (2, 0), (3, 5), (4, 0), (5, 0))
)
blocks = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 2, 3]),
        st.integers(0, 3),  # references
        st.sampled_from([0, *(one.owner for one in OWNERS), 3, 99]),  # 3: of an earlier generation; 99: not listed
        st.integers(0, 16),  # tokens
        st.integers(0, 90_000),  # touched
    ),
    min_size=1,
    max_size=120,
)


# The fixture is a function without state.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(blocks, st.sampled_from(get_args(wire.RequestOrder)), st.booleans())
def test_the_page_equals_its_blocks(
    make_snapshot: Make, pool: list[tuple[int, ...]], sort: wire.RequestOrder, ascending: bool
) -> None:
    states, references, owner, tokens, touched = zip(*pool, strict=True)
    snapshot = make_snapshot(
        states, references=references, owner=owner, tokens=tokens, touched_ms=touched, owners=OWNERS
    )
    page = request_page(sample_of(snapshot), RequestQuery(100, sort, ascending), NOW)
    assert (page.total, page.matching, len(page.requests)) == (5, 5, 5)
    entries = {one.request_id: one for one in OWNERS}
    for one in page.requests:
        entry = entries[one.request_id]
        mine = [i for i in range(len(pool)) if owner[i] == entry.owner and states[i] != 0]
        assert one.owned_blocks == len(mine)
        assert one.exclusive_blocks == sum(references[i] == 1 for i in mine)
        assert one.runs == sum(i - 1 not in mine for i in mine)
        assert one.tail_waste_tokens == sum(16 - tokens[i] for i in mine if states[i] in (2, 3))
        newest = min((100_000 - touched[i] for i in mine), default=None)
        assert one.last_block_seconds == (None if newest is None else newest / 1000)
        assert one.tokens_per_second == pytest.approx(entry.tokens / one.age_seconds)
    keys = [getattr(one, sort) for one in page.requests]
    known = [key for key in keys if key is not None]
    assert keys == sorted(known, reverse=not ascending) + [None] * (len(keys) - len(known))
    for groups, label in ((page.by_lora, "lora"), (page.by_cache_salt, "cache_salt")):
        assert {one.label for one in groups} == {getattr(one, label) for one in page.requests}
        for group in groups:
            members = [one for one in page.requests if getattr(one, label) == group.label]
            assert group.requests == len(members)
            for name in ("tokens", "owned_blocks", "exclusive_blocks", "runs", "tail_waste_tokens"):
                assert getattr(group, name) == sum(getattr(one, name) for one in members)
            assert group.oldest_seconds == max(one.age_seconds for one in members)
    assert page.totals is not None
    assert page.totals.owned_blocks == sum(group.owned_blocks or 0 for group in page.by_lora)


def test_what_is_asked_for_is_what_comes(make_snapshot: Make) -> None:
    snapshot = make_snapshot([2] * 5, owner=[one.owner for one in OWNERS], owners=OWNERS)

    def ids(limit: int = 100, **query: Any) -> list[str]:
        page = request_page(sample_of(snapshot), RequestQuery(limit, **query), NOW)
        assert page.total == 5
        assert page.totals is not None
        assert page.totals.requests == page.matching
        assert limit < 100 or page.matching == len(page.requests)
        return [one.request_id for one in page.requests]

    assert ids(2) == ["request-1", "request-2"]
    assert ids(2, ascending=True) == ["request-5", "request-4"]
    assert ids(lora="law") == ["request-2", "request-5"]
    assert ids(lora="") == ["request-3"]
    assert ids(lora="law", cache_salt="tenant") == ["request-5"]
    assert ids(contains="FREN") == ["request-1", "request-4"]
    assert ids(contains="est-3") == ["request-3"]
    assert ids(contains="nobody") == []
    assert ids(sort="lora") == ["request-2", "request-5", "request-1", "request-4", "request-3"]
    cut = request_page(sample_of(snapshot), RequestQuery(2, lora="law"), NOW)
    assert (cut.matching, [one.label for one in cut.by_lora]) == (2, ["law"])


def test_columns_that_the_writer_dropped_are_none(make_snapshot: Make) -> None:
    none = dict.fromkeys(("references", "tokens", "owner", "position", "touched_ms", "group"))
    snapshot = make_snapshot([2] * 5, owners=OWNERS, **none)
    page = request_page(sample_of(snapshot), RequestQuery(3, "runs"), NOW)
    first = page.requests[0]
    assert (first.owned_blocks, first.runs, first.tail_waste_tokens, first.last_block_seconds) == (None,) * 4
    assert page.totals is not None
    assert (page.totals.owned_blocks, page.totals.tokens) == (None, sum(one.tokens for one in OWNERS))


def test_many_groups_are_cut_and_counted(make_snapshot: Make) -> None:
    many = tuple(OwnerEntry(1 + i, f"r{i}", f"lora-{i}", "", 5, 1, CREATED_UNIX * 10**9) for i in range(3000))
    snapshot = make_snapshot([2] * 3000, owner=np.arange(1, 3001), owners=many)
    page = request_page(sample_of(snapshot), RequestQuery(10), NOW)
    assert (len(page.requests), len(page.by_lora), page.lora_groups) == (10, MAX_GROUPS, 3000)
    assert (page.cache_salt_groups, page.by_cache_salt[0].requests) == (1, 3000)
