"""What cannot be kept, since SQLite has no such number or text, costs itself alone: neither another pool nor the next
second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent.history import database
from agent.history import writer as writing
from agent.history.database import LARGEST
from agent.history.entries import Frame, Line, Mark, Sample
from agent.history.tiers import SAMPLE_TIERS
from alerts.database import DatabaseUnusable
from tests.agent.history.test_writer import POOL, MakePast, add, kept


def states() -> Any:
    return np.zeros(100, np.uint8)


def test_a_wild_number_of_one_map_costs_nobody_the_history(make_past: MakePast) -> None:
    """A damaged map's publish sequence; SQLite's integers have a sign."""
    past = make_past()
    for _ in range(3):
        past.writer.put(Frame("wild", past.after(1), "a", 2**64 - 2, states()))
        past.writer.put(Frame(POOL, past.now, "a", 2, states()))
        add(past, 1)
    assert past.writer.lost() == {"queue": 0, "disk": 0}
    assert past.writer.trouble is None
    assert kept(past) == 3
    for pool, sequence in (("wild", LARGEST), (POOL, 2)):
        frame = past.reader.frame_at(pool, past.now)
        assert (frame.time_unix, frame.sequence) == (past.now - 1, sequence)


@pytest.mark.parametrize(
    "unfit",
    [
        lambda at: Frame("half \ud800", at, "a", 2, states()),
        lambda at: Frame("late", 1e300, "a", 2, states()),
        lambda at: Sample("half \ud800", at, {"used": 1.0}),
        lambda at: Sample("late", 1e300, {"used": 1.0}),
        lambda at: Sample("no time", float("nan"), {"used": 1.0}),
        lambda at: Mark(at, POOL, "alert", "half \ud800"),
        lambda at: Mark(at, POOL, "alert", "", {"no JSON": object()}),
        lambda at: Mark(1e300, POOL, "alert", ""),
        lambda at: Line("half \ud800"),
    ],
)
def test_an_entry_that_no_disk_takes_costs_itself_alone(unfit: Callable[[float], Any], make_past: MakePast) -> None:
    past = make_past()
    for second in range(1, 4):
        past.writer.put(unfit(past.after(1)))
        past.writer.put(Frame(POOL, past.now, "a", 2, states()))
        add(past, 1)
        assert past.writer.lost() == {"queue": 0, "disk": second}
        assert past.writer.trouble is None
    assert kept(past) == 3
    assert past.reader.frame_times(POOL, 0, past.now).size == 3


def test_a_number_that_no_record_holds_is_no_sample(make_past: MakePast) -> None:
    past = make_past()
    for value in (1e39, 10**400, float("inf"), float("nan")):
        past.writer.put(Sample(POOL, past.after(1), {"used": value, "free": 5.0}))
    past.write()
    rows = past.reader.rows(POOL, "used", SAMPLE_TIERS[0], 0, past.now + 1)
    assert rows.records["count"].tolist() == [0] * 4
    rows = past.reader.rows(POOL, "free", SAMPLE_TIERS[0], 0, past.now + 1)
    assert rows.records["mean"].tolist() == [5.0] * 4


def test_whatever_a_write_raises_the_next_one_begins_anew(make_past: MakePast, monkeypatch: pytest.MonkeyPatch) -> None:
    past = make_past()
    add(past)

    def fail(*_: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(database, "encode_frame", fail)
        past.writer.put(Frame(POOL, past.after(1), "a", 2, states()))
        add(past)
    assert past.writer.lost()["disk"] == 6
    past.after(writing.MEND_SECONDS)
    add(past)
    assert past.writer.trouble is None
    assert kept(past) == 10


@pytest.mark.parametrize(
    "damage",
    ["UPDATE frames SET id = 9223372036854775807 WHERE id = 1", "UPDATE pools SET name = CAST(x'6bff' AS TEXT)"],
)
def test_one_byte_of_the_file_does_not_end_the_history(damage: str, make_past: MakePast) -> None:
    """After the first, every frame would have a number that SQLite does not know; the second could not be read."""
    past = make_past()
    past.writer.put(Frame(POOL, past.after(1), "a", 2, states()))
    past.write()
    past.writer._database._connection.execute(damage)
    past.end()
    again = make_past(start_unix=past.now + 1)
    for _ in range(2):
        again.writer.put(Frame(POOL, again.after(writing.MEND_SECONDS), "a", 4, states()))
        again.write()
    assert again.writer.trouble is None
    assert again.reader.frame_at(POOL, again.now).sequence == 4
    assert again.writer.path.with_name("history.sqlite.aside").exists()


def test_a_range_that_is_too_far_for_sqlite_is_answered(make_past: MakePast) -> None:
    past = make_past()
    add(past)
    past.history.drop(POOL)
    buckets = past.history.query(POOL, "used", 0.0, 1e21, 1e20)
    assert [one.mean is not None for one in buckets] == [True] + [False] * 9


def test_a_damaged_row_costs_itself_alone_or_is_said(make_past: MakePast) -> None:
    past = make_past()
    for text in ("first", "second"):
        past.writer.put(Mark(past.after(1), POOL, "engine", text))
    add(past, 3)
    run = past.writer._database._connection.execute
    run("UPDATE marks SET detail = '{\"a' WHERE text = 'first'")
    assert [one.text for one in past.reader.marks(POOL, 0, 1e10)] == ["second"]
    run("UPDATE samples SET summary = 7")
    with pytest.raises(DatabaseUnusable, match="a row of it cannot be read"):
        past.reader.rows(POOL, "used", SAMPLE_TIERS[0], 0, 1e10)
