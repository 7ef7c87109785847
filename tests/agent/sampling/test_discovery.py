"""Finding maps by name and magic, and leaving everything else alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.sampling.discovery import MAX_NAMED, name_some, printable, scan

Start = Callable[..., Any]


def test_maps_are_found_by_suffix_and_magic(folder: Path, start_engine: Start) -> None:
    engine = start_engine()
    size = engine.path.stat().st_size
    foreign = {
        "same_size": b"\0" * size,
        "same_size.kvmap": b"\0" * size,
        "short.kvmap": b"KV",
        "empty.kvmap": b"",
        "text.txt": b"KVATLAS\0",
    }
    for name, content in foreign.items():
        (folder / name).write_bytes(content)
    before = {name: (folder / name).stat() for name in foreign}

    found = scan([folder])

    assert [one.id for one in found.maps] == [engine.id]
    assert found.maps[0].path == engine.path
    named = [line.split(": ")[0] for line in found.unreadable]
    assert named == [str(folder / name) for name in ("empty.kvmap", "same_size.kvmap", "short.kvmap")]
    assert all("wrong magic" in line for line in found.unreadable)
    for name, content in foreign.items():
        assert (folder / name).read_bytes() == content
        assert (folder / name).stat().st_mtime_ns == before[name].st_mtime_ns


def test_folders_that_are_missing_or_no_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = scan([tmp_path / "missing", file])
    assert found.maps == ()
    assert found.unreadable == (f"{file}: Not a directory",)


def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "a.kvmap").touch()
    closed.chmod(0)
    if os.geteuid() == 0:  # root may read everything, so look with somebody else's eyes
        os.seteuid(65_534)
        try:
            found = scan([closed])
        finally:
            os.seteuid(0)
    else:
        found = scan([closed])
    assert found.unreadable == (f"{closed}: Permission denied",)


def test_a_pipe_with_the_suffix_does_not_hold_the_scan_up(folder: Path) -> None:
    os.mkfifo(folder / "pipe.kvmap")
    assert scan([folder]).maps == ()


def test_a_folder_with_the_suffix_is_named(folder: Path) -> None:
    (folder / "folder.kvmap").mkdir()
    assert scan([folder]).unreadable == (f"{folder / 'folder.kvmap'}: Is a directory",)


def test_known_files_are_not_opened_again(folder: Path) -> None:
    path = folder / "a.kvmap"
    path.write_bytes(b"nothing")
    status = path.stat()
    assert scan([folder]).maps == ()
    assert [one.path for one in scan([folder], frozenset({(status.st_dev, status.st_ino)})).maps] == [path]


def test_the_number_of_maps_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.sampling.discovery.MAX_MAPS", 2)
    for name in "abc":
        (folder / f"{name}.kvmap").write_bytes(b"KVATLAS\0")
    found = scan([folder])
    assert [one.id for one in found.maps] == ["a", "b"]
    assert "left out" in found.unreadable[0]


def test_a_flood_of_foreign_files_is_counted(folder: Path) -> None:
    for index in range(MAX_NAMED + 5):
        (folder / f"foreign{index:03}.kvmap").write_bytes(b"x")
    found = scan([folder])
    assert (len(found.unreadable), found.more) == (MAX_NAMED, 5)
    assert name_some(found.unreadable, found.more)[MAX_NAMED:] == ("and 5 more that cannot be read",)
    assert name_some(["a", *found.unreadable], found.more)[MAX_NAMED:] == ("and 6 more that cannot be read",)
    assert name_some(["a", "b"]) == ("a", "b")


def test_links_are_not_followed(tmp_path: Path, folder: Path, start_engine: Start) -> None:
    engine = start_engine(tmp_path)
    (folder / "link.kvmap").symlink_to(engine.path)
    (folder / "zero.kvmap").symlink_to("/dev/zero")
    found = scan([folder])
    assert found.maps == ()
    assert len(found.unreadable) == 2
    assert all("a symbolic link" in line for line in found.unreadable)


def test_names_that_are_not_utf_8_are_told_as_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / os.fsdecode(b"a\xfe.kvmap")).write_bytes(b"KVATLAS\0")
    (folder / os.fsdecode(b"b\xfd.kvmap")).write_bytes(b"x")
    found = scan([folder])
    assert [one.id for one in found.maps] == ["a\\xfe"]
    assert found.maps[0].path.exists()
    assert found.unreadable == (f"{tmp_path}/\\xff/b\\xfd.kvmap: not an allocation map (wrong magic)",)
    assert printable("plain \u00e4 \ud800") == "plain \u00e4 \\ud800"
