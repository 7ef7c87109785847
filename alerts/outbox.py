"""What one sink is still to be told and what it was told. In memory; the store keeps a copy on the disk.

Each method that changes something returns what changed, for that copy. Nothing here is safe for several threads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from alerts.clock import Clock
from alerts.encoding import MISREAD, RowUnreadable, unix_of
from alerts.grouping import GroupMark, Waiting
from alerts.model import Alert, ChangeKind
from alerts.notice import Notice

MOST_WAITING: Final = 10_000  # changes; more are folded into counts
LONGEST_WAIT_SECONDS: Final = 4000.0  # more than a receiver is ever given
SUPERSEDED_BY: Final = {
    ChangeKind.ESCALATED: {ChangeKind.REPEATED, ChangeKind.ESCALATED},
    ChangeKind.RESOLVED: {ChangeKind.REPEATED, ChangeKind.ESCALATED},
}


@dataclass(slots=True)
class Standing:
    """The rest of what a sink's outbox knows. Times are of the monotonic clock."""

    attempts: int = 0  # that failed, since the last one that did not
    not_before: float = 0.0
    failing_since: float | None = None
    in_flight: frozenset[int] = frozenset()  # sequences in a message of which nobody knows yet whether it arrived
    sent_at: float | None = None
    marks: dict[str, GroupMark] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)  # firings by rule, that are told as numbers alone

    def to_json(self, clock: Clock) -> str:
        """With times as Unix seconds, since a monotonic clock means nothing to the next process."""
        ahead = clock.wall() - clock.monotonic()
        plain = {
            "attempts": self.attempts,
            "not_before": self.not_before + ahead,
            "failing_since": None if self.failing_since is None else self.failing_since + ahead,
            "in_flight": sorted(self.in_flight),
            "sent_at": None if self.sent_at is None else self.sent_at + ahead,
            "marks": {name: [mark.at + ahead, mark.rank] for name, mark in self.marks.items()},
            "counted": dict(self.counted),
        }
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, clock: Clock) -> Self:
        """Raises RowUnreadable. A time that the clocks cannot have seen, since one was set, is taken for now, and a
        wait is never longer than it can have been asked for."""
        wall, monotonic = clock.wall(), clock.monotonic()

        def past(unix: float | None) -> float | None:
            return None if unix is None else monotonic - max(0.0, wall - unix_of(unix))

        try:
            plain = json.loads(text)
            wait = min(max(0.0, plain["not_before"] - wall), LONGEST_WAIT_SECONDS)
            # A mark of the future is no mark: it would keep its group silent until that future has come.
            marks = {
                str(name): GroupMark(monotonic - (wall - unix_of(at)), int(rank))
                for name, (at, rank) in plain["marks"].items()
                if unix_of(at) <= wall
            }
            return cls(
                attempts=int(plain["attempts"]),
                not_before=monotonic + wait,
                failing_since=past(plain["failing_since"]),
                in_flight=frozenset(map(int, plain["in_flight"])),
                sent_at=past(plain["sent_at"]),
                marks=marks,
                counted=Counter({str(rule): int(firings) for rule, firings in plain["counted"].items()}),
            )
        except MISREAD as error:
            raise RowUnreadable(repr(error)) from error


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed in one outbox: rows that came and went, and whether the standing did."""

    added: tuple[Waiting, ...] = ()
    removed: tuple[int, ...] = ()  # sequences
    told: tuple[Alert, ...] = ()
    closed: tuple[str, ...] = ()  # fingerprints
    standing: bool = True

    @property
    def removals(self) -> int:
        return len(self.removed)


@dataclass(frozen=True, slots=True)
class Backlog:
    """An outbox at one instant."""

    waiting: tuple[Waiting, ...]  # in order of sequence
    told: Mapping[str, Alert]  # alerts that the sink takes for firing, by fingerprint
    counted: Mapping[str, int]
    marks: Mapping[str, GroupMark]
    attempts: int
    not_before: float
    failing_since: float | None
    sent_at: float | None


class Outbox:
    """Changes in order of sequence. Of one episode at most a firing, one that is between and a resolve wait."""

    def __init__(
        self,
        waiting: Iterable[Waiting] = (),
        told: Iterable[Alert] = (),
        standing: Standing | None = None,
        *,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.standing = standing or Standing()
        self._most_waiting = most_waiting
        self._waiting = {one.change.sequence: one for one in waiting}
        self._told = {alert.fingerprint: alert for alert in told}
        self._episodes: dict[str, list[int]] = {}
        for one in self._waiting.values():
            self._episodes.setdefault(one.change.alert.episode, []).append(one.change.sequence)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Waiting]:
        return self._waiting.values()

    @property
    def told(self) -> Iterable[Alert]:
        return self._told.values()

    def backlog(self) -> Backlog:
        standing = self.standing
        return Backlog(
            waiting=tuple(self._waiting.values()),
            told=dict(self._told),
            counted=dict(standing.counted),
            marks=dict(standing.marks),
            attempts=standing.attempts,
            not_before=standing.not_before,
            failing_since=standing.failing_since,
            sent_at=standing.sent_at,
        )

    def put(self, one: Waiting) -> Delta:
        """Take a change on. What it makes superfluous goes: a repeat behind anything of its episode, and what is
        between a firing and its resolve."""
        change = one.change
        of_episode = self._episodes.get(change.alert.episode, [])
        if change.kind is ChangeKind.REPEATED and of_episode:
            return Delta(removed=(change.sequence,), standing=False)
        superseded = SUPERSEDED_BY.get(change.kind, set())
        gone = [sequence for sequence in of_episode if self._waiting[sequence].change.kind in superseded]
        for sequence in gone:
            self._drop(sequence)
        self._waiting[change.sequence] = one
        self._episodes.setdefault(change.alert.episode, []).append(change.sequence)
        return Delta(added=(one,), removed=tuple(gone), standing=False)

    def fold(self) -> Delta:
        """Where too much waits, turn the oldest episodes into counts. A resolve of a firing that was told stays."""
        excess = len(self._waiting) - self._most_waiting
        if excess <= 0:
            return Delta(standing=False)
        removed: list[int] = []
        told: list[Alert] = []
        # Those that are over come first: for them nothing but their count is lost.
        for wants_resolve in (True, False):
            for sequence in list(self._waiting):
                if len(removed) >= excess:
                    break
                waiting = self._waiting.get(sequence)
                if waiting is None or waiting.change.kind is not ChangeKind.FIRED:
                    continue
                members = list(self._episodes[waiting.change.alert.episode])
                if not self.standing.in_flight.isdisjoint(members):
                    continue
                last = self._waiting[members[-1]].change
                if (last.kind is ChangeKind.RESOLVED) is not wants_resolve:
                    continue
                self.standing.counted[waiting.change.alert.rule] += 1
                if not wants_resolve:  # it will have been told, as a number, when its resolve is
                    self._told[last.alert.fingerprint] = last.alert
                    told.append(last.alert)
                for member in members:
                    self._drop(member)
                removed += members
        return Delta(removed=tuple(removed), told=tuple(told))

    def finish(self, notice: Notice, now: float, group_seconds: float) -> Delta:
        """The notice was delivered; its groups are marked, and marks older than `group_seconds` have had their time."""
        standing = self.standing
        standing.attempts, standing.not_before, standing.failing_since = 0, 0.0, None
        standing.in_flight, standing.sent_at = frozenset(), now
        standing.counted -= Counter(notice.counted)  # in-place subtraction keeps what is above zero alone
        for group, rank in notice.groups.items():
            standing.marks[group] = GroupMark(now, rank)
        standing.marks = {name: mark for name, mark in standing.marks.items() if now - mark.at < group_seconds}
        return self._told_of(notice)

    def give_up(self, notice: Notice) -> Delta:
        """The notice cannot be delivered. Its firings are counted in the next one that can."""
        standing = self.standing
        standing.attempts, standing.not_before, standing.in_flight = 0, 0.0, frozenset()
        for entry in notice.entries:
            if entry.firings:
                standing.counted[entry.alert.rule] += entry.firings
        return self._told_of(notice)

    def _told_of(self, notice: Notice) -> Delta:
        told: list[Alert] = []
        closed: list[str] = []
        for entry in notice.entries:
            fingerprint = entry.alert.fingerprint
            if entry.over:
                if self._told.pop(fingerprint, None) is not None:
                    closed.append(fingerprint)
            elif self._told.get(fingerprint) != entry.alert:
                self._told[fingerprint] = entry.alert
                told.append(entry.alert)
        for sequence in notice.sequences:
            if sequence in self._waiting:
                self._drop(sequence)
        return Delta(removed=notice.sequences, told=tuple(told), closed=tuple(closed))

    def _drop(self, sequence: int) -> None:
        episode = self._waiting.pop(sequence).change.alert.episode
        members = self._episodes[episode]
        members.remove(sequence)
        if not members:
            del self._episodes[episode]
