"""The size that is kept, whatever fills it: marks and lines make room as frames and samples do, and none of these
pushes all others out."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from agent.history.database import HistoryDatabase
from agent.history.entries import Frame, Line, Mark, Sample
from agent.history.tiers import DAY
from alerts.database import DatabaseUnusable, Fault
from tests.agent.history.test_writer import POOL, MakePast, kept

MIB = 2**20
MOST_MIB = 32


def long_mark(at: float, number: int) -> Mark:
    return Mark(at, POOL, "decision", f"{number:06}" + "x" * 4994)


def long_line(at: float, number: int) -> Line:
    return Line(f"{number:06}" + "x" * 3994)


def size_on_disk(past: Any) -> int:
    return sum(one.stat().st_size for one in past.writer.path.parent.iterdir())


def frame(past: Any, number: int) -> Frame:
    """Noise, 50 KiB in each tier that takes it."""
    return Frame(POOL, past.now, "a", number, np.random.default_rng(number).integers(0, 16, 100_000).astype(np.uint8))


def add_second(past: Any, number: int) -> None:
    past.writer.put(Sample(POOL, past.after(1), {"used": float(number)}))
    past.writer.put(frame(past, number))


def rows_of(past: Any, table: str) -> int:
    query = f"SELECT count(*) FROM {table}"  # noqa: S608 - a name of ours
    return int(past.writer._database._connection.execute(query).fetchone()[0])


@pytest.mark.parametrize("text", [long_mark, long_line])
def test_texts_keep_a_share_and_push_nothing_else_out(text: Callable[[float, int], Any], make_past: MakePast) -> None:
    """Thirty MiB of them within the minutes in which nothing is dropped for its age."""
    past = make_past(max_mib=MOST_MIB)
    biggest = 0
    for second in range(60):
        add_second(past, second)
        for number in range(100):
            past.writer.put(text(past.now, 100 * second + number))
        past.write()
        biggest = max(biggest, size_on_disk(past))
    assert past.writer.lost() == {"queue": 0, "disk": 0}
    assert past.writer.trouble is None
    assert biggest <= MOST_MIB * MIB
    assert kept(past) == 60
    assert past.reader.frame_range(POOL) == (past.now - 59, past.now)  # 60 frames are 4 MiB, and all there
    table, found = ("lines", past.reader.lines(1)) if text is long_line else ("marks", past.reader.marks(POOL, 0, 1e10))
    assert "005999" in str(found[-1])[:300]
    assert 300 < rows_of(past, table) < 3600  # the newest of them


def test_frames_leave_texts_their_share(make_past: MakePast) -> None:
    past = make_past(max_mib=MOST_MIB)
    for number in range(300):
        past.writer.put(long_mark(past.now, number))
        past.writer.put(long_line(past.now, number))
    for second in range(500):
        add_second(past, second)
        if second % 10 == 0:
            past.write()
    past.write()
    oldest = past.reader.frame_range(POOL)[0]
    assert oldest > past.now - 499  # frames had to make room
    assert (rows_of(past, "marks"), rows_of(past, "lines")) == (300, 300)


def test_a_history_full_of_marks_goes_on(make_past: MakePast) -> None:
    """As an agent left it that dropped none, or had a higher limit."""
    past = make_past(max_mib=MOST_MIB)
    add_second(past, 0)
    past.write()
    past.end()
    with closing(sqlite3.connect(past.writer.path)) as connection:
        connection.executemany(
            "INSERT INTO marks (time_ms, pool, kind, text, detail) VALUES (?, ?, 'decision', ?, '{}')",
            [(round(past.now * 1000), POOL, "x" * 5000) for _ in range(6000)],
        )
        connection.commit()
    again = make_past(max_mib=MOST_MIB, start_unix=past.now + 1)
    for second in range(1, 6):
        add_second(again, second)
        again.write()
    assert again.writer.trouble is None
    assert again.writer.lost() == {"queue": 0, "disk": 0}
    assert kept(again) == 6
    assert again.reader.frame_range(POOL)[1] == again.now
    assert 0 < rows_of(again, "marks") < 6000


def test_what_is_old_goes_also_where_nothing_can_be_written(
    make_past: MakePast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is full of what is too old would stay so for good."""
    past = make_past()
    for number in range(3):
        past.writer.put(Mark(past.after(1), POOL, "decision", str(number)))
    past.write()

    def full(*_: object) -> tuple[str, ...]:
        raise DatabaseUnusable(Fault.UNWRITABLE, "database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(HistoryDatabase, "write", full)
        for _ in range(2):
            past.after(31 * DAY)
            past.writer.put(Line("a line"))
            past.write()
        assert "is full" in past.writer.trouble
    assert past.writer.lost()["disk"] == 2
    assert past.reader.marks(POOL, 0, past.now) == ()
