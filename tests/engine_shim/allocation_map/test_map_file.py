"""Files that are no maps, or maps that lie: each is refused with the reason, and left alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim import MapReader, MapSpec, MapWriter
from engine_shim.errors import MapCorrupt, MapUnavailable, MapVersionError
from engine_shim.layout import HEADER, REGION, region_table_offset


def make_map(folder: Path, total_blocks: int, owner_slots: int, events_per_second: int) -> Path:
    """A map that its writer has left behind."""
    writer = MapWriter.create(
        MapSpec(
            engine_id="test",
            kind="reference",
            model="tiny",
            pool="kv",
            total_blocks=total_blocks,
            block_tokens=16,
            block_bytes=1024,
            dtype="float16",
            owner_slots=owner_slots,
            events_per_second=events_per_second,
        ),
        folder,
    )
    writer.close(keep=True)
    return writer.path


@pytest.fixture
def a_map(tmp_path: Path) -> Path:
    return make_map(tmp_path, total_blocks=5000, owner_slots=16, events_per_second=100)


def set_header(path: Path, **values: Any) -> None:
    raw = bytearray(path.read_bytes())
    header = np.frombuffer(raw, HEADER, 1)
    for name, value in values.items():
        header[name] = value
    path.write_bytes(raw)


def set_region(path: Path, region: str, /, **values: Any) -> None:
    raw = bytearray(path.read_bytes())
    count = int(np.frombuffer(raw, HEADER, 1)["region_count"][0])
    table = np.frombuffer(raw, REGION, count, region_table_offset())
    for field, value in values.items():
        table[field][table["name"] == region.encode()] = value
    path.write_bytes(raw)


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


CASES: list[tuple[str, Callable[[Path], object], type[Exception], str]] = [
    ("wrong magic", lambda p: set_header(p, magic=b"NOTAMAP"), MapCorrupt, "wrong magic"),
    ("empty", lambda p: p.write_bytes(b""), MapCorrupt, "wrong magic"),
    ("header cut", lambda p: cut(p, 100), MapCorrupt, "within its header"),
    ("cut", lambda p: cut(p, 5000), MapCorrupt, "cut short"),
    ("other byte order", lambda p: set_header(p, endian=0x04030201), MapCorrupt, "byte order"),
    ("newer major", lambda p: set_header(p, major=2), MapVersionError, "map version 2.0"),
    ("unknown incompat bit", lambda p: set_header(p, incompat=1 << 40), MapVersionError, "features 0x10000000000"),
    ("no blocks", lambda p: set_header(p, total_blocks=0), MapCorrupt, "0 blocks"),
    ("absurd blocks", lambda p: set_header(p, total_blocks=2**60), MapCorrupt, "cannot be"),
    ("fewer blocks than columns", lambda p: set_header(p, total_blocks=4999), MapCorrupt, "5000 items"),
    ("live part outside", lambda p: set_header(p, live_offset=2**31), MapCorrupt, "live part"),
    ("no regions", lambda p: set_header(p, region_count=0), MapCorrupt, "region table"),
    ("region table outside", lambda p: set_header(p, region_offset=2**31), MapCorrupt, "outside the file"),
    ("column outside", lambda p: set_region(p, "owner", offset=2**40), MapCorrupt, "'owner' lies outside"),
    ("column over the end", lambda p: set_region(p, "events", count=2**20), MapCorrupt, "'events' lies outside"),
    ("absurd table", lambda p: set_region(p, "groups", count=40_000_000), MapCorrupt, "'groups' has 40000000 items"),
    ("absurd block size", lambda p: set_header(p, block_tokens=2**31), MapCorrupt, "2147483648 tokens"),
    ("wrong item size", lambda p: set_region(p, "state", item_bytes=4), MapCorrupt, "'state' has"),
    ("state missing", lambda p: set_region(p, "state", name=b"other"), MapCorrupt, "missing"),
]


@pytest.mark.parametrize(("harm", "error", "text"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_file_that_is_no_good_map_is_refused(
    a_map: Path, harm: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    harm(a_map)
    before = a_map.read_bytes()
    with pytest.raises(error, match=text) as caught:
        MapReader(a_map)
    assert type(caught.value) is error
    assert str(a_map) in str(caught.value)
    assert a_map.read_bytes() == before


def test_what_a_later_minor_version_adds_is_passed_over(a_map: Path) -> None:
    set_header(a_map, minor=7, ro_compat=1 << 5)
    set_region(a_map, "position", name=b"novelty")
    snapshot = MapReader(a_map).read()
    assert snapshot.position is None
    assert snapshot.owner is not None


def test_a_map_cut_short_while_it_is_open_is_an_error_and_no_signal(a_map: Path) -> None:
    reader = MapReader(a_map)
    reader.read()
    cut(a_map, 4096)
    fresh = MapReader.__new__(MapReader)  # the same open file, nothing read yet
    fresh.__dict__.update(reader.__dict__)
    fresh._column_words = np.zeros_like(reader._column_words) + 2
    with pytest.raises(MapCorrupt, match="cut short"):
        fresh.read()


def test_missing_folders_links_and_pipes_are_not_opened(tmp_path: Path, a_map: Path) -> None:
    with pytest.raises(MapUnavailable, match="cannot be opened"):
        MapReader(tmp_path / "none.kvmap")
    link = tmp_path / "link.kvmap"
    link.symlink_to(a_map)
    with pytest.raises(MapUnavailable, match="cannot be opened"):
        MapReader(link)

    os.mkfifo(tmp_path / "pipe.kvmap")
    with pytest.raises(MapCorrupt, match="regular file"):
        MapReader(tmp_path / "pipe.kvmap")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_random_damage_to_the_head_of_a_map_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "damaged.kvmap"
    if not (whole := tmp_path / "whole").exists():
        make_map(tmp_path, total_blocks=50, owner_slots=4, events_per_second=1).rename(whole)
    raw = bytearray(whole.read_bytes())
    head = region_table_offset() + 14 * REGION.itemsize
    for place, value in data.draw(st.lists(st.tuples(st.integers(8, head - 1), st.integers(0, 255)), max_size=6)):
        raw[place] = value
    path.write_bytes(raw)
    try:
        reader = MapReader(path)
        reader.read(timeout_seconds=0)
        reader.events(0)
        reader.close()
    except (MapCorrupt, MapUnavailable):
        pass
