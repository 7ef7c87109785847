"""The writer where things go wrong: what is lost is the interval, and it is counted."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.history import writer as writing
from agent.history.entries import Frame, Sample
from agent.history.families import history_families
from agent.history.tiers import SAMPLE_TIERS

POOL = "engine.dp0.tp0.pp0.kv"
MakePast = Callable[..., Any]


def add(past: Any, seconds: int = 5) -> None:
    for _ in range(seconds):
        past.history.append(POOL, past.after(1), {"used": past.now})
    past.write()


def kept(past: Any) -> int:
    rows = past.reader.rows(POOL, "used", SAMPLE_TIERS[0], 0, past.now + 1)
    return 0 if rows is None else rows.starts.size


@pytest.mark.parametrize("damage", ["garbage", "middle"])
def test_a_damaged_file_is_set_aside(damage: str, make_past: MakePast) -> None:
    past = make_past()
    add(past, 400)
    past.end()
    content = bytearray(past.writer.path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[slice(0, 4096) if damage == "garbage" else slice(4096, middle)] = b"\x55" * (
        4096 if damage == "garbage" else middle - 4096
    )
    past.writer.path.write_bytes(content)

    again = make_past(start_unix=past.now + 1)
    # A question never fails for the file: memory alone answers where that cannot.
    again.history.append(POOL, again.now, {"used": 1.0})
    assert 1.0 in [one.mean for one in again.history.query(POOL, "used", again.now - 600, again.now + 1, 1)]
    for _ in range(4):
        add(again)
        again.after(writing.MEND_SECONDS)
    assert again.writer.trouble is None
    assert kept(again) >= 10
    aside = again.writer.path.with_name("history.sqlite.aside")
    assert aside.exists()


def test_a_full_disk_costs_the_interval(make_past: MakePast) -> None:
    past = make_past()
    add(past)
    before = kept(past)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # each write beyond that fails, as on a full disk
    try:
        rng = np.random.default_rng(1)
        past.writer.put(Frame(POOL, past.after(1), "a", 2, rng.integers(0, 5, 100_000).astype(np.uint8)))
        add(past)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert past.writer.trouble
    assert past.writer.lost()["disk"] == 6
    families = {one.name: one.samples for one in history_families(past.writer, "kvatlas_")}
    assert families["kvatlas_history_up"][0].value == 0
    past.after(2)
    add(past)
    assert past.writer.trouble is None
    assert kept(past) == before + 5
    assert past.reader.frame_at(POOL, past.now) is None


def test_a_folder_that_cannot_be_made_is_said_and_tried_again(tmp_path: Path, make_past: MakePast) -> None:
    place = tmp_path / "occupied"
    place.write_text("a file")
    past = make_past(place)
    add(past)
    assert "cannot be written" in past.writer.trouble
    place.unlink()
    past.after(writing.MEND_SECONDS + 1)
    add(past)
    assert past.writer.trouble is None
    assert kept(past) == 10  # what waited in the queue is not lost


def test_a_file_that_is_removed_is_begun_anew(make_past: MakePast) -> None:
    past = make_past()
    add(past)
    for file in past.writer.path.parent.glob("history.sqlite*"):
        file.unlink()
    add(past)
    add(past)
    assert past.writer.trouble is None
    assert kept(past) == 5
    assert past.writer.lost()["disk"] == 5


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_what_lies_beside_the_file_is_missed_too(make_past: MakePast, suffix: str) -> None:
    """The last writes are in it: without a name they would be gone with the agent, and nobody could read them."""
    past = make_past()
    add(past)
    past.writer.path.with_name(past.writer.path.name + suffix).unlink()
    add(past)
    add(past)
    assert past.writer.trouble is None
    assert past.writer.lost()["disk"] == 5
    assert kept(past) >= 5
    past.end()
    assert kept(past) >= 5


def test_two_agents_do_not_write_one_file(make_past: MakePast) -> None:
    first, second = make_past(), make_past()
    add(first)
    add(second)
    assert "in use by another process" in second.writer.trouble
    assert kept(first) == 5
    first.end()
    second.after(writing.MEND_SECONDS + 1)
    add(second)
    assert second.writer.trouble is None


def test_nobody_waits_for_a_disk_that_hangs(make_past: MakePast, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue takes so much and no more; what is dropped is counted, and what was taken is written in the end."""
    monkeypatch.setattr(writing, "MAX_ENTRIES", 100)
    past = make_past()
    add(past)
    database = past.writer._database
    written, release = database.write, threading.Event()
    hanging = threading.Event()

    def hang(entries: Any) -> Any:
        hanging.set()
        assert release.wait(120)
        return written(entries)

    database.write = hang
    past.writer.put(Sample(POOL, past.after(1), {"used": 1.0}))
    # SQLite's objects belong to one thread: the one that hangs is this one, and another one goes on to sample.
    outcomes: list[bool] = []

    def sample() -> None:
        assert hanging.wait(120)
        outcomes.extend(past.writer.put(Sample(POOL, past.after(1), {"used": 1.0})) for _ in range(150))
        release.set()

    other = threading.Thread(target=sample)
    other.start()
    past.write()
    other.join()
    database.write = written
    assert outcomes == [True] * 100 + [False] * 50
    assert past.writer.lost() == {"queue": 50, "disk": 0}
    past.write()
    assert kept(past) == 5 + 1 + 100


def test_frames_that_wait_are_bounded_in_bytes(make_past: MakePast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_BYTES", 500_000)
    past = make_past()
    states = np.zeros(100_000, np.uint8)
    assert [past.writer.put(Frame(POOL, past.after(1), "a", 2, states)) for _ in range(6)] == [True] * 4 + [False] * 2
    assert past.writer.put(Sample(POOL, past.now, {}))


@pytest.mark.parametrize("begun", [False, True])
def test_before_anything_is_written_there_is_nothing_to_read(begun: bool, make_past: MakePast) -> None:
    past = make_past()
    if begun:
        past.writer.path.parent.mkdir()
        past.writer.path.touch()
    reader = past.reader
    assert (reader.pools(), reader.marks(POOL, 0, 1e10), reader.lines(5)) == ((), (), ())
    assert (reader.frame_at(POOL, past.now), reader.frame_range(POOL)) == (None, None)
    assert past.writer.path.exists() == begun  # a question makes no file


def test_files_are_for_their_owner_alone(make_past: MakePast) -> None:
    past = make_past()
    add(past)
    folder = past.writer.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {os.stat(one).st_mode & 0o777 for one in folder.iterdir()} == {0o600}
