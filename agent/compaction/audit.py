"""Keeps who asked for what, of which engine, and what came of it: appended to a file, and the last ones in memory."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from agent.log import EventLog

SCHEMA = "kvatlas.audit/v1"
MODE = 0o640
MAX_ENTRY_BYTES = 16 * 1024
MIN_FILE_BYTES = 4 * MAX_ENTRY_BYTES
LOCK_SECONDS = 2.0  # that another agent's write is waited for
LOCK_PAUSE_SECONDS = 0.005

AuditValue = str | int | float | bool | None
Access = Literal["token", "loopback", "local", "agent", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asked. `access` is why they were allowed to; "agent" is the agent's own policy, "none"
    one that was not."""

    route: str  # "policy", "cli", or the API's "POST /v1/engines/{id}/compaction"
    access: Access
    uid: int | None = None  # of a local process
    pid: int | None = None
    address: str | None = None  # of a peer over HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One thing that was asked for, with its result. `time_unix` is when the result was known."""

    time_unix: float
    asker: Asker
    action: str  # "compact", "moving", "relocation", "hold", ...
    engine: str  # the id in /v1/engines/{id}
    parameters: Mapping[str, AuditValue] = field(default_factory=dict)
    outcome: str  # a run's decision, "on", "off", or the error's word: "refused", "busy", "timeout", ...
    reason: str
    seconds: float | None = None  # from asking to the result
    result: Mapping[str, Any] = field(default_factory=dict)  # a run's figures

    def to_json(self) -> dict[str, Any]:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time_unix))
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["asker"] = {one.name: getattr(self.asker, one.name) for one in fields(self.asker)}
        return {"schema": SCHEMA, "time": moment, **_plain(values)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises ValueError for anything that `to_json` does not make."""
        try:
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']!r}")
            known = {one.name: value[one.name] for one in fields(cls)}
            return cls(**{**known, "asker": Asker(**known["asker"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no audit entry: {error!r}") from error


class AuditLog:
    """An append-only file of JSON lines, each on the disk before `record` returns, and a ring of the last entries.

    At `max_file_bytes` the file is renamed to `.1`, `.1` to `.2` and so on, up to `kept_files` old ones. What cannot be
    written stays in the ring, with one warning for each stretch of failures. A file that someone else has rotated is
    opened anew, and several agents may write one file: each locks it while it writes or rotates. Safe to use from
    several threads; `record` waits for the disk and for those others, so call it off the event loop. `recent` waits for
    nobody.
    """

    def __init__(
        self,
        path: Path | None,
        log: EventLog | None = None,
        *,
        max_file_bytes: int = 8 * 2**20,
        kept_files: int = 4,
        ring_entries: int = 1000,
        listener: Callable[[AuditEntry], object] = lambda entry: None,
        wanted: Callable[[AuditEntry], bool] = lambda entry: True,
    ) -> None:
        """With no `path`, the ring alone. Entries of an earlier agent that are `wanted` are read back into the ring.
        The `listener` is told of each new one, and returns at once."""
        self.path = path
        self._listener = listener
        self._log = log or EventLog(logging.getLogger("kvatlas.audit"))
        self._max_file_bytes = max(MIN_FILE_BYTES, max_file_bytes)
        self._kept_files = max(1, kept_files)
        self._ring: deque[AuditEntry] = deque(maxlen=max(1, ring_entries))
        self._ring_lock = threading.Lock()  # of its own: the other is held while a disk is waited for
        self._lock = threading.Lock()
        self._file: int | None = None
        self.fault = ""  # why the last entry is in memory alone; "" where it is on the disk, or none was asked for
        self._unwritten = 0  # of the present stretch of failures
        if path is not None:
            paths = (_numbered(path, 1), path)
            self._ring.extend(_last_entries(paths, self._ring.maxlen or 1, self._max_file_bytes, wanted))

    def record(self, entry: AuditEntry) -> bool:
        """Keep an entry; False where it is in memory alone. Never raises for a file that cannot be written."""
        self._listener(entry)
        with self._ring_lock:
            self._ring.append(entry)
        with self._lock:
            if self.path is None:
                return False
            try:
                self._append(self.path, _line(entry))
            except OSError as error:
                self._close()
                self._unwritten += 1
                self.fault = error.strerror or repr(error)
                if self._unwritten == 1:
                    self._log.event(
                        "audit_log_not_written",
                        level=logging.WARNING,
                        path=str(self.path),
                        reason=self.fault,
                        action="make room or mend the folder; until then entries are kept in memory alone",
                    )
                return False
            self.fault = ""
            if self._unwritten:
                self._log.event("audit_log_written_again", path=str(self.path), unwritten_entries=self._unwritten)
                self._unwritten = 0
            return True

    def recent(self, limit: int = 100, engine: str | None = None) -> tuple[AuditEntry, ...]:
        """Newest first."""
        with self._ring_lock:
            entries = [entry for entry in reversed(self._ring) if engine is None or entry.engine == engine]
        return tuple(entries[: max(0, limit)])

    @property
    def unwritten_entries(self) -> int:
        """Entries since the file could last be written; 0 while all is well."""
        return self._unwritten

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, path: Path, line: bytes) -> None:
        file = self._locked(path)
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self._max_file_bytes:
                self._rotate(path)  # which gives the lock up with the file
                file = self._locked(path)
                size = os.fstat(file).st_size
            self._write(file, size, line)
        finally:
            if self._file is not None:
                _unlock(self._file)

    def _write(self, file: int, size: int, line: bytes) -> None:
        """The line at the end of the file, which is locked and has `size` bytes; all of it or nothing."""
        written = 0
        try:
            if size and os.pread(file, 1, size - 1) != b"\n":
                size += os.write(file, b"\n")  # an agent was killed in the middle of a line
            written = os.write(file, line)
            if written != len(line):
                raise OSError(0, f"only {written} of {len(line)} bytes could be written")
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                # Half a line would spoil the next one; what somebody wrote behind it who takes no lock is theirs.
                if os.fstat(file).st_size == size + written:
                    os.ftruncate(file, size)
            raise

    def _locked(self, path: Path) -> int:
        """The file under that name, which no other agent writes or rotates before it is unlocked or closed.

        The lock is on the file itself. Who waited for it may hold one that was rotated meanwhile, and looks again.
        """
        until = time.monotonic() + LOCK_SECONDS
        while True:
            file = self._open(path)
            if _lock(file):
                if self._is_named(path):
                    return file
                _unlock(file)
            elif time.monotonic() >= until:
                raise OSError(0, f"another process has held the file for {LOCK_SECONDS:g} s")
            else:
                time.sleep(LOCK_PAUSE_SECONDS)  # not waited for in the kernel: a stopped process may hold it for ever

    def _open(self, path: Path) -> int:
        """The file under that name, which is another one than last time where somebody else rotates."""
        if self._file is not None:
            if self._is_named(path):
                return self._file
            self._close()
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, MODE)
        _sync_folder(path.parent)
        return self._file

    def _is_named(self, path: Path) -> bool:
        """Is our file the one under that name?"""
        if self._file is None:
            return False
        try:
            named, ours = os.stat(path), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    def _rotate(self, path: Path) -> None:
        """The file is locked: until it is renamed, which is the last step, nobody else rotates."""
        for number in range(self._kept_files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(_numbered(path, number), _numbered(path, number + 1))
        os.replace(path, _numbered(path, 1))
        self._close()
        _sync_folder(path.parent)


def read_entries(path: Path) -> Iterator[AuditEntry]:
    """The entries of one file, oldest first; lines that are none, as a crash may leave one, are left out."""
    with path.open("rb") as lines:
        for line in lines:
            with suppress(ValueError):
                yield AuditEntry.from_json(json.loads(line))


def _last_entries(
    paths: tuple[Path, ...], count: int, most_bytes: int, wanted: Callable[[AuditEntry], bool]
) -> deque[AuditEntry]:
    entries: deque[AuditEntry] = deque(maxlen=count)
    for path in paths:
        with suppress(OSError):  # not there yet, or not readable: what can be had is shown
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= 2 * most_bytes:
                entries.extend(entry for entry in read_entries(path) if wanted(entry))
    return entries


def _line(entry: AuditEntry) -> bytes:
    """One line of at most MAX_ENTRY_BYTES: what is longer loses its figures, then the end of its reason."""
    value = entry.to_json()
    line = _encode(value)
    if len(line) > MAX_ENTRY_BYTES:
        value.update(result={"left_out": "too long"}, parameters={"left_out": "too long"})
        line = _encode(value)
    if len(line) > MAX_ENTRY_BYTES:
        for name in ("reason", "engine", "action", "outcome"):
            value[name] = value[name][:500]
        value["asker"] = {name: one[:500] if isinstance(one, str) else one for name, one in value["asker"].items()}
        line = _encode(value)
    return line


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    """NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lock(file: int) -> bool:
    """False where somebody else has it. A device is shared as it is, and so is a folder that knows no locks."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def _unlock(file: int) -> None:
    with suppress(OSError):  # no lock is known there
        fcntl.flock(file, fcntl.LOCK_UN)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
