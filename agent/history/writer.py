"""Writes the history on a thread of its own: whoever has something to be kept hands it over and goes on at once.

What is handed over waits in a queue that is bounded in entries and bytes. What the queue has no room for, and what the
disk does not take, is lost, counted, and said once for each stretch of losses.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agent.history.database import PIECE_BYTES, HistoryDatabase, unusable
from agent.history.entries import Entry, Frame, Line, Mark
from agent.log import EventLog
from agent.sampling.model import Clock
from alerts.database import DatabaseUnusable, Fault, set_aside

FILE = "history.sqlite"
LOCK = "history.lock"
PACE_SECONDS = 1.0  # between two commits: what a kill costs is at most what came within it, and a write
UPKEEP_SECONDS = 60.0  # between two looks for what is too old or too much
MEND_SECONDS = 10.0  # between two attempts to open a file that could not be used
EVEN_SECONDS = 600.0  # that a clock must have gone evenly before anything is dropped for its age
STEP_SECONDS = 5.0  # a clock that is off by more was set
MAX_ENTRIES = 20_000
MAX_BYTES = 64 * 2**20
ENTRY_BYTES = 1000  # what one is taken for, besides its blocks or texts

QUEUE, DISK = "queue", "disk"


class HistoryWriter:
    """`put` may be called from any thread; `run` is one thread's, or `step` is called instead."""

    def __init__(
        self, folder: Path, max_bytes: int, *, clock: Clock | None = None, log: EventLog | None = None
    ) -> None:
        self.path = folder / FILE
        self._lock_path = folder / LOCK
        self._max_bytes = max_bytes
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.history"))
        self._lock = threading.Lock()
        self._waiting: list[Entry] = []
        self._waiting_bytes = 0
        self._lost: Counter[str] = Counter()
        self._losing = False  # for want of room in the queue
        self._database: HistoryDatabase | None = None
        self._lock_file: int | None = None
        self._trouble: str | None = "it is not open yet"
        self._suspect = threading.Event()
        self._mend_at = -1.0  # monotonic
        self._upkeep_at = 0.0
        self._even_since: float | None = None  # monotonic
        self._ahead = 0.0  # of the wall over the monotonic clock
        self._size = 0
        self._stopping = threading.Event()

    @property
    def trouble(self) -> str | None:
        """Why nothing is kept now; None where all is well."""
        return self._trouble

    def lost(self) -> Mapping[str, int]:
        """Entries that were lost, for want of room in the queue and on the disk."""
        with self._lock:
            return {QUEUE: self._lost[QUEUE], DISK: self._lost[DISK]}

    def size_bytes(self) -> int:
        """Of the file, as of the last look."""
        return self._size

    def put(self, entry: Entry) -> bool:
        """Have it kept; False where it is lost, since those before it were not written yet. Never waits for a disk."""
        size = _size(entry)
        with self._lock:
            fits = len(self._waiting) < MAX_ENTRIES and self._waiting_bytes + size <= MAX_BYTES
            if fits:
                self._waiting.append(entry)
                self._waiting_bytes += size
            else:
                self._lost[QUEUE] += 1
            began = not fits and not self._losing
            self._losing = not fits
        if began and not isinstance(entry, Line):  # a line about a line that was lost would be lost as well
            action = "look at the disk of the state folder: it does not keep up"
            self._log.event("history is lost", level=logging.WARNING, reason="the queue is full", action=action)
        return fits

    def suspect(self) -> None:
        """A reader found the file damaged: have it looked at."""
        self._suspect.set()

    def run(self) -> None:
        """Write at each pace until `stop`; then once more."""
        while not self._stopping.wait(PACE_SECONDS):
            self._guarded_step()
        self._guarded_step()
        self._close()

    def stop(self) -> None:
        """End `run` after what waits now is written."""
        self._stopping.set()

    def step(self) -> None:
        """Write what waits, and look after the file where it is time."""
        self._watch_clock()
        if self._suspect.is_set():
            self._suspect.clear()
            self._give_up(DatabaseUnusable(Fault.CORRUPT, "a reader met damage"))
        if self._database is None and not self._open():
            return
        if (database := self._database) is None:
            return
        trouble = self._write(database, self._take())
        if trouble is None or trouble.fault is Fault.UNWRITABLE:  # where nothing can be written, what is old makes room
            trouble = self._keep_up(database) or trouble
        if trouble is not None:
            self._give_up(trouble)

    # ---- the file -------------------------------------------------------------------------------------------------

    def _write(self, database: HistoryDatabase, entries: Sequence[Entry]) -> DatabaseUnusable | None:
        """All of them, piece by piece; or why not. What is not written is lost, and counted, whatever happened."""
        lost = len(entries)
        try:
            for piece in _pieces(entries):
                self._make_room(database)
                left_out = database.write(piece)
                lost -= len(piece) - len(left_out)
                for why in left_out:  # said once of each kind
                    self._log.on_change("history", why, "cannot be kept", level=logging.WARNING)
        except DatabaseUnusable as error:
            return error
        finally:
            with self._lock:
                self._lost[DISK] += lost
        self._trouble = None
        self._log.on_change("history", str(self.path), "is kept", quiet_first="is kept")
        return None

    def _keep_up(self, database: HistoryDatabase) -> DatabaseUnusable | None:
        """Look after the file where it is time; or why that failed."""
        if self._clock.monotonic() < self._upkeep_at:
            return None
        self._upkeep_at = self._clock.monotonic() + UPKEEP_SECONDS
        try:
            self._look_after(database)
        except DatabaseUnusable as error:
            return error
        return None

    def _guarded_step(self) -> None:
        try:
            self.step()
        except Exception as error:  # noqa: BLE001 - the thread must outlive a fault of ours; its entries are lost
            self._log.on_change("history writer", "step", f"{type(error).__name__}: {error}", level=logging.ERROR)

    def _open(self) -> bool:
        now = self._clock.monotonic()
        if now < self._mend_at:
            return False
        self._mend_at = now + MEND_SECONDS
        try:
            self._claim()
            self._database = HistoryDatabase(self.path, self._max_bytes)
        except DatabaseUnusable as error:
            self._give_up(error)
            return self._database is not None
        self._upkeep_at = now
        return True

    def _claim(self) -> None:
        """Take the folder's lock, which a kill frees: two agents must not write one file. Raises DatabaseUnusable."""
        if self._lock_file is not None:
            return
        try:
            self._lock_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise unusable(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise DatabaseUnusable(Fault.LOCKED, "another agent keeps its history there") from error
        self._lock_file = file

    def _give_up(self, error: DatabaseUnusable) -> None:
        """Close the file, say why, and where it is damaged begin another one."""
        if self._database is not None:
            self._database.close()
            self._database = None
        self._trouble = str(error)
        self._log.on_change("history", str(self.path), str(error), level=logging.WARNING)
        if error.fault is Fault.CORRUPT:
            with suppress(OSError):
                set_aside(self.path)
        if error.fault in (Fault.CORRUPT, Fault.REPLACED):
            try:
                self._database = HistoryDatabase(self.path, self._max_bytes)
            except DatabaseUnusable as again:
                self._trouble = str(again)
        self._mend_at = self._clock.monotonic() + (
            MEND_SECONDS if error.fault is not Fault.UNWRITABLE else PACE_SECONDS
        )

    def _look_after(self, database: HistoryDatabase) -> None:
        if self._even_since is not None and self._clock.monotonic() - self._even_since >= EVEN_SECONDS:
            database.expire(self._clock.wall())
        self._make_room(database)
        self._size = database.used_bytes()

    def _make_room(self, database: HistoryDatabase) -> None:
        if database.shrink():
            self._log.on_change("history", "size", "full, so that the oldest makes room", limit_bytes=self._max_bytes)

    def _watch_clock(self) -> None:
        """A clock that was set says nothing of ages: the wrong time may be the one before or the one after."""
        now = self._clock.monotonic()
        ahead = self._clock.wall() - now
        if self._even_since is None or abs(ahead - self._ahead) > STEP_SECONDS:
            self._even_since = now
        self._ahead = ahead

    def _take(self) -> list[Entry]:
        with self._lock:
            entries, self._waiting, self._waiting_bytes = self._waiting, [], 0
            return entries

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _pieces(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Cut into what goes into one transaction each."""
    first, size = 0, 0
    for number, entry in enumerate(entries):
        size += _size(entry)
        if size >= PIECE_BYTES:
            yield entries[first : number + 1]
            first, size = number + 1, 0
    if first < len(entries):
        yield entries[first:]


def _size(entry: Entry) -> int:
    """Bytes that it takes, about."""
    if isinstance(entry, Frame):
        return ENTRY_BYTES + entry.states.nbytes
    if isinstance(entry, Mark):
        return ENTRY_BYTES + _bytes(entry.text) + _bytes(repr(entry.detail))
    return ENTRY_BYTES + (_bytes(entry.text) if isinstance(entry, Line) else 0)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
