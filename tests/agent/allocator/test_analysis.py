"""Figures of a snapshot against a plain recount, and against cases whose right answer is known."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.allocator.advice import releasable_bytes
from agent.allocator.analysis import AllocatorReport, analyze_snapshot
from agent.allocator.errors import SnapshotError
from agent.allocator.snapshot import parse_snapshot, read_snapshot
from tests.agent.allocator.conftest import MIB, block, busy_allocator, in_old_form, segment, whole_snapshot


def report(*segments: dict[str, Any], **settings: Any) -> AllocatorReport:
    return analyze_snapshot(parse_snapshot(whole_snapshot(list(segments), **settings)))


def lever(found: AllocatorReport, option: str) -> Any:
    return next(one for one in found.advice if one.option == option)


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_every_figure_equals_a_plain_recount(seed: int, steps: int) -> None:
    allocator = busy_allocator(seed, steps)
    found = analyze_snapshot(parse_snapshot(whole_snapshot(allocator.snapshot())))
    blocks = [one for segment in allocator.segments for one in segment.blocks]
    total = found.total
    assert total.reserved_bytes == sum(one.total for one in allocator.segments)
    assert total.reserved_bytes == total.live_bytes + total.pending_bytes + total.free_bytes
    assert total.live_bytes == sum(one.size for one in blocks if one.state == "active_allocated")
    assert total.pending_bytes == sum(one.size for one in blocks if one.state == "active_pending_free")
    assert total.internal_waste_bytes == sum(
        one.size - one.requested for one in blocks if one.state == "active_allocated"
    )
    for pool in found.pools:
        mine = [one for one in allocator.segments if (one.device, one.pool) == (pool.device, pool.id)]
        free = [one.size for segment in mine for one in segment.blocks if one.state == "inactive"]
        assert pool.holdings.free_bytes == sum(free)
        assert pool.holdings.largest_free_bytes == max(free, default=0)
        expected = 1 - max(free) / sum(free) if free else None
        assert pool.holdings.fragmentation_rate == expected
        assert sum(part.holdings.free_bytes for part in pool.parts) == sum(free)
    assert [pool.private for pool in found.pools] == sorted(pool.private for pool in found.pools)


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_empty_cache_gives_back_what_torch_would(seed: int, steps: int) -> None:
    allocator = busy_allocator(seed, steps)
    found = analyze_snapshot(parse_snapshot(whole_snapshot(allocator.snapshot())))
    idle = [
        one.total
        for one in allocator.segments
        if one.pool == (0, 0) and all(two.state != "active_allocated" for two in one.blocks)
    ]
    assert lever(found, "empty_cache").bytes == sum(idle)
    expandable = lever(found, "expandable_segments")
    assert 0 <= expandable.bytes <= expandable.at_most_bytes
    # What is reserved after both is never less than what lives.
    live = sum(
        two.size
        for one in allocator.segments
        for two in one.blocks
        if one.pool == (0, 0) and two.state == "active_allocated"
    )
    shared = sum(one.total for one in allocator.segments if one.pool == (0, 0))
    assert shared - sum(idle) - expandable.at_most_bytes >= live


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_every_form_of_one_snapshot_says_the_same(seed: int, steps: int) -> None:
    segments = busy_allocator(seed, steps).snapshot()
    first = analyze_snapshot(parse_snapshot(whole_snapshot(segments)))
    as_json = json.loads(json.dumps(whole_snapshot(segments)))  # pools become lists
    assert analyze_snapshot(parse_snapshot(as_json)) == first
    as_list = analyze_snapshot(parse_snapshot(segments))
    assert (as_list.pools, as_list.advice) == (first.pools, first.advice)
    old = analyze_snapshot(parse_snapshot(in_old_form(segments)))
    assert old.total.internal_waste_bytes == first.total.internal_waste_bytes
    assert old.total.live_bytes == first.total.live_bytes
    assert old.pools[0].id == (0, 0)
    assert any("does not tell pools" in one for one in old.warnings)


@pytest.mark.parametrize("write", ["pickle 2", "pickle 4", "json"])
def test_files_of_each_form(tmp_path: Path, write: str) -> None:
    value = whole_snapshot(busy_allocator(1, 200).snapshot())
    path = tmp_path / "snapshot"
    form, _, protocol = write.partition(" ")
    path.write_bytes(json.dumps(value).encode() if form == "json" else pickle.dumps(value, int(protocol)))
    assert analyze_snapshot(read_snapshot(path)) == analyze_snapshot(parse_snapshot(value))


def as_torch_writes_it_itself(value: Any, places: dict[str, int]) -> bytes:
    """The pickle of torch's own C++ writer: protocol 2, of whose values only texts have a place in the memo."""
    if isinstance(value, dict):
        members = (as_torch_writes_it_itself(one, places) for pair in value.items() for one in pair)
        return b"}(" + b"".join(members) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(as_torch_writes_it_itself(one, places) for one in value) + b"e"
    if isinstance(value, tuple):
        return b"".join(as_torch_writes_it_itself(one, places) for one in value) + b"\x86"
    if isinstance(value, str):
        if value in places:
            return b"h" + bytes([places[value]])
        places[value] = len(places)
        return b"X" + struct.pack("<I", len(value)) + value.encode() + b"q" + bytes([places[value]])
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return b"K" + bytes([value]) if 0 <= value < 256 else b"\x8a\x08" + struct.pack("<q", value)


def test_a_pickle_of_torchs_own_writer(tmp_path: Path) -> None:
    history = [{"action": "alloc", "addr": 140_000_000_000, "size": 512, "stream": 0, "time_us": 1_700_000_000_000_000}]
    value = {**whole_snapshot(busy_allocator(2, 200).snapshot()), "device_traces": [history * 300, []]}
    body = as_torch_writes_it_itself(value, {})
    assert pickle.loads(b"\x80\x02" + body + b".") == value  # noqa: S301 - it was made two lines above
    path = tmp_path / "snapshot"
    path.write_bytes(b"\x80\x02" + body + b".")
    assert analyze_snapshot(read_snapshot(path)) == analyze_snapshot(parse_snapshot(value))
    assert read_snapshot(path).history_recorded


def test_private_pools_look_free_and_are_not() -> None:
    found = report(
        segment(block(10 * MIB, "active_allocated"), block(10 * MIB)), segment(block(100 * MIB), pool=(0, 1))
    )
    default, private = found.pools
    assert (default.name, default.holdings.fragmentation_rate) == ("default", 0.0)
    assert (private.name, private.holdings.free_bytes) == ("private 0,1", 100 * MIB)
    assert found.total.largest_free_bytes == 10 * MIB
    assert lever(found, "empty_cache").bytes == 0
    assert any("private pools" in one for one in found.warnings)
    # The same memory in the default pool: all of it comes back.
    assert lever(report(segment(block(100 * MIB))), "empty_cache").bytes == 100 * MIB


@pytest.mark.parametrize("spelling", ["active_pending_free", "active_awaiting_free"])
def test_pending_is_neither_live_nor_free(spelling: str) -> None:
    found = report(segment(block(2 * MIB, "active_allocated"), block(4 * MIB, spelling), block(8 * MIB)))
    total = found.total
    assert (total.live_bytes, total.pending_bytes, total.free_bytes) == (2 * MIB, 4 * MIB, 8 * MIB)


def test_an_unknown_state_is_named_and_is_not_free() -> None:
    found = report(segment(block(2 * MIB, "on_holiday"), block(8 * MIB)))
    assert found.total.free_bytes == 8 * MIB
    assert any("on_holiday" in one for one in found.warnings)


def test_a_snapshot_without_history_says_so() -> None:
    bare = {"segments": [segment(block(2 * MIB))], "device_traces": [[], []]}
    assert any("history not recorded" in one for one in analyze_snapshot(parse_snapshot(bare)).warnings)
    bare["device_traces"] = [[{"action": "alloc"}], []]
    assert not any("history" in one for one in analyze_snapshot(parse_snapshot(bare)).warnings)


def test_both_settings_together_are_warned_of_with_the_growth_that_they_made() -> None:
    held = segment(block(266 * MIB, "active_allocated"), block((14060 - 266) * MIB), is_expandable=True)
    found = report(held, expandable_segments=True, max_split_size=134217728)
    assert any("max_split_size_mb:128 are both set" in one for one in found.warnings)
    assert not any("both set" in one for one in report(held, expandable_segments=True).warnings)
    assert not lever(found, "max_split_size").helps
    assert not lever(found, "expandable_segments").helps
    assert lever(found, "empty_cache").bytes == (14060 - 280) * MIB  # pages of 20 MiB that nothing live touches


def test_expandable_segments_by_hand() -> None:
    """Two segments of 20 MiB, each half live: in one growing segment the gap between has no page of 20 MiB whole."""
    half = segment(block(10 * MIB, "active_allocated"), block(10 * MIB))
    found = lever(report(half, half), "expandable_segments")
    assert (found.bytes, found.at_most_bytes) == (0, 20 * MIB)  # packed: 20 of 40 MiB
    wide = segment(block(10 * MIB, "active_allocated"), block(50 * MIB))
    assert lever(report(wide), "expandable_segments").bytes == 40 * MIB
    assert not lever(report(segment(block(20 * MIB, "active_allocated"))), "expandable_segments").helps


def test_max_split_size_by_hand() -> None:
    """A segment of 512 MiB that 1 MiB keeps whole: without the split that block needs 20 MiB elsewhere."""
    found = lever(report(segment(block(2 * MIB, "active_allocated"), block(510 * MIB))), "max_split_size")
    assert found.helps
    assert found.at_most_bytes == 492 * MIB
    assert "max_split_size_mb:512" in found.setting
    assert not lever(report(segment(block(500 * MIB, "active_allocated"), block(MIB))), "max_split_size").helps


def test_pages_are_counted_from_the_start_of_an_expandable_range() -> None:
    blocks = [block(19 * MIB), block(2 * MIB, "active_allocated"), block(19 * MIB), block(60 * MIB)]
    (parsed,) = parse_snapshot([segment(*blocks, is_expandable=True)]).segments
    assert releasable_bytes([parsed]) == 60 * MIB


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"a": 1}, "no segments"),
        (3, "not a list"),
        ([3], "segment 0 is of type int"),
        ([{"blocks": 3}], "blocks are of type int"),
        ([segment(block(-1))], "segment 0: its total_size is -1"),
        ([segment(block(8), total_size=4)], "hold more than"),
        ([segment({"size": True, "state": "inactive"}, total_size=4)], "its size is True"),
        ([segment({"size": 2, "state": 3}, total_size=4)], "its state is of type int"),
        ([segment(block(8), segment_pool_id=(1, 2, 3))], "not a pair"),
        ([segment(block(8), stream=1.5)], "stream is of type float"),
        ([segment(block(8), total_size=2**63)], "not a number of bytes"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_place(raw: Any, text: str) -> None:
    with pytest.raises(SnapshotError, match=text):
        parse_snapshot(raw)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"\x1f\x8b\x08", "archive"),
        (b"PK\x03\x04", "archive"),
        (b"hello", "neither a pickle nor JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"segments": NaN}', "no number"),
        (b"\x80\x04cos\nsystem\n.", r"os\.system"),
        (b'{"segments": [1' + b"0" * 5000 + b"]}", "not JSON"),
    ],
)
def test_files_that_are_no_snapshot(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=text) as caught:
        read_snapshot(path)
    assert str(path) in str(caught.value)


def test_segments_that_overlap_are_said_to() -> None:
    def warned(*places: tuple[int, int]) -> list[str]:
        raw = [segment(block(MIB), address=address, device=device) for device, address in places]
        return [one for one in analyze_snapshot(parse_snapshot(raw)).warnings if "begin within another" in one]

    assert warned((0, 0), (0, MIB), (1, 0)) == []
    assert "1 segments begin" in warned((0, MIB), (0, 0), (0, MIB // 2 + MIB))[0]
    assert "2 segments begin" in warned((0, 0), (0, 0), (0, MIB - 1))[0]


def test_nothing_allocated_is_no_fragmentation() -> None:
    found = analyze_snapshot(parse_snapshot([]))
    assert found.total.fragmentation_rate is None
    assert found.pools == ()
    assert not any(one.helps for one in found.advice)


@pytest.mark.parametrize(
    ("segments", "blocks", "text"), [(200_001, 1, "200,001 segments"), (2000, 1000, "2,000,000 b")]
)
def test_a_segment_named_again_and_again_is_not_read_each_time(segments: int, blocks: int, text: str) -> None:
    one = segment(*[block(MIB)] * blocks)
    with pytest.raises(SnapshotError, match=text):
        parse_snapshot([one] * segments)
    assert len(parse_snapshot([one] * 3).segments) == 3


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, target: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(SnapshotError, match="no regular file"):
        read_snapshot(tmp_path / target)
