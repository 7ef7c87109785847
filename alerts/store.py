"""Keeps what must outlive the agent: states of alerts, what each sink is still to be told, and mutes.

Everything is in memory, and each change is on the disk before the method that made it returns. Where the disk fails,
memory alone goes on: alerts are told all the same, one log line says so, and the file is written anew when it can be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from alerts.clock import SYSTEM_CLOCK, Clock
from alerts.database import Database, DatabaseUnusable, Fault, Rows, set_aside
from alerts.encoding import dump_alert, dump_change, dump_mute
from alerts.grouping import GROUP_BY, Waiting, group_of
from alerts.log import log_event
from alerts.model import Change, Severity
from alerts.mutes import Mute
from alerts.notice import Notice
from alerts.outbox import Backlog, Delta, Outbox
from alerts.restoring import Since, join, read_rows
from alerts.tally import Counted, Tally

LOCK_WAIT_SECONDS: Final = 5.0  # an agent that is being replaced may still be ending
MEND_SECONDS: Final = 30.0  # between attempts to write the file again
LOCK_PAUSE_SECONDS: Final = 0.1
MUTE_KEPT_SECONDS: Final = 86_400.0  # after it expired: the clock may have been wrong
EVEN_SECONDS: Final = 600.0  # that the clock must say so before a mute is dropped
NOTHING_LEAST: Final[Mapping[str, Severity]] = MappingProxyType({})


class Store:
    """One SQLite file, or memory alone with no `path`. Safe for several threads. No method raises for the disk."""

    def __init__(
        self,
        path: Path | None,
        sinks: Iterable[str] = (),
        *,
        least: Mapping[str, Severity] = NOTHING_LEAST,
        clock: Clock = SYSTEM_CLOCK,
        group_by: Sequence[str] = GROUP_BY,
        lock_wait_seconds: float = LOCK_WAIT_SECONDS,
        mend_seconds: float = MEND_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Reads what an earlier agent left; waits for one that still holds the file, that long.

        `least` names sinks that are told only of alerts which are, or become, at least so bad.
        """
        self.path = path
        self.tally = Tally(sinks := tuple(sinks))
        self._least = dict(least)
        self._clock = clock
        self._group_by = tuple(group_by)
        self._mend_seconds = mend_seconds
        self._lock = threading.RLock()
        self._database: Database | None = None
        self._trouble: str | None = None if path else "no path is set"
        self._mend_at: float | None = None  # None: never again
        self._replaced = False
        self._unread: Since | None = None  # the file may hold what we could not read at the start
        self._sequence = 0
        self._states: dict[str, str] = {}
        self._states_read: dict[str, str] = {}  # from the file, and not yet asked for
        self._mutes: dict[str, Mute] = {}
        self._expired: dict[str, float] = {}  # since when, by the monotonic clock, the wall clock says so of a mute
        self._outboxes = {sink: Outbox() for sink in sinks}
        self._listeners: list[Callable[[], None]] = []
        if path is not None:
            self._open(path, clock.monotonic() + lock_wait_seconds, pause)

    @property
    def durable(self) -> bool:
        """Whether what is kept outlives the agent."""
        return self._database is not None

    @property
    def trouble(self) -> str | None:
        """Why it is not durable."""
        return self._trouble

    def load_states(self) -> dict[str, str]:
        """By fingerprint, as they were committed last."""
        with self._lock:
            self._states_read = {}
            return dict(self._states)

    def take_late_states(self) -> dict[str, str]:
        """Those of a file that could be read only after they were loaded; each is given once."""
        with self._lock:
            found, self._states_read = self._states_read, {}
            return found

    def commit(self, states_changed: Mapping[str, str | None], changes: Sequence[Change]) -> tuple[Change, ...]:
        """Keep new states (None: the state is gone) and let every sink be told of the changes, both or neither.

        Returns the changes with the sequences that they were given.
        """
        if not states_changed and not changes:
            with self._lock:
                if self._database is None:  # where nothing happens, what is in the file waits for it all the same
                    self._mend()
            return ()
        with self._lock:
            if self._unread is not None:
                self._unread.changed |= {change.alert.fingerprint for change in changes}
            for fingerprint, state in states_changed.items():
                if state is None:
                    self._states.pop(fingerprint, None)
                else:
                    self._states[fingerprint] = state
            recorded = tuple(replace(change, sequence=self._sequence + n) for n, change in enumerate(changes, start=1))
            self._sequence += len(recorded)
            now = self._clock.monotonic()
            deltas = [delta for sink in self._outboxes for delta in self._enqueue(sink, recorded, now)]
            kept = self._write(deltas, states=states_changed, sequence=self._sequence)
            if not kept and self.path is not None:
                for sink in self._outboxes:
                    self.tally.add(sink, Counted.NOT_KEPT, len(recorded))
        if recorded:
            for listener in self._listeners:
                listener()
        return recorded

    def on_commit(self, listener: Callable[[], None]) -> None:
        """Call it after each commit that sinks are to be told of."""
        self._listeners.append(listener)

    def mutes(self) -> tuple[Mute, ...]:
        """Those that have not expired, the one that expires first first."""
        with self._lock:
            now = self._clock.wall()
            self._forget_mutes(now)
            active = [mute for mute in self._mutes.values() if mute.active(now)]
            return tuple(sorted(active, key=lambda mute: (mute.expires_at, mute.id)))

    def add_mute(self, mute: Mute) -> None:
        """One of the same id gives way."""
        with self._lock:
            self._mutes[mute.id] = mute
            self._write(mutes={mute.id: dump_mute(mute)})

    def remove_mute(self, mute_id: str) -> bool:
        """False where there is none, or where it has expired."""
        with self._lock:
            if (mute := self._mutes.pop(mute_id, None)) is None:
                return False
            self._write(mutes={mute_id: None})
            return mute.active(self._clock.wall())

    def backlog(self, sink: str) -> Backlog:
        """What a sink is still to be told, now."""
        with self._lock:
            return self._outboxes[sink].backlog()

    def begin(self, sink: str, notice: Notice) -> None:
        """The notice is about to be sent: should the agent end before it says what came of that, nobody knows."""
        with self._lock:
            self._outboxes[sink].standing.in_flight = frozenset(notice.sequences)
            self._write([(sink, Delta())])

    def finish(self, sink: str, notice: Notice, *, group_seconds: float) -> None:
        """It was delivered, and its groups are told of nothing more for that long."""
        with self._lock:
            self._note_heard(sink, notice)
            self._write([(sink, self._outboxes[sink].finish(notice, self._clock.monotonic(), group_seconds))])

    def postpone(self, sink: str, seconds: float) -> int:
        """It was not; it is to be tried again after that long. Returns how often that has happened in a row."""
        with self._lock:
            standing, now = self._outboxes[sink].standing, self._clock.monotonic()
            standing.attempts += 1
            standing.not_before = now + seconds
            standing.in_flight = frozenset()
            if standing.failing_since is None:
                standing.failing_since = now
            self._write([(sink, Delta())])
            return standing.attempts

    def give_up(self, sink: str, notice: Notice) -> None:
        """It never will be: its firings are counted in the next notice that is."""
        with self._lock:
            self._note_heard(sink, notice)
            self._write([(sink, self._outboxes[sink].give_up(notice))])

    def close(self) -> None:
        """Give the file up. What is done with the store after that stays in memory."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database, self._mend_at, self._trouble = None, None, "closed"

    def _enqueue(self, sink: str, changes: Sequence[Change], now: float) -> list[tuple[str, Delta]]:
        outbox, least = self._outboxes[sink], self._least.get(sink, Severity.INFO)
        # A severity does not fall within an episode: of one that was told, the end is told too.
        changes = [change for change in changes if change.alert.severity.rank >= least.rank]
        deltas = [outbox.put(Waiting(change, group_of(change.alert, self._group_by), now)) for change in changes]
        coalesced = sum(delta.removals for delta in deltas)
        folded = outbox.fold()
        self.tally.add(sink, Counted.COALESCED, coalesced)
        self.tally.add(sink, Counted.FOLDED, folded.removals)
        return [(sink, delta) for delta in (*deltas, folded)]

    def _write(
        self,
        deltas: Iterable[tuple[str, Delta]] = (),
        *,
        states: Mapping[str, str | None] | None = None,
        mutes: Mapping[str, str | None] | None = None,
        sequence: int | None = None,
    ) -> bool:
        """Bring the disk up to memory; whether it is."""
        if self._database is None:
            return self._mend()
        deltas = tuple(deltas)
        ahead = self._clock.wall() - self._clock.monotonic()
        told: dict[tuple[str, str], str | None] = {}
        for sink, delta in deltas:
            told |= {(sink, alert.fingerprint): dump_alert(alert) for alert in delta.told}
            told |= dict.fromkeys((sink, fingerprint) for fingerprint in delta.closed)
        rows = Rows(
            sequence=sequence,
            states=states or {},
            waiting=[row for sink, delta in deltas for row in _waiting_rows(sink, delta.added, ahead)],
            waited=[(sink, number) for sink, delta in deltas for number in delta.removed],
            told=told,
            standing={sink: self._standing(sink) for sink in {sink for sink, delta in deltas if delta.standing}},
            mutes=mutes or {},
        )
        try:
            self._database.write(rows)
        except DatabaseUnusable as error:
            self._lose(error)
            return self._mend()
        return True

    def _standing(self, sink: str) -> str:
        return self._outboxes[sink].standing.to_json(self._clock)

    def _everything(self) -> Rows:
        ahead = self._clock.wall() - self._clock.monotonic()
        outboxes = self._outboxes.items()
        return Rows(
            sequence=self._sequence,
            states=self._states,
            waiting=[row for sink, outbox in outboxes for row in _waiting_rows(sink, outbox.waiting, ahead)],
            told={(sink, alert.fingerprint): dump_alert(alert) for sink, outbox in outboxes for alert in outbox.told},
            standing={sink: self._standing(sink) for sink in self._outboxes},
            mutes={mute.id: dump_mute(mute) for mute in self._mutes.values()},
        )

    def _open(self, path: Path, until: float, pause: Callable[[float], None]) -> None:
        """At the start, where the file knows more than we do."""
        while True:
            try:
                self._database = Database(path)
                if not self._take_over(self._database.read()):
                    self._rewrite()
                return
            except DatabaseUnusable as error:
                if error.fault is Fault.LOCKED and self._clock.monotonic() < until:
                    pause(LOCK_PAUSE_SECONDS)
                    continue
                self._lose(error)
                if error.fault in (Fault.LOCKED, Fault.FOREIGN, Fault.NEWER):
                    self._mend_at = None  # the file is somebody else's
                    return
                self._unread = Since()
                if error.fault is Fault.CORRUPT:
                    self._mend()
                return

    def _forget_mutes(self, now: float) -> None:
        """Those that expired long ago, by a clock that has said so for a while: one that is ahead for a moment, even by
        years, takes from nobody what they asked for."""
        steady = self._clock.monotonic()
        expired = [name for name, mute in self._mutes.items() if now - mute.expires_at > MUTE_KEPT_SECONDS]
        self._expired = {name: self._expired.get(name, steady) for name in expired}
        gone = [name for name, since in self._expired.items() if steady - since >= EVEN_SECONDS]
        for name in gone:
            del self._mutes[name], self._expired[name]
        if gone:
            self._write(mutes=dict.fromkeys(gone))

    def _note_heard(self, sink: str, notice: Notice) -> None:
        if self._unread is not None:
            self._unread.heard.setdefault(sink, set()).update(entry.alert.fingerprint for entry in notice.entries)

    def _take_over(self, rows: Rows) -> bool:
        """What the agent before us left in the file goes in front of what has come since; whether the file then says
        all of that."""
        since, self._unread = self._unread or Since(), None
        left = read_rows(rows, self._outboxes, self._clock, self._group_by, numbered_since=self._sequence > 0)
        self._sequence = max(self._sequence, left.sequence)
        # A state of ours of which nothing was told is younger than an alert, and knows less of it, than the file's.
        self._states_read = {name: state for name, state in left.states.items() if name not in since.changed}
        self._states |= self._states_read
        self._mutes = left.mutes | self._mutes
        as_it_is = left.as_it_is
        for sink, before in left.outboxes.items():
            joined, superseded = join(before, self._outboxes[sink], since.heard.get(sink, set()))
            folded = joined.fold().removals
            self._outboxes[sink] = joined
            self.tally.add(sink, Counted.COALESCED, superseded)
            self.tally.add(sink, Counted.FOLDED, folded)
            as_it_is = as_it_is and not folded
        for sink in left.unsure:
            self.tally.add(sink, Counted.UNSURE)
        for sink in left.dropped:
            self.tally.add(sink, Counted.DROPPED)
        if left.unread:
            log_event("alert_store_rows_left_out", level=logging.WARNING, path=str(self.path), rows=left.unread)
        for listener in self._listeners:
            listener()
        return as_it_is

    def _rewrite(self) -> None:
        if self._database is not None:
            try:
                self._database.write(self._everything(), anew=True)
            except DatabaseUnusable as error:
                self._lose(error)

    def _lose(self, error: DatabaseUnusable) -> None:
        """Go on in memory alone."""
        if self._database is not None:
            self._database.close()
        self._database = None
        if self._trouble is None:
            log_event(
                "alert_store_in_memory_alone",
                level=logging.WARNING,
                path=str(self.path),
                fault=error.fault.name.lower(),
                reason=error.detail,
                action=f"the file {error.fault.value}; until then a restart forgets what was not told yet",
            )
        self._trouble = str(error)
        self._replaced = error.fault is Fault.REPLACED  # what is there now is not ours to write over
        at_once = error.fault in (Fault.CORRUPT, Fault.REPLACED)
        self._mend_at = self._clock.monotonic() + (0.0 if at_once else self._mend_seconds)

    def _mend(self) -> bool:
        """Where it is time, write everything into the file, which is made anew where it is damaged."""
        now = self._clock.monotonic()
        if self.path is None or self._mend_at is None or now < self._mend_at:
            return False
        self._mend_at = now + self._mend_seconds
        try:
            self._database = self._reopen(self.path)
            self._database.write(self._everything(), anew=True)
        except (DatabaseUnusable, OSError) as error:
            self._trouble = str(error)
            if self._database is not None:
                self._database.close()
            self._database = None
            return False
        self._trouble = None
        log_event("alert_store_written_again", path=str(self.path))
        return True

    def _reopen(self, path: Path) -> Database:
        """The file, to be written anew. What it holds that we could not read at the start is taken over before that;
        what is damaged, or came in our file's place, is kept under another name."""
        stranger, self._replaced = self._replaced and path.exists(), False
        try:
            database = Database(path)  # not where another agent has it
            if not stranger:
                return self._read_late(database)
            database.close()
        except DatabaseUnusable as error:
            if error.fault is not Fault.CORRUPT:
                self._replaced = stranger
                raise
        log_event("alert_store_set_aside", level=logging.WARNING, path=str(path), aside=str(set_aside(path)))
        self._unread = None
        return Database(path)

    def _read_late(self, database: Database) -> Database:
        if self._unread is not None:
            try:
                self._take_over(database.read())
            except DatabaseUnusable:
                database.close()
                raise
        return database


def _waiting_rows(sink: str, waiting: Iterable[Waiting], ahead: float) -> list[tuple[str, int, float, str]]:
    return [(sink, one.change.sequence, one.since + ahead, dump_change(one.change)) for one in waiting]
