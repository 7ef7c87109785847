"""The SQLite file of the history: rows in, old rows out, a size that is kept, and errors that say what became of it.

WAL, so that readers and the writer do not wait for each other. `synchronous = NORMAL`: what was committed outlives the
process; a machine that loses power may lose the last commits, and nothing before them.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from agent.history.entries import Entry, Frame, Mark, Sample
from agent.history.frames import States, encode_frame
from agent.history.tiers import (
    CHAINS,
    FRAME_TIERS,
    RECORD,
    SAMPLE_TIERS,
    Summary,
    Tier,
    merge,
    start_of,
    summarize_sample,
)
from alerts.database import CORRUPT, LOCKED, DatabaseUnusable, Fault, NamedFiles

VERSION = 1
MODE = 0o600
MIN_BYTES = 32 * 2**20
WAL_BYTES = 12 * 2**20  # of the size that is kept: what SQLite has beside the file
WAL_PAGES = 1000  # 4 MiB, then its contents go into the file
PIECE_BYTES = 2 * 2**20  # of frames in one transaction, each page of which goes through the WAL, also to be dropped
MAX_CHAIN_BYTES = 2**20
ROOM_SHARE, ROOM_BYTES = 0.1, 6 * 2**20  # of the size, what is kept free at least: a write must never meet the end
DROP_SHARE = 0.1  # of the size, what is dropped at once where less is free
MAX_CHAINS = 1024
MARKS_KEEP_SECONDS = 30 * 86_400.0
MAX_MARKS, MAX_LINES = 100_000, 2_000
AHEAD_SECONDS = 120.0  # what lies farther in the future is of a clock that was wrong
MARKS_SHARE, LINES_SHARE = 1 / 6, 1 / 12  # of the size, what is left of these at least where room is made
LARGEST = 2**63 - 1  # number that SQLite keeps; a map's counters are unsigned
LAST_ID = 2**62  # of a frame: no agent lives to see it, so that a larger one is damage
# Of an entry that no disk would take: a text that is no Unicode, a number too large, a detail that is no JSON.
UNFIT = (ValueError, TypeError, ArithmeticError, RecursionError, sqlite3.ProgrammingError, sqlite3.DataError)
CHAINS_AT_ONCE = 100
DROPPED_SECONDS = 21_600  # of samples at once
BUSY_SECONDS = 2.0
SCHEMA = (
    "CREATE TABLE pools (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    # `tier` is the step in seconds here and in frames; `start` is in Unix seconds, `summary` is of tiers.RECORD.
    """CREATE TABLE samples (
        pool INTEGER, tier INTEGER, start INTEGER, summary BLOB NOT NULL, PRIMARY KEY (pool, tier, start)
    ) WITHOUT ROWID""",
    # `head` is the id of the frame that its chain begins with, which is a whole one.
    """CREATE TABLE frames (
        id INTEGER PRIMARY KEY, pool INTEGER NOT NULL, tier INTEGER NOT NULL, time_ms INTEGER NOT NULL,
        head INTEGER NOT NULL, incarnation TEXT NOT NULL, sequence INTEGER NOT NULL, data BLOB NOT NULL
    )""",
    "CREATE INDEX frames_by_time ON frames (pool, tier, time_ms)",
    "CREATE INDEX frames_by_chain ON frames (head)",
    "CREATE INDEX chains_by_time ON frames (time_ms) WHERE id = head",
    """CREATE TABLE marks (
        id INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, pool TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
        detail TEXT NOT NULL
    )""",
    "CREATE INDEX marks_by_time ON marks (pool, time_ms)",
    "CREATE TABLE lines (id INTEGER PRIMARY KEY, line TEXT NOT NULL)",
)
# What a row of each takes, nearly: its texts, and what SQLite has around them and in an index.
TEXT_BYTES = {
    "marks": "length(CAST(text AS BLOB)) + length(CAST(detail AS BLOB)) + 2 * length(CAST(pool AS BLOB)) + 50",
    "lines": "length(CAST(line AS BLOB)) + 10",
}
Done = TypeVar("Done")


@dataclass(slots=True)
class _Chain:
    """The frames of one pool and tier that follow from one whole one; `states` are the last one's."""

    head: int
    began_unix: float
    incarnation: str
    length: int = 0
    size_bytes: int = 0
    time_unix: float = 0.0
    states: States = field(default_factory=lambda: np.zeros(0, np.uint8))


class HistoryDatabase:
    """The file, open for writing. For one thread. Every method raises DatabaseUnusable."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._budget = max(MIN_BYTES, max_bytes) - WAL_BYTES
        self._pools: dict[str, int] = {}
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._open_buckets: dict[tuple[int, int], tuple[int, Summary]] = {}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
            try:
                found = os.fstat(file)
            finally:
                os.close(file)
            self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise unusable(error) from error
        try:
            self._prepare()
            self._files = NamedFiles(path, found)
        except (sqlite3.Error, UnicodeDecodeError, DatabaseUnusable) as error:
            self.close()
            raise (error if isinstance(error, DatabaseUnusable) else unusable(error)) from error

    def _prepare(self) -> None:
        run = self._connection.execute
        version = self._number("PRAGMA user_version")
        if version > VERSION:
            raise DatabaseUnusable(Fault.NEWER, f"version {version}, and this is {VERSION}")
        if version < VERSION:
            run("PRAGMA auto_vacuum = INCREMENTAL")  # takes hold only in a file without tables
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {WAL_BYTES // 2}")
        self._page_bytes = self._number("PRAGMA page_size")
        run(f"PRAGMA max_page_count = {self._budget // self._page_bytes}")
        if version < VERSION:
            run("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                run(statement)
            run(f"PRAGMA user_version = {VERSION}")
            run("COMMIT")
        self._recall()

    def write(self, entries: Iterable[Entry]) -> tuple[str, ...]:
        """All that can be kept, or nothing. Returns why entries were left out that no disk would take: such a one,
        of one pool, must not cost all others theirs."""
        if (lost := self._files.lost()) is not None:
            raise DatabaseUnusable(Fault.REPLACED, lost)
        return self._transact(lambda: self._write(entries))

    def expire(self, now_unix: float) -> None:
        """Drop what is older than its tier keeps, and what lies in the future."""
        while self._transact(lambda: self._expire_chains(now_unix)):
            pass
        self._transact(lambda: self._expire(now_unix))

    def shrink(self) -> int:
        """Where the file is nearly as large as it may be, drop the oldest; returns how many chains of frames, and
        rows of everything else, that were.

        Marks and lines keep a share of their own and no more, so that neither they nor frames push the others out.
        """
        dropped = 0
        full = self._budget - max(ROOM_SHARE * self._budget, ROOM_BYTES)
        if self.used_bytes() <= full:
            return dropped
        for drop in self._what_goes():
            while self.used_bytes() > full - DROP_SHARE * self._budget and (gone := self._transact(drop)):
                dropped += gone
        if dropped and self._number("PRAGMA page_count") * self._page_bytes > self._budget:
            # Larger than it may be now: an earlier agent had a higher limit.
            with _translated():
                self._connection.execute("PRAGMA incremental_vacuum").fetchall()
        return dropped

    def used_bytes(self) -> int:
        """Bytes of the file that hold something."""
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._page_bytes

    def close(self) -> None:
        with suppress(sqlite3.Error):  # a full disk may keep the last checkpoint from being made; the WAL holds it
            self._connection.close()

    # ---- within a transaction -------------------------------------------------------------------------------------

    def _write(self, entries: Iterable[Entry]) -> tuple[str, ...]:
        touched: dict[tuple[int, int, int], Summary] = {}
        left_out: list[str] = []
        for entry in entries:
            try:
                self._add(entry, touched)
            except UNFIT as error:
                left_out.append(f"{type(entry).__name__}: {type(error).__name__}")
        self._connection.executemany(
            "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)",
            [(*key, summary.tobytes()) for key, summary in touched.items()],
        )
        for (pool, tier, start), summary in touched.items():
            self._open_buckets[pool, tier] = (start, summary)
        return tuple(left_out)

    def _add(self, entry: Entry, touched: dict[tuple[int, int, int], Summary]) -> None:
        """Raises one of UNFIT before anything is written of the entry."""
        if isinstance(entry, Sample):
            self._add_sample(entry, touched)
        elif isinstance(entry, Frame):
            self._add_frame(entry)
        elif isinstance(entry, Mark):
            self._add_mark(entry)
        else:
            self._connection.execute("INSERT INTO lines (line) VALUES (?)", (entry.text,))

    def _add_mark(self, mark: Mark) -> None:
        row = (round(mark.time_unix * 1000), mark.pool, mark.kind, mark.text, json.dumps(dict(mark.detail)))
        self._connection.execute("INSERT INTO marks (time_ms, pool, kind, text, detail) VALUES (?,?,?,?,?)", row)

    def _add_sample(self, sample: Sample, touched: dict[tuple[int, int, int], Summary]) -> None:
        """Into the bucket of each tier; what an earlier agent, or a clock that was set back, left there stays in it."""
        pool, summary = self._pool(sample.pool), summarize_sample(sample.values)
        buckets: dict[tuple[int, int, int], Summary] = {}
        for tier in SAMPLE_TIERS:
            key = (pool, tier.step_seconds, start_of(sample.time_unix, tier))
            if (found := touched.get(key)) is None:
                found = self._bucket(*key)
            buckets[key] = summary if found is None else merge(found, summary)
        touched |= buckets  # of all tiers or of none

    def _bucket(self, pool: int, tier: int, start: int) -> Summary | None:
        kept = self._open_buckets.get((pool, tier))
        if kept is not None and kept[0] == start:
            return kept[1]
        query = "SELECT summary FROM samples WHERE pool = ? AND tier = ? AND start = ?"
        row = self._connection.execute(query, (pool, tier, start)).fetchone()
        return np.frombuffer(row[0], RECORD) if row is not None else None

    def _add_frame(self, frame: Frame) -> None:
        pool = self._pool(frame.pool)
        for tier, longest in zip(FRAME_TIERS, CHAINS, strict=True):
            key = (pool, tier.step_seconds)
            chain = self._chains.get(key)
            if chain is not None and start_of(frame.time_unix, tier) == start_of(chain.time_unix, tier):
                continue
            self._last_frame += 1
            before = None
            if chain is not None and _goes_on(chain, frame, tier, longest):
                before = chain.states
            else:
                chain = _Chain(self._last_frame, frame.time_unix, frame.incarnation)
            data = encode_frame(frame.states, before)
            self._connection.execute(
                "INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    self._last_frame,
                    *key,
                    round(frame.time_unix * 1000),
                    chain.head,
                    frame.incarnation,
                    min(frame.sequence, LARGEST),
                    data,
                ),
            )
            chain.length, chain.size_bytes = chain.length + 1, chain.size_bytes + len(data)
            chain.time_unix, chain.states = frame.time_unix, frame.states
            self._chains.pop(key, None)
            self._chains[key] = chain  # the last one, so that those of pools that are gone come first
        while len(self._chains) > MAX_CHAINS:
            del self._chains[next(iter(self._chains))]

    def _pool(self, name: str) -> int:
        if (id := self._pools.get(name)) is None:
            id = self._connection.execute("INSERT INTO pools (name) VALUES (?)", (name,)).lastrowid or 0
            self._pools[name] = id
        return id

    def _expire(self, now_unix: float) -> int:
        run, before = self._connection.execute, self._connection.total_changes
        for tier in SAMPLE_TIERS:
            oldest, newest = now_unix - tier.keep_seconds - tier.step_seconds, now_unix + AHEAD_SECONDS
            for pool in self._pools.values():
                gone = (pool, tier.step_seconds)
                run("DELETE FROM samples WHERE pool = ? AND tier = ? AND start < ?", (*gone, oldest))
                run("DELETE FROM samples WHERE pool = ? AND tier = ? AND start > ?", (*gone, newest))
        oldest, newest = now_unix - MARKS_KEEP_SECONDS, now_unix + AHEAD_SECONDS
        run("DELETE FROM marks WHERE time_ms < ? OR time_ms > ?", (oldest * 1000, newest * 1000))
        run("DELETE FROM marks WHERE id <= (SELECT max(id) FROM marks) - ?", (MAX_MARKS,))
        run("DELETE FROM lines WHERE id <= (SELECT max(id) FROM lines) - ?", (MAX_LINES,))
        for name, pool in list(self._pools.items()):
            held = (
                "SELECT EXISTS (SELECT 1 FROM samples WHERE pool = ?) OR EXISTS (SELECT 1 FROM frames WHERE pool = ?)"
            )
            if not run(held, (pool, pool)).fetchone()[0]:
                run("DELETE FROM pools WHERE id = ?", (pool,))
                self._forget(name)
        return self._connection.total_changes - before

    def _expire_chains(self, now_unix: float) -> int:
        """A chain goes as a whole, once its last frame is as old as its first one may be."""
        for tier, longest in zip(FRAME_TIERS, CHAINS, strict=True):
            oldest = now_unix - tier.keep_seconds - longest * tier.step_seconds
            limits = (tier.step_seconds, oldest * 1000, (now_unix + AHEAD_SECONDS) * 1000)
            if dropped := self._drop_chains("tier = ? AND (time_ms < ? OR time_ms > ?)", limits):
                return dropped
        return 0

    def _what_goes(self) -> Iterator[Callable[[], int]]:
        """What makes room, in this order, each until it has no more to give. Frames before samples: they take most of
        the room, and the numbers say more of what is long past."""
        shares = {"marks": MARKS_SHARE * self._budget, "lines": LINES_SHARE * self._budget}
        for table, share in shares.items():
            yield partial(self._drop_texts, table, share)
        yield partial(self._drop_chains, "TRUE", ())
        yield self._drop_samples
        for table in shares:
            yield partial(self._drop_texts, table, 0.0)

    def _drop_texts(self, table: str, share_bytes: float) -> int:
        """Drop the oldest rows of a table, while it holds more than that; returns how many."""
        size = TEXT_BYTES[table]
        run = self._connection.execute
        excess = run(f"SELECT coalesce(sum({size}), 0) FROM {table}").fetchone()[0] - share_bytes  # noqa: S608 - ours
        gone, last, dropped = 0, 0, 0
        for id, length in run(f"SELECT id, {size} FROM {table} ORDER BY id"):  # noqa: S608
            if gone >= min(excess, PIECE_BYTES):
                break
            gone, last, dropped = gone + length, id, dropped + 1
        if dropped:
            run(f"DELETE FROM {table} WHERE id <= ?", (last,))  # noqa: S608
        return dropped

    def _drop_samples(self) -> int:
        self._open_buckets.clear()
        # The sum is SQLite's, which knows no number that is too large for it.
        oldest = "DELETE FROM samples WHERE start < (SELECT min(start) FROM samples) + ?"
        return self._connection.execute(oldest, (DROPPED_SECONDS,)).rowcount

    def _drop_chains(self, which: str, values: tuple[float, ...]) -> int:
        """Drop some of those chains, the oldest first; returns how many."""
        gone, size = set(), 0
        found = self._connection.execute(
            "SELECT id, (SELECT sum(length(data)) FROM frames WHERE head = first.id) FROM frames AS first"  # noqa: S608
            f" WHERE id = head AND {which} ORDER BY time_ms LIMIT ?",
            (*values, CHAINS_AT_ONCE),
        )
        for head, length in found.fetchall():
            gone.add(head)
            size += length
            if size >= PIECE_BYTES:
                break
        self._connection.executemany("DELETE FROM frames WHERE head = ?", [(head,) for head in gone])
        for key in [key for key, chain in self._chains.items() if chain.head in gone]:
            del self._chains[key]
        return len(gone)

    # ---- the rest -------------------------------------------------------------------------------------------------

    def _transact(self, work: Callable[[], Done]) -> Done:
        run = self._connection.execute
        try:
            run("BEGIN IMMEDIATE")
            done = work()
            run("COMMIT")
        except Exception as error:  # whatever it was: a transaction that stays open ends every later one
            with suppress(sqlite3.Error):  # SQLite may have rolled it back already
                run("ROLLBACK")
            self._chains.clear()  # what they and the buckets tell of may not have been kept
            self._open_buckets.clear()
            self._recall()
            raise unusable(error) from error
        return done

    def _recall(self) -> None:
        """What is known of the file without asking it each time."""
        with _translated():
            self._pools = {name: id for id, name in self._connection.execute("SELECT id, name FROM pools")}
        self._last_frame = self._number("SELECT coalesce(max(id), 0) FROM frames")
        if self._last_frame > LAST_ID:
            raise DatabaseUnusable(Fault.CORRUPT, f"a frame has the number {self._last_frame}")

    def _forget(self, name: str) -> None:
        pool = self._pools.pop(name)
        for kept in (self._chains, self._open_buckets):
            for key in [key for key in kept if key[0] == pool]:
                del kept[key]

    def _number(self, query: str) -> int:
        with _translated():
            return int(self._connection.execute(query).fetchone()[0])


def _goes_on(chain: _Chain, frame: Frame, tier: Tier, longest: int) -> bool:
    """May the frame say only what changed? Not in an endless chain, nor where the clock was set back."""
    return (
        chain.length < longest
        and chain.size_bytes < MAX_CHAIN_BYTES
        and chain.time_unix < frame.time_unix < chain.began_unix + longest * tier.step_seconds
        and chain.incarnation == frame.incarnation
        and chain.states.size == frame.states.size
    )


class _translated:  # noqa: N801 - reads as a word
    """Turns SQLite's errors into DatabaseUnusable."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise unusable(error) from error


def unusable(error: Exception) -> DatabaseUnusable:
    """What SQLite, or the system, said, as what is wrong with the file."""
    if isinstance(error, OSError):
        return DatabaseUnusable(Fault.UNWRITABLE, error.strerror or type(error).__name__)
    if isinstance(error, UnicodeDecodeError) or str(error).startswith("Could not decode"):
        return DatabaseUnusable(Fault.CORRUPT, "a text of it is none")  # sqlite3 itself says this, without a code
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary one; extended codes stand above it
    fault = Fault.CORRUPT if code in CORRUPT else Fault.LOCKED if code in LOCKED else Fault.UNWRITABLE
    return DatabaseUnusable(fault, str(error) or type(error).__name__)
