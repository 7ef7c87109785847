"""What is due to be told, and what one notice then says. Pure; times are seconds of a monotonic clock.

Changes collect for half a second, so that what happens together is told together. After that a group is told of at most
once a minute, unless something worse than what its last message told begins. All that is due when a message may go
shares that message, whatever its groups: nothing waits behind another message of the same instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alerts.model import Alert, Change, ChangeKind
from alerts.notice import NOTHING, Entry, News, Notice

GROUP_BY = ("engine_id",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a sink is told something."""

    collect_seconds: float = 0.5
    group_seconds: float = 60.0
    per_second: float = 1.0  # messages, over time
    burst: int = 1  # messages at once
    storm_alerts: int = 20  # a message of more alerts than this begins a storm,
    storm_seconds: float = 10.0  # in which messages are at least this far apart
    parked_seconds: float = 3600.0  # between attempts at a receiver that refuses everything for good
    resend_seconds: float | None = None  # for a receiver that forgets an alert which it is not told again
    most_changes: int | None = None  # in one message

    @classmethod
    def at_once(cls, *, resend_seconds: float | None = None, most_changes: int | None = None) -> Cadence:
        """For a machine, which groups by itself or not at all."""
        return cls(
            group_seconds=0.0,
            per_second=10.0,
            burst=10,
            storm_seconds=0.0,
            parked_seconds=300.0,  # what stands before a machine may say that it is no more while it starts anew
            resend_seconds=resend_seconds,
            most_changes=most_changes,
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """One change that a sink is still to be told."""

    change: Change
    group: str
    since: float


@dataclass(frozen=True, slots=True)
class GroupMark:
    """The last message that told something of a group."""

    at: float
    rank: int  # of the worst alert of the group that it told of


@dataclass(frozen=True, slots=True)
class Plan:
    """What is due now, in order of sequence; where nothing is, `next_at` says when something may be."""

    due: tuple[Waiting, ...]
    next_at: float | None
    unfinished: frozenset[str] = frozenset()  # groups of which something is due that one message has no room for


def group_of(alert: Alert, group_by: Sequence[str] = GROUP_BY) -> str:
    """Name of the group that an alert is told with: the values of those labels, or its rule where it has none."""
    values = [alert.labels[name] for name in group_by if alert.labels.get(name)]
    return "\x1f".join(values) if values else f"\x1f{alert.rule}"


def plan(
    waiting: Iterable[Waiting],
    marks: Mapping[str, GroupMark],
    cadence: Cadence,
    *,
    now: float,
    calm_at: float = 0.0,
) -> Plan:
    """What is due at `now`; `calm_at` is when a storm is over."""
    groups: dict[str, list[Waiting]] = {}
    for one in waiting:
        groups.setdefault(one.group, []).append(one)
    due: list[Waiting] = []
    times: list[float] = []
    for name, members in groups.items():
        at = max(_due_at(members, marks.get(name), cadence), calm_at)
        if at <= now:
            due += members
        times.append(at)
    due.sort(key=lambda one: one.change.sequence)
    fits = len(due) if cadence.most_changes is None else cadence.most_changes
    return Plan(tuple(due[:fits]), min(times, default=None), frozenset(one.group for one in due[fits:]))


def compose(
    due: Sequence[Waiting],
    told: Mapping[str, Alert],
    *,
    at: float,
    counted: Mapping[str, int] = NOTHING,
    list_url: str | None = None,
    uphold: bool = False,
    unfinished: frozenset[str] = frozenset(),
) -> Notice:
    """One notice of those changes, in order of sequence, for a sink that was `told` of those open alerts, by
    fingerprint; `uphold` tells of these once more. The notice does not count as one of `unfinished` groups, so that the
    rest of these need not wait. `at` is in Unix seconds."""
    changes: dict[str, list[Change]] = {}
    for one in due:
        changes.setdefault(one.change.alert.fingerprint, []).append(one.change)
    entries = [_entry(of_one, told.get(fingerprint)) for fingerprint, of_one in changes.items()]
    if uphold:
        entries += [
            Entry(alert, News.UPHELD, told=alert.severity)
            for fingerprint, alert in told.items()
            if fingerprint not in changes
        ]
    return Notice(
        at=at,
        entries=tuple(sorted(entries, key=_worst_first)),
        sequences=tuple(one.change.sequence for one in due),
        groups={group: rank for group, rank in _ranks(due).items() if group not in unfinished},
        counted=counted,
        list_url=list_url,
    )


def _due_at(members: Sequence[Waiting], mark: GroupMark | None, cadence: Cadence) -> float:
    at = min(one.since for one in members) + cadence.collect_seconds
    if mark is None:
        return at
    worse = [
        one.since
        for one in members
        if one.change.kind in (ChangeKind.FIRED, ChangeKind.ESCALATED) and one.change.alert.severity.rank > mark.rank
    ]
    regular = max(at, mark.at + cadence.group_seconds)
    return min(regular, min(worse) + cadence.collect_seconds) if worse else regular


def _ranks(due: Sequence[Waiting]) -> Mapping[str, int]:
    ranks: dict[str, int] = {}
    for one in due:
        ranks[one.group] = max(ranks.get(one.group, 0), one.change.alert.severity.rank)
    return ranks


def _entry(changes: Sequence[Change], told: Alert | None) -> Entry:
    """What is new of one alert. Of several episodes in one notice the newest is shown, and all are counted."""
    last = changes[-1]
    kinds = {change.kind for change in changes}
    firings = sum(change.kind is ChangeKind.FIRED for change in changes)
    if not last.alert.firing:
        news = News.RESOLVED if told is not None else News.BRIEF
    elif firings or told is None:
        news = News.FIRING
    else:
        news = News.ESCALATED if ChangeKind.ESCALATED in kinds else News.REPEATED
    return Entry(last.alert, news, firings, last.reason, told.severity if told else None)


def _worst_first(entry: Entry) -> tuple[bool, int, bool, float, str]:
    alert = entry.alert
    return entry.over, -alert.severity.rank, entry.news is News.UPHELD, alert.started_at, alert.fingerprint
