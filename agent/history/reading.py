"""Reads the SQLite file of the history beside its writer, or when there is none."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from agent.history.database import BUSY_SECONDS, SCHEMA, VERSION, unusable
from agent.history.entries import HOLD, Mark
from agent.history.frames import States, decode_frame
from agent.history.model import METRICS
from agent.history.tiers import FRAME_TIERS, RECORD, Tier
from alerts.database import DatabaseUnusable, Fault
from alerts.encoding import MISREAD

MAX_MARKS_READ = 1000
MAX_AT_ONCE = 2  # questions; each has three files open


@dataclass(frozen=True, slots=True)
class Rows:
    """What one tier holds of a metric, oldest first: starts of buckets and their records, both (n,)."""

    starts: NDArray[np.float64]
    records: NDArray[np.void]  # of tiers.RECORD


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """One frame, with what a scrubber needs to go on from it; times in Unix seconds."""

    time_unix: float
    resolution_seconds: int  # of the tier that it is from
    incarnation: str
    sequence: int
    states: States
    first_unix: float
    last_unix: float
    previous_unix: float | None
    next_unix: float | None


class Past(Protocol):
    """What is asked of the past of pools, from any thread. Raises DatabaseUnusable or FrameCorrupt where it cannot be
    read; the methods are HistoryReader's."""

    def pools(self) -> tuple[str, ...]: ...

    def frame_at(self, pool: str, at_unix: float) -> KeptFrame | None: ...

    def frame_range(self, pool: str) -> tuple[float, float] | None: ...

    def frame_times(self, pool: str, start_unix: float, end_unix: float) -> NDArray[np.float64]: ...

    def marks(
        self, pool: str, start_unix: float, end_unix: float, limit: int = ..., *, holds: bool = ...
    ) -> tuple[Mark, ...]: ...


class HistoryReader:
    """Opens the file for each question, so that any thread may ask. Raises DatabaseUnusable where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turns = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._last: tuple[_FrameRow, States] | None = None  # whoever goes on in its chain need not begin anew

    def pools(self) -> tuple[str, ...]:
        """Every pool that something is kept of, by name."""
        with self._open() as connection:
            return tuple(name for (name,) in connection.execute("SELECT name FROM pools ORDER BY name"))

    def rows(self, pool: str, metric: str, tier: Tier, start_unix: float, end_unix: float) -> Rows | None:
        """Buckets of a tier that begin in start <= time < end; None where nothing is kept of the pool."""
        at = 1 + METRICS.index(metric) * RECORD.itemsize
        with self._open() as connection:
            if (id := _pool(connection, pool)) is None:
                return None
            found = connection.execute(
                f"SELECT start, substr(summary, {at}, {RECORD.itemsize}) FROM samples"  # noqa: S608 - two numbers
                " WHERE pool = ? AND tier = ? AND start >= ? AND start < ? ORDER BY start",
                (id, tier.step_seconds, float(start_unix), float(end_unix)),  # whole ones may be too large for SQLite
            ).fetchall()
            starts = np.fromiter((start for start, _ in found), np.float64, len(found))
            return Rows(starts, np.frombuffer(b"".join(part for _, part in found), RECORD))

    def frame_at(self, pool: str, at_unix: float) -> KeptFrame | None:
        """The newest frame that is not after `at_unix`, of whichever tier has it; None where there is none.

        Raises FrameCorrupt where what is kept does not make one.
        """
        at_ms = round(at_unix * 1000)
        with self._open() as connection:
            if (id := _pool(connection, pool)) is None:
                return None
            best: _FrameRow | None = None
            for tier in FRAME_TIERS:
                row = connection.execute(
                    "SELECT time_ms, id, head, tier, incarnation, sequence FROM frames"
                    " WHERE pool = ? AND tier = ? AND time_ms <= ? ORDER BY time_ms DESC, id DESC LIMIT 1",
                    (id, tier.step_seconds, at_ms),
                ).fetchone()
                if row is not None and (best is None or row[0] > best[0]):
                    best = row
            if best is None:
                return None
            time_ms, frame, head, step, incarnation, sequence = best
            known = self._last
            if known is not None and not (
                known[0][2] == head and known[0][1] <= frame and _row(connection, known[0][1]) == known[0]
            ):
                known = None
            chain = connection.execute(
                "SELECT data FROM frames WHERE head = ? AND id > ? AND id <= ? ORDER BY id",
                (head, known[0][1] if known is not None else 0, frame),
            ).fetchall()
            first, last = self._ends(connection, id)
            previous = _near(connection, id, "max", "<", time_ms)
            following = _near(connection, id, "min", ">", time_ms)
        states: States | None = known[1] if known is not None else None
        for (data,) in chain:
            states = decode_frame(data, states)
        if states is None:
            return None  # it expired between the two questions
        self._last = (best, states)
        return KeptFrame(
            time_unix=time_ms / 1000,
            resolution_seconds=step,
            incarnation=incarnation,
            sequence=sequence,
            states=states,
            first_unix=first,
            last_unix=last,
            previous_unix=previous,
            next_unix=following,
        )

    def frame_range(self, pool: str) -> tuple[float, float] | None:
        """Times of the oldest and the newest frame; None where there are none."""
        with self._open() as connection:
            id = _pool(connection, pool)
            if id is None or not connection.execute("SELECT 1 FROM frames WHERE pool = ? LIMIT 1", (id,)).fetchone():
                return None
            return self._ends(connection, id)

    def frame_times(self, pool: str, start_unix: float, end_unix: float) -> NDArray[np.float64]:
        """Times of all frames in start <= time <= end, oldest first; one that several tiers have counts once."""
        start_ms, end_ms = round(start_unix * 1000), round(end_unix * 1000)
        with self._open() as connection:
            if (id := _pool(connection, pool)) is None:
                return np.zeros(0)
            times = [
                time_ms
                for tier in FRAME_TIERS
                for (time_ms,) in connection.execute(
                    "SELECT time_ms FROM frames WHERE pool = ? AND tier = ? AND time_ms BETWEEN ? AND ?",
                    (id, tier.step_seconds, start_ms, end_ms),
                )
            ]
        return np.unique(np.asarray(times, np.int64)) / 1000

    def marks(
        self, pool: str, start_unix: float, end_unix: float, limit: int = MAX_MARKS_READ, *, holds: bool = True
    ) -> tuple[Mark, ...]:
        """What happened to a pool, and to the agent, in start <= time < end: the newest `limit`, oldest first.

        Without `holds`, decisions to do nothing are left out: on a busy pool they are most of all marks.
        """
        with self._open() as connection:
            found = connection.execute(
                "SELECT time_ms, pool, kind, text, detail FROM marks WHERE pool IN (?, '')"
                " AND time_ms >= ? AND time_ms < ? AND (? OR NOT (kind = 'decision' AND text LIKE ?))"
                " ORDER BY time_ms DESC, id DESC LIMIT ?",
                (pool, start_unix * 1000, end_unix * 1000, holds, HOLD + "%", limit),
            ).fetchall()
        return tuple(mark for row in reversed(found) if (mark := _mark(row)) is not None)

    def lines(self, limit: int) -> tuple[str, ...]:
        """The newest lines of the agent's log, oldest first."""
        with self._open() as connection:
            found = connection.execute("SELECT line FROM lines ORDER BY id DESC LIMIT ?", (limit,)).fetchall()
        return tuple(line for (line,) in reversed(found))

    def _ends(self, connection: sqlite3.Connection, pool: int) -> tuple[float, float]:
        first = _near(connection, pool, "min", ">", -(2**62))
        last = _near(connection, pool, "max", "<", 2**62)
        return first or 0.0, last or 0.0

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._turns, self._connected() as connection:
            yield connection

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        connection = self._connect()
        try:
            connection.execute("BEGIN")
            yield connection
        except sqlite3.Error as error:
            raise unusable(error) from error
        except MISREAD as error:
            raise DatabaseUnusable(Fault.CORRUPT, f"a row of it cannot be read: {error!r}") from error
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        """The file; where there is none yet, or its writer has only just begun it, one that holds nothing."""
        try:
            if self.path.exists():
                where = f"file:{quote(str(self.path.absolute()))}?mode=rw"  # rw: a WAL that nobody has open needs it
                connection = sqlite3.connect(where, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
                try:
                    connection.execute("PRAGMA query_only = ON")
                    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
                    if version > VERSION:
                        raise DatabaseUnusable(Fault.NEWER, f"version {version}, and this is {VERSION}")
                except BaseException:  # raised again, with the connection closed
                    connection.close()
                    raise
                if version:
                    return connection
                connection.close()
            connection = sqlite3.connect(":memory:", isolation_level=None)
            for statement in SCHEMA:
                connection.execute(statement)
        except (OSError, sqlite3.Error) as error:
            raise unusable(error) from error
        return connection


def _mark(row: tuple[float, str, str, str, str]) -> Mark | None:
    """None for a damaged row, which must not cost the others their answer."""
    time_ms, name, kind, text, detail = row
    try:
        return Mark(time_ms / 1000, name, kind, text, dict(json.loads(detail)))
    except MISREAD:
        return None


_FrameRow = tuple[int, int, int, int, str, int]
"""time_ms, id, head, tier, incarnation and sequence of a frame."""


def _row(connection: sqlite3.Connection, frame: int) -> _FrameRow | None:
    """As it stands in the file, which may be another one than last time."""
    query = "SELECT time_ms, id, head, tier, incarnation, sequence FROM frames WHERE id = ?"
    row: _FrameRow | None = connection.execute(query, (frame,)).fetchone()
    return row


def _pool(connection: sqlite3.Connection, name: str) -> int | None:
    row = connection.execute("SELECT id FROM pools WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def _near(connection: sqlite3.Connection, pool: int, which: str, side: str, time_ms: int) -> float | None:
    """The time of the last frame before a time, or of the first one after it."""
    query = f"SELECT {which}(time_ms) FROM frames WHERE pool = ? AND tier = ? AND time_ms {side} ?"  # noqa: S608 - ours
    found = [
        row[0]
        for tier in FRAME_TIERS
        if (row := connection.execute(query, (pool, tier.step_seconds, time_ms)).fetchone())[0] is not None
    ]
    return None if not found else (max(found) if which == "max" else min(found)) / 1000
