"""What the store keeps over restarts, and that no trouble with its file stops an alert."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from alerts.grouping import compose
from alerts.model import Change, ChangeKind
from alerts.mutes import Mute
from alerts.store import Store
from tests.alerts.conftest import START, TurnedClock, fired, make_alert, resolved

OpenStore = Callable[..., Store]
HOLD = """
import sys
from pathlib import Path
from alerts.store import Store
store = Store(Path(sys.argv[1]), ["slack"])
print(store.durable, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def waits() -> list[float]:
    """What a store slept for."""
    return []


@pytest.fixture
def open_store(path: Path, clock: TurnedClock, waits: list[float]) -> Iterator[OpenStore]:
    stores: list[Store] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        clock.turn(seconds)

    def start(where: Path | None = path, *sinks: str) -> Store:
        store = Store(where, sinks or ("slack", "webhook"), clock=clock, pause=pause)
        stores.append(store)
        return store

    yield start
    for store in stores:
        store.close()


def told(store: Store, clock: TurnedClock, sink: str = "slack") -> None:
    """Deliver everything that waits."""
    backlog = store.backlog(sink)
    notice = compose(backlog.waiting, backlog.told, at=clock.wall(), counted=backlog.counted)
    store.begin(sink, notice)
    store.finish(sink, notice, group_seconds=60.0)


def sequences(store: Store, sink: str = "slack") -> list[int]:
    return [one.change.sequence for one in store.backlog(sink).waiting]


def test_states_and_changes_outlive_it_together(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    store = open_store()
    alert = make_alert()
    recorded = store.commit({"a": "1", "b": "2"}, [fired(alert), fired(make_alert("b"))])
    assert [change.sequence for change in recorded] == [1, 2]
    assert [change.sequence for change in store.commit({"b": None}, [resolved(make_alert("b"))])] == [3]
    told(store, clock)
    mute = Mute(id="m", rule=None, engine="a", author="ada", comment="", created_at=START, expires_at=START + 60)
    store.add_mute(mute)
    store.close()
    again = open_store()
    assert again.load_states() == {"a": "1"}
    assert sequences(again) == []
    assert sequences(again, "webhook") == [1, 2, 3]
    assert again.backlog("webhook").waiting[0].change == replace(recorded[0], alert=alert)
    assert again.backlog("slack").told == {alert.fingerprint: alert}
    assert again.mutes() == (mute,)
    assert again.commit({}, [resolved(alert)])[0].sequence == 4
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_a_mute_is_gone_when_it_expires(open_store: OpenStore, clock: TurnedClock) -> None:
    store = open_store()
    for number in (30, 10):
        store.add_mute(
            Mute(
                id=f"m{number}",
                rule="r",
                engine=None,
                author="ada",
                comment="",
                created_at=START,
                expires_at=START + number,
            )
        )
    assert [mute.id for mute in store.mutes()] == ["m10", "m30"]
    clock.turn(10)
    assert [mute.id for mute in store.mutes()] == ["m30"]
    assert store.remove_mute("m30")
    assert not store.remove_mute("m30")
    store.close()
    assert open_store().mutes() == ()


@pytest.mark.parametrize("ahead", [3600.0, 400 * 86_400.0])
def test_a_clock_that_is_ahead_for_a_moment_takes_no_mute(
    open_store: OpenStore, clock: TurnedClock, ahead: float
) -> None:
    store = open_store()
    mute = Mute(id="m", rule="r", engine=None, author="ada", comment="", created_at=START, expires_at=START + 600)
    store.add_mute(mute)
    for _ in range(3):
        clock.turn(1.0)
        clock.set_wall(clock.wall() + ahead)
        assert store.mutes() == ()
        clock.set_wall(clock.wall() - ahead)
        assert store.mutes() == (mute,)
    store.close()
    assert open_store().mutes() == (mute,)


def test_a_mute_that_expired_long_ago_leaves_the_file(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    """By a clock that goes evenly: what is kept is bounded."""
    store = open_store()
    mute = Mute(id="m", rule="r", engine=None, author="ada", comment="", created_at=START, expires_at=START + 600)
    store.add_mute(mute)
    for seconds in (600.0, 86_401.0, 1.0, 600.0):
        clock.turn(seconds)
        assert store.mutes() == ()
    assert not store.remove_mute("m")
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM mutes").fetchone() == (0,)


def test_an_expired_mute_cannot_be_ended(open_store: OpenStore, clock: TurnedClock) -> None:
    store = open_store()
    store.add_mute(
        Mute(id="m", rule="r", engine=None, author="ada", comment="", created_at=START, expires_at=START + 600)
    )
    clock.turn(600.0)
    assert not store.remove_mute("m")


def test_a_message_in_flight_at_the_end_is_told_again_and_counted(open_store: OpenStore, clock: TurnedClock) -> None:
    store = open_store()
    store.commit({}, [fired(make_alert())])
    backlog = store.backlog("slack")
    store.begin("slack", compose(backlog.waiting, backlog.told, at=clock.wall()))
    store.close()
    again = open_store()
    assert sequences(again) == [1]
    assert again.tally.read()["slack", "unsure"] == 1
    assert again.tally.read()["webhook", "unsure"] == 0


@pytest.mark.parametrize("spoil", ["text", "middle", "empty page"])
def test_a_damaged_file_is_set_aside(
    open_store: OpenStore, path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = open_store()
    store.commit({"a": "1"}, [fired(make_alert(f"e{number}")) for number in range(200)])
    store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(0 if spoil == "text" else 4096 * 3)
        file.write(b"not a database " * 300 if spoil != "empty page" else bytes(size - 4096 * 3))
    again = open_store()
    assert again.durable
    assert again.load_states() == {}
    again.commit({"b": "2"}, [fired(make_alert())])
    assert path.with_name("alerts.sqlite.aside").exists()
    assert [record.message for record in caplog.records] == [
        "alert_store_in_memory_alone",
        "alert_store_set_aside",
        "alert_store_written_again",
    ]
    again.close()
    assert open_store().load_states() == {"b": "2"}


def test_a_place_that_cannot_be_written_leaves_memory_alone(
    open_store: OpenStore, tmp_path: Path, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    where = tmp_path / "file" / "alerts.sqlite"
    store = open_store(where)
    for number in range(3):
        store.commit({"a": str(number)}, [fired(make_alert(f"e{number}"))])
    assert not store.durable
    assert store.load_states() == {"a": "2"}
    assert sequences(store) == [1, 2, 3]
    assert store.tally.read()["slack", "not_kept"] == 3
    assert [record.message for record in caplog.records] == ["alert_store_in_memory_alone"]
    (tmp_path / "file").unlink()
    clock.turn(31)
    store.commit({"b": "1"}, [])
    assert store.durable
    store.close()
    assert open_store(where).load_states() == {"a": "2", "b": "1"}


def test_a_full_disk_is_bridged_in_memory(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    store = open_store()
    store.commit({"a": "1"}, [fired(make_alert("a"))])
    assert store._database is not None
    store._database._connection.execute("PRAGMA max_page_count = 1")  # as full as a disk can be
    store.commit({"b": "x" * 20_000}, [fired(make_alert(f"e{number}")) for number in range(50)])
    assert not store.durable
    assert len(store.backlog("slack").waiting) == 51
    told(store, clock)
    clock.turn(31)
    store.commit({"c": "3"}, [])
    assert store.durable
    store.close()
    again = open_store()
    assert set(again.load_states()) == {"a", "b", "c"}
    assert sequences(again) == []
    assert len(again.backlog("slack").told) == 51
    assert len(sequences(again, "webhook")) == 51


def test_a_full_disk_keeps_nobody_from_reading(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    store.commit({"a": "1"}, [fired(make_alert())])
    store.close()
    before = path.read_bytes()
    assert open_store().load_states() == {"a": "1"}
    assert path.read_bytes() == before


def test_a_file_that_was_removed_is_written_again(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    store.commit({"a": "1"}, [fired(make_alert())])
    path.unlink()
    store.commit({"b": "2"}, [])
    assert store.durable
    store.close()
    again = open_store()
    assert again.load_states() == {"a": "1", "b": "2"}
    assert sequences(again) == [1]


def test_a_wal_that_was_removed_is_written_again(open_store: OpenStore, path: Path, tmp_path: Path) -> None:
    """What an agent that is killed then leaves on the disk."""
    store = open_store()
    store.commit({"a": "1"}, [fired(make_alert())])
    path.with_name(path.name + "-wal").unlink()
    store.commit({"b": "2"}, [])
    assert store.durable
    left = tmp_path / "left" / path.name
    left.parent.mkdir()
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, left.parent)
    with closing(sqlite3.connect(left)) as connection:
        assert dict(connection.execute("SELECT fingerprint, state FROM states")) == {"a": "1", "b": "2"}


def test_a_file_of_a_newer_version_is_left_alone(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    open_store().close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    store = open_store()
    store.commit({"a": "1"}, [])
    clock.turn(1000)
    store.commit({"a": "2"}, [])
    assert not store.durable
    assert "newer" in (store.trouble or "")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM states").fetchone() == (0,)


def test_a_file_of_another_program_is_left_alone(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE samples (at REAL)")
        other.commit()
    before = path.read_bytes()
    store = open_store()
    assert "another program's; name another file" in (store.trouble or "")
    clock.turn(3600.0)
    store.commit({"a": "{}"}, [fired(make_alert())])
    store.close()
    with closing(sqlite3.connect(path)) as other:
        assert [name for (name,) in other.execute("SELECT name FROM sqlite_master")] == ["samples"]
    assert path.read_bytes() == before


def test_two_agents_do_not_share_a_file(
    open_store: OpenStore, path: Path, waits: list[float], clock: TurnedClock, repository_root: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository_root,
        env={**os.environ, "PYTHONPATH": str(repository_root)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    second = open_store()
    assert sum(waits) >= 4.9
    assert not second.durable
    second.commit({"mine": "1"}, [fired(make_alert())])
    assert sequences(second) == [1]
    holder.kill()
    holder.wait()
    clock.turn(1000)
    second.commit({"mine": "2"}, [])  # what the other left there is not ours to write over
    assert not second.durable
    third = open_store()
    assert third.durable
    assert third.load_states() == {}


def test_a_file_is_free_once_who_held_it_has_ended(open_store: OpenStore, path: Path, clock: TurnedClock) -> None:
    first = open_store()
    first.commit({"a": "1"}, [])

    def end_the_first(seconds: float) -> None:
        clock.turn(seconds)
        first.close()

    second = Store(path, ["slack"], clock=clock, pause=end_the_first)
    assert second.durable
    assert second.load_states() == {"a": "1"}
    second.close()


@pytest.mark.parametrize("by", [-86_400.0, 86_400.0])
def test_a_clock_that_was_set_neither_holds_alerts_back_nor_hurries(
    open_store: OpenStore, clock: TurnedClock, by: float
) -> None:
    store = open_store()
    store.commit({}, [fired(make_alert())])
    told(store, clock)
    store.commit({}, [fired(make_alert("b"))])
    store.postpone("slack", 30.0)
    store.close()
    clock.set_wall(clock.wall() + by)
    backlog = open_store().backlog("slack")
    now = clock.monotonic()
    assert all(one.since <= now for one in backlog.waiting)
    assert all(mark.at <= now for mark in backlog.marks.values())
    assert backlog.not_before <= now + 4000.0
    assert backlog.sent_at is not None
    assert backlog.sent_at <= now


def test_rows_that_cannot_be_read_are_left_out(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    store.commit({}, [fired(make_alert("a")), fired(make_alert("b"))])
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE waiting SET change = '{}' WHERE sequence = 1")
        connection.execute("UPDATE standing SET standing = 'no'")
        connection.execute("INSERT INTO told VALUES ('slack', 'x', '[]')")
        connection.execute("INSERT INTO mutes VALUES ('x', '{\"id\": 1}')")
        connection.commit()
    again = open_store()
    assert sequences(again) == [2]
    assert again.tally.read()["slack", "dropped"] == 1
    again.close()
    assert open_store().tally.read()["slack", "dropped"] == 0


def test_a_text_that_cannot_be_written_stops_nothing(open_store: OpenStore) -> None:
    store = open_store()
    store.commit({"lone \ud800": "1"}, [fired(make_alert())])
    assert sequences(store) == [1]
    assert not store.durable


def test_a_sink_that_is_gone_is_forgotten(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    store.commit({}, [fired(make_alert())])
    store.close()
    again = open_store(path, "slack")
    assert again.tally.read()["webhook", "dropped"] == 1
    assert sequences(again) == [1]
    again.close()
    assert sequences(open_store(), "webhook") == []


def test_a_change_on_its_way_is_superseded_by_a_later_one(open_store: OpenStore) -> None:
    store = open_store()
    alert = make_alert()
    store.commit({}, [fired(alert)])
    store.commit({}, [Change(0, ChangeKind.REPEATED, alert, START)])
    assert sequences(store) == [1]
    store.commit({}, [Change(0, ChangeKind.ESCALATED, alert, START)])
    assert sequences(store) == [1, 3]
    store.commit({}, [resolved(alert)])
    assert sequences(store) == [1, 4]
    assert store.tally.read()["slack", "coalesced"] == 2
    store.close()
    assert sequences(open_store()) == [1, 4]
