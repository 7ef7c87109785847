"""The store's SQLite file: rows in, rows out, and errors that say what became of the file.

WAL with full synchronisation: what was written outlives the process and the machine. The file is locked for as long as
it is open, so that no two agents send from one outbox; a kill frees it. Everything else is the store's.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from alerts.errors import AlertsError

VERSION: Final = 1
BUSY_SECONDS: Final = 0.0  # who wants the file waits for it in steps of its own
MODE: Final = 0o600
SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS states (fingerprint TEXT PRIMARY KEY, state TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS waiting (
        sink TEXT, sequence INTEGER, since REAL NOT NULL, change TEXT NOT NULL, PRIMARY KEY (sink, sequence)
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS told (
        sink TEXT, fingerprint TEXT, alert TEXT NOT NULL, PRIMARY KEY (sink, fingerprint)
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS standing (sink TEXT PRIMARY KEY, standing TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS mutes (id TEXT PRIMARY KEY, mute TEXT NOT NULL)",
)
TABLES: Final = ("meta", "states", "waiting", "told", "standing", "mutes")
CORRUPT: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
DAMAGED_SCHEMA: Final = ("no such ", "malformed database schema", "unsupported file format")  # begins of SQLite's words
LOCKED: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Fault(Enum):
    """What is wrong with the file, and what to do."""

    CORRUPT = "is damaged; it is set aside under another name, and a new one is begun"
    LOCKED = "is in use by another process; give each agent a file of its own"
    FOREIGN = "is another program's; name another file"
    NEWER = "was made by a newer version; run that one, or name another file"
    REPLACED = "was removed or replaced while the agent ran; leave it to the agent"
    UNWRITABLE = "cannot be written; make room, or mend the folder's permissions"


class DatabaseUnusable(AlertsError):
    """The file cannot be used now."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{detail}: the file {fault.value}")
        self.fault = fault
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What to write in one transaction; for a mapping's value None, the row goes. Times are Unix seconds."""

    sequence: int | None = None  # the last one that was given
    states: Mapping[str, str | None] = field(default_factory=dict)
    waiting: Iterable[tuple[str, int, float, str]] = ()  # sink, sequence, since, change
    waited: Iterable[tuple[str, int]] = ()  # that go
    told: Mapping[tuple[str, str], str | None] = field(default_factory=dict)  # by sink and fingerprint
    standing: Mapping[str, str | None] = field(default_factory=dict)
    mutes: Mapping[str, str | None] = field(default_factory=dict)


class NamedFiles:
    """Are the files that SQLite has open still those under their names? It would go on writing to ones that nobody
    finds again, and a WAL holds what was written last."""

    def __init__(self, path: Path, opened: os.stat_result) -> None:
        """Of a database that is open, and of what SQLite has beside it; `opened` is the file itself."""
        self._known = {path: _identity(opened)}
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if (found := _identity_at(beside)) is not None:
                self._known[beside] = found

    def lost(self) -> str | None:
        """The name of one that was removed or replaced; None where all are there."""
        return next((path.name for path, known in self._known.items() if _identity_at(path) != known), None)


class Database:
    """One open file. Not safe for several threads at once; the store takes care of that."""

    def __init__(self, path: Path) -> None:
        """Raises DatabaseUnusable."""
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(path, flags, MODE)  # before SQLite does it with the mode of the umask
            try:
                found = os.fstat(file)
            finally:
                os.close(file)
            if found.st_size == 0:
                _sync_folder(path.parent)  # or a crash of the machine may leave the rows and no name for them
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise _unusable(error) from error
        try:
            self._prepare()
            self._files = NamedFiles(path, found)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self.close()
            raise _unusable(error) from error
        except DatabaseUnusable:
            self.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")  # before the first access: then WAL needs no shared memory either
        there = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if there and there.isdisjoint(TABLES):
            raise DatabaseUnusable(Fault.FOREIGN, self.path.name)
        version = int(run("PRAGMA user_version").fetchone()[0])
        if version > VERSION:
            raise DatabaseUnusable(Fault.NEWER, f"version {version}, and this is {VERSION}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA journal_size_limit = 4194304")
        damage = run("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise DatabaseUnusable(Fault.CORRUPT, str(damage))
        if version < VERSION:  # else nothing is written: a full disk keeps nobody from reading
            run("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                run(statement)
            run(f"PRAGMA user_version = {VERSION}")
            run("COMMIT")

    def read(self) -> Rows:
        """Everything. Raises DatabaseUnusable."""
        run = self._connection.execute
        # One text that is damaged must not keep the others from being read; whoever reads it sees that it is.
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            sequence = run("SELECT value FROM meta WHERE key = 'sequence'").fetchone()
            return Rows(
                sequence=sequence[0] if sequence else 0,
                states=dict(run("SELECT fingerprint, state FROM states")),
                waiting=run("SELECT sink, sequence, since, change FROM waiting ORDER BY sequence").fetchall(),
                told={(sink, name): alert for sink, name, alert in run("SELECT sink, fingerprint, alert FROM told")},
                standing=dict(run("SELECT sink, standing FROM standing")),
                mutes=dict(run("SELECT id, mute FROM mutes")),
            )
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _unusable(error) from error

    def write(self, rows: Rows, *, anew: bool = False) -> None:
        """All of it or nothing; `anew` drops what was there before. Raises DatabaseUnusable."""
        if (lost := self._files.lost()) is not None:
            raise DatabaseUnusable(Fault.REPLACED, lost)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if anew:
                for table in TABLES:
                    self._connection.execute(f"DELETE FROM {table}")  # noqa: S608 - a name of ours
            self._write(rows)
            self._connection.execute("COMMIT")
        except Exception as error:  # as a text that is no Unicode: a transaction that stays open ends every later one
            with suppress(sqlite3.Error):  # SQLite may have rolled it back already
                self._connection.execute("ROLLBACK")
            raise _unusable(error) from error

    def _write(self, rows: Rows) -> None:
        run, many = self._connection.execute, self._connection.executemany
        if rows.sequence is not None:
            run("INSERT OR REPLACE INTO meta VALUES ('sequence', ?)", (rows.sequence,))
        many("INSERT OR REPLACE INTO states VALUES (?, ?)", _kept(rows.states))
        many("DELETE FROM states WHERE fingerprint = ?", _gone(rows.states))
        many("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?, ?)", rows.waiting)
        many("DELETE FROM waiting WHERE sink = ? AND sequence = ?", rows.waited)
        told = rows.told.items()
        many("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", [(*key, text) for key, text in told if text is not None])
        many("DELETE FROM told WHERE sink = ? AND fingerprint = ?", [key for key, text in told if text is None])
        many("INSERT OR REPLACE INTO standing VALUES (?, ?)", _kept(rows.standing))
        many("DELETE FROM standing WHERE sink = ?", _gone(rows.standing))
        many("INSERT OR REPLACE INTO mutes VALUES (?, ?)", _kept(rows.mutes))
        many("DELETE FROM mutes WHERE id = ?", _gone(rows.mutes))

    def close(self) -> None:
        with suppress(sqlite3.Error):  # a full disk may keep the last checkpoint from being made; the WAL holds it
            self._connection.close()


def set_aside(path: Path) -> Path:
    """Rename a file, with what SQLite keeps beside it, to `NAME.aside`; an earlier one gives way."""
    aside = path.with_name(path.name + ".aside")
    for suffix in ("-wal", "-shm"):
        with suppress(OSError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    os.replace(path, aside)
    return aside


def _sync_folder(folder: Path) -> None:
    """Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _identity_at(path: Path) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path))
    except OSError:
        return None


def _kept(rows: Mapping[str, str | None]) -> list[tuple[str, str]]:
    return [(key, text) for key, text in rows.items() if text is not None]


def _gone(rows: Mapping[str, str | None]) -> list[tuple[str]]:
    return [(key,) for key, text in rows.items() if text is None]


def _unusable(error: Exception) -> DatabaseUnusable:
    if isinstance(error, OSError):
        return DatabaseUnusable(Fault.UNWRITABLE, error.strerror or type(error).__name__)
    if isinstance(error, UnicodeDecodeError):  # SQLite quotes the file in its error, and sqlite3 cannot read that
        return DatabaseUnusable(Fault.CORRUPT, "its schema is not text")
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary one; extended codes stand above it
    damaged = code in CORRUPT or (code == sqlite3.SQLITE_ERROR and str(error).startswith(DAMAGED_SCHEMA))
    fault = Fault.CORRUPT if damaged else Fault.LOCKED if code in LOCKED else Fault.UNWRITABLE
    return DatabaseUnusable(fault, str(error) or type(error).__name__)
