"""The audit log: whole lines that outlive kills, full disks and rotation, and the last entries in memory."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agent.compaction import audit
from agent.compaction.audit import MAX_ENTRY_BYTES, MIN_FILE_BYTES, SCHEMA, Asker, AuditEntry, AuditLog, read_entries
from agent.log import EventLog

ROOT = Path(__file__).resolve().parents[3]


def entry(number: int = 0, **changes: Any) -> AuditEntry:
    made = AuditEntry(
        time_unix=1_700_000_000.5 + number,
        asker=Asker(route="POST /v1/engines/{id}/compaction", access="token", address="127.0.0.1"),
        action="compact",
        engine="engine.dp0.tp0.pp0.kv",
        parameters={"target": 0.1, "max_moves": None},
        outcome="reached",
        reason=f"number {number}",
        seconds=1.5,
        result={"moved_blocks": number, "details": {"chunks": 3}},
    )
    return replace(made, **changes)


class Events(logging.Handler):
    """What the log said, event by event."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.getMessage(), record.__dict__["fields"]))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def open_log(events: Events) -> Iterator[Callable[..., AuditLog]]:
    """Opens audit logs that speak to `events`, and closes them."""
    logs: list[AuditLog] = []
    logger = logging.Logger("audit-under-test")
    logger.addHandler(events)

    def make(path: Path | None, **settings: Any) -> AuditLog:
        logs.append(AuditLog(path, EventLog(logger), **settings))
        return logs[-1]

    yield make
    for log in logs:
        log.close()


def numbers(path: Path) -> list[int]:
    """Which entries a file holds; every line of it must be whole."""
    lines = path.read_text().splitlines()
    return [int(json.loads(line)["reason"].split()[1]) for line in lines]


def test_a_line_says_who_what_and_what_came_of_it(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "state" / "audit.jsonl"
    assert open_log(path).record(entry(7))
    assert path.stat().st_mode & 0o777 == 0o640
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        "schema": SCHEMA,
        "time": "2023-11-14T22:13:27Z",
        "time_unix": 1_700_000_007.5,
        "asker": {
            "route": "POST /v1/engines/{id}/compaction",
            "access": "token",
            "uid": None,
            "pid": None,
            "address": "127.0.0.1",
        },
        "action": "compact",
        "engine": "engine.dp0.tp0.pp0.kv",
        "parameters": {"target": 0.1, "max_moves": None},
        "outcome": "reached",
        "reason": "number 7",
        "seconds": 1.5,
        "result": {"moved_blocks": 7, "details": {"chunks": 3}},
    }
    assert list(read_entries(path)) == [entry(7)]


def test_recent_is_newest_first_and_bounded(open_log: Callable[..., AuditLog]) -> None:
    log = open_log(None, ring_entries=10)
    for number in range(25):
        log.record(entry(number, engine=f"engine{number % 2}"))
    assert [one.result["moved_blocks"] for one in log.recent(3)] == [24, 23, 22]
    assert [one.result["moved_blocks"] for one in log.recent(3, engine="engine0")] == [24, 22, 20]
    assert len(log.recent(1000)) == 10
    assert log.recent(-1) == ()


def test_a_later_agent_remembers(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first = open_log(path)
    for number in range(5):
        first.record(entry(number))
    first.close()
    os.rename(path, path.with_name("audit.jsonl.1"))
    open_log(path).record(entry(5))
    assert open_log(path, ring_entries=4).recent() == tuple(entry(number) for number in (5, 4, 3, 2))


def test_rotation_bounds_the_files_and_keeps_the_newest(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path, max_file_bytes=MIN_FILE_BYTES, kept_files=2)
    for number in range(1000):
        assert log.record(entry(number))
    files = [path.with_name("audit.jsonl.2"), path.with_name("audit.jsonl.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= MIN_FILE_BYTES for file in files)
    kept = [number for file in files for number in numbers(file)]
    assert kept == list(range(kept[0], 1000))
    assert 0 < kept[0] < 900


def test_a_file_that_others_rotate_is_opened_anew(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.old"
    log = open_log(path)
    log.record(entry(0))
    os.rename(path, moved)
    log.record(entry(1))
    path.unlink()
    log.record(entry(2))
    assert (numbers(moved), numbers(path)) == ([0], [2])


def test_a_full_disk_costs_one_warning_and_no_entry(open_log: Callable[..., AuditLog], events: Events) -> None:
    """/dev/full answers every write as a full disk does."""
    log = open_log(Path("/dev/full"))
    assert [log.record(entry(number)) for number in range(20)] == [False] * 20
    assert [event for event, _ in events.said] == ["audit_log_not_written"]
    assert "No space left" in events.said[0][1]["reason"]
    assert len(log.recent()) == 20
    assert log.unwritten_entries == 20


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_no_half(
    open_log: Callable[..., AuditLog], tmp_path: Path, events: Events
) -> None:
    """A limit on the size of files cuts a write short, as the last free block of a disk does."""
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    assert log.record(entry(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        assert not log.record(entry(1))
        assert not log.record(entry(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.record(entry(3))
    assert numbers(path) == [0, 3]
    assert [event for event, _ in events.said] == ["audit_log_not_written", "audit_log_written_again"]
    assert events.said[1][1]["unwritten_entries"] == 2
    assert log.unwritten_entries == 0
    assert [one.result["moved_blocks"] for one in log.recent()] == [3, 2, 1, 0]


def test_an_entry_that_is_not_on_the_disk_is_not_written(
    open_log: Callable[..., AuditLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    assert log.record(entry(0))

    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        assert not log.record(entry(1))
    assert log.record(entry(2))
    assert numbers(path) == [0, 2]


@pytest.mark.parametrize("obstacle", ["folder is a file", "symbolic link", "folder"])
def test_what_cannot_be_a_log_is_said_and_left_alone(
    open_log: Callable[..., AuditLog], tmp_path: Path, events: Events, obstacle: str
) -> None:
    path = tmp_path / "audit.jsonl"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if obstacle == "folder is a file":
        path = victim / "audit.jsonl"
    elif obstacle == "symbolic link":
        path.symlink_to(victim)
    else:
        path.mkdir()
    log = open_log(path)
    assert not log.record(entry(0))
    assert not log.record(entry(1))
    assert [event for event, _ in events.said] == ["audit_log_not_written"]
    assert victim.read_text() == "precious"
    assert len(log.recent()) == 2


def test_the_last_entries_are_told_while_a_disk_hangs(
    open_log: Callable[..., AuditLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for them may be the event loop, which must wait for nobody."""
    hangs, over = threading.Event(), threading.Event()

    def fsync(file: int) -> None:
        hangs.set()
        assert over.wait(60)

    log = open_log(tmp_path / "audit.jsonl")
    assert log.record(entry(0))
    monkeypatch.setattr(os, "fsync", fsync)
    writing = threading.Thread(target=log.record, args=(entry(1),))
    writing.start()
    told: list[int] = []
    asking = threading.Thread(target=lambda: told.append(len(log.recent())))
    try:
        assert hangs.wait(60)
        asking.start()
        asking.join(60)
        assert told == [2]
    finally:
        over.set()
        writing.join(60)
        asking.join(60)


WRITER = """
import sys
from pathlib import Path
from agent.compaction.audit import Asker, AuditEntry, AuditLog
log = AuditLog(Path(sys.argv[1]))
number = 0
while True:
    log.record(AuditEntry(time_unix=0.0, asker=Asker(route="cli", access="local", uid=0, pid=1), action="compact",
                          engine="e", outcome="reached", reason=f"number {number}"))
    print(number, flush=True)
    number += 1
"""


def test_a_killed_agent_has_written_what_it_recorded(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert agent.stdout is not None
    while int(agent.stdout.readline()) < 50:
        pass
    agent.send_signal(signal.SIGKILL)
    recorded = [50, *map(int, agent.communicate()[0].split())]
    assert [one.reason for one in read_entries(path)][: recorded[-1] + 1] == [
        f"number {number}" for number in range(recorded[-1] + 1)
    ]


def test_a_torn_line_spoils_no_other(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    open_log(path).record(entry(0))
    with path.open("a") as file:
        file.write('null\n{"schema": "kvatlas.audit/v9"}\n\xff\n{"schema": "kvatlas.audit/v1", "ti')
    log = open_log(path)
    assert log.recent() == (entry(0),)
    log.record(entry(1))
    assert list(read_entries(path)) == [entry(0), entry(1)]
    assert path.read_text().endswith(json.dumps(entry(1).to_json(), separators=(",", ":")) + "\n")


def test_many_threads_write_whole_lines(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = open_log(path, max_file_bytes=MIN_FILE_BYTES)

    def write(first: int) -> None:
        for number in range(first, first + 40):
            log.record(entry(number))

    threads = [threading.Thread(target=write, args=(40 * index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [number for file in tmp_path.iterdir() for number in numbers(file)]
    assert sorted(written) == list(range(320))


# Several agents with one file

ROTATOR = """
import sys
from pathlib import Path
from agent.compaction import audit
from agent.compaction.audit import MIN_FILE_BYTES, Asker, AuditEntry, AuditLog
audit.LOCK_SECONDS = 250.0  # nobody writes without a pause but here, where one may wait for all that the others write
log = AuditLog(Path(sys.argv[1]), max_file_bytes=MIN_FILE_BYTES, kept_files=50)
first = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, first + 300):
    assert log.record(AuditEntry(time_unix=0.0, asker=Asker(route="cli", access="local"), action="compact", engine="e",
                                 outcome="reached", reason=f"number {number} " + "x" * 600))
"""


def test_several_agents_rotate_one_file_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", ROTATOR, str(path), str(300 * index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(3)
    ]
    for agent in agents:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
    for agent in agents:
        agent.communicate("go\n", timeout=300)
    assert [agent.returncode for agent in agents] == [0, 0, 0]
    files = list(tmp_path.iterdir())
    assert len(files) > 5
    assert sorted(number for file in files for number in numbers(file)) == list(range(900))
    # Files are turned when they are full, not when somebody else has just turned them.
    assert all(file.stat().st_size > MIN_FILE_BYTES // 2 for file in files if file != path)


def test_two_agents_that_find_a_file_full_rotate_it_once(
    open_log: Callable[..., AuditLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LOCK_SECONDS", 60.0)
    path = tmp_path / "audit.jsonl"
    one, other = (open_log(path, max_file_bytes=MIN_FILE_BYTES) for _ in range(2))
    count = 0
    while not path.exists() or path.stat().st_size + 700 < MIN_FILE_BYTES:
        assert one.record(entry(count))
        count += 1
    late = threading.Thread(target=other.record, args=(entry(count, reason=f"number {count} " + "x" * 700),))
    rotate = one._rotate

    def rotate_late(path: Path) -> None:
        late.start()
        late.join(0.3)  # time enough for one that does not wait for the lock
        rotate(path)

    one._rotate = rotate_late  # type: ignore[method-assign]
    assert one.record(entry(count + 1, reason=f"number {count + 1} " + "x" * 700))
    late.join()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert sorted(numbers(path)) == [count, count + 1]


def test_a_file_that_was_rotated_while_its_lock_was_waited_for_is_left(
    open_log: Callable[..., AuditLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LOCK_SECONDS", 60.0)
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = open_log(path)
    log.record(entry(0))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writing = threading.Thread(target=log.record, args=(entry(1),))
        writing.start()
        path.rename(moved)
    writing.join()
    assert (numbers(moved), numbers(path)) == ([0], [1])


def test_an_agent_that_stopped_with_the_lock_holds_nobody_up_for_long(
    open_log: Callable[..., AuditLog], tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LOCK_SECONDS", 0.05)
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    assert log.record(entry(0))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not log.record(entry(1))
    assert log.record(entry(2))
    assert numbers(path) == [0, 2]
    assert "another process has held the file" in events.said[0][1]["reason"]
    assert [one.result["moved_blocks"] for one in log.recent()] == [2, 1, 0]


def test_half_a_line_is_taken_back_only_from_the_end(
    open_log: Callable[..., AuditLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes no lock, an earlier agent say, may have written behind it."""
    path = tmp_path / "audit.jsonl"
    log = open_log(path)
    assert log.record(entry(0))
    theirs = json.dumps(entry(5).to_json()).encode() + b"\n"
    write = os.write

    def short(file: int, data: bytes) -> int:
        written = write(file, data[:20])
        write(file, b"\n" + theirs)
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        assert not log.record(entry(1))
    assert log.record(entry(2))
    assert list(read_entries(path)) == [entry(0), entry(5), entry(2)]


@pytest.mark.parametrize(
    "changes",
    [
        {"result": {"text": "x" * 100_000}},
        {"reason": "é" * 100_000},
        {"engine": "e" * 100_000, "parameters": {"a": "b" * 100_000}},
        {"asker": Asker(route="r" * 100_000, access="local", pid=1)},
    ],
)
def test_a_line_is_bounded(open_log: Callable[..., AuditLog], tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "audit.jsonl"
    assert open_log(path).record(entry(0, **changes))
    assert path.stat().st_size <= MAX_ENTRY_BYTES
    (found,) = read_entries(path)
    assert found.time_unix == entry().time_unix


def test_what_json_does_not_have_becomes_null(open_log: Callable[..., AuditLog], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    given = MappingProxyType({"target": math.nan, "limit": math.inf, "text": "\ud800"})
    assert open_log(path).record(entry(0, parameters=given, result={"nested": {"rate": math.nan}}))
    (found,) = read_entries(path)
    assert found.parameters == {"target": None, "limit": None, "text": "\ud800"}
    assert found.result == {"nested": {"rate": None}}
