"""What an agent before us left in the store: its rows made sense of, and put in front of what has come since.

Mostly nothing has. But a file that could not be opened at the start, since its volume was not ready, is read later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from alerts.clock import Clock
from alerts.database import Rows
from alerts.encoding import RowUnreadable, load_alert, load_change, load_mute, unix_of
from alerts.errors import AlertsError
from alerts.grouping import Waiting, group_of
from alerts.model import Alert, ChangeKind
from alerts.mutes import Mute
from alerts.outbox import Outbox, Standing

LAST_SEQUENCE: Final = 2**62  # no agent gives so many: one beyond is damage, and SQLite could not hold the next


@dataclass(slots=True)
class Since:
    """What has happened while the file was not read, which makes what the file says of it out of date."""

    changed: set[str] = field(default_factory=set)  # fingerprints
    heard: dict[str, set[str]] = field(default_factory=dict)  # by sink: fingerprints of what it was told of


@dataclass(slots=True)
class Left:
    """What the file holds, by sink where it is of one."""

    sequence: int = 0  # the last one that was given
    states: dict[str, str] = field(default_factory=dict)
    mutes: dict[str, Mute] = field(default_factory=dict)
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)  # sinks that a message was on its way to
    dropped: list[str] = field(default_factory=list)  # sinks, one for each change that nobody will be told
    unread: int = 0  # rows that are none of ours
    as_it_is: bool = True  # and not to be written anew: nothing was left out or numbered anew


def read_rows(
    rows: Rows, sinks: Collection[str], clock: Clock, group_by: Sequence[str], *, numbered_since: bool
) -> Left:
    """`numbered_since`: sequences were given since, so that those of the file go below them, in their order."""
    left = Left(states={name: state for name, state in rows.states.items() if state is not None})
    for name, text in rows.mutes.items():
        try:
            left.mutes[name] = load_mute(text or "")
        except (RowUnreadable, AlertsError):
            left.unread += 1
    waiting = _read_waiting(left, rows, sinks, clock, group_by, numbered_since=numbered_since)
    told: dict[str, list[Alert]] = {sink: [] for sink in sinks}
    for (sink, _), text in rows.told.items():
        try:
            told[sink].append(load_alert(text or ""))
        except KeyError:
            continue
        except RowUnreadable:
            left.unread += 1
    for sink in sinks:
        standing = _read_standing(left, sink, rows.standing.get(sink), clock)
        left.outboxes[sink] = Outbox(waiting[sink], told[sink], standing)
    named = {sink for sink, _, _, _ in rows.waiting} | {sink for sink, _ in rows.told} | set(rows.standing)
    left.as_it_is = left.as_it_is and not left.unread and named <= set(sinks)
    return left


def join(before: Outbox, since: Outbox, heard: AbstractSet[str]) -> tuple[Outbox, int]:
    """One sink's outbox of what the file held and what has come since, and how many changes are not told therefore.

    `before` has lower sequences than `since`. What the sink `heard` of an alert since is newer than what the file says:
    firings of that are counted, and its end is not told in the midst of the next episode. An alert that the file has
    as told, or to be told, and that was found firing since, still fires, and is not told as a new one.
    """
    standing = _joined_standing(before.standing, since.standing)
    in_flight = {one.change.alert.fingerprint for one in since.waiting if one.change.sequence in standing.in_flight}
    heard = heard | in_flight | {alert.fingerprint for alert in since.told}
    told = {alert.fingerprint: alert for alert in before.told if alert.fingerprint not in heard}
    firing = dict(told)
    waiting, superseded = [], 0
    for one in before.waiting:
        alert = one.change.alert
        if alert.fingerprint in heard:
            standing.counted[alert.rule] += one.change.kind is ChangeKind.FIRED
            superseded += 1
            continue
        waiting.append(one)
        if alert.firing:
            firing[alert.fingerprint] = alert
        else:
            firing.pop(alert.fingerprint, None)
    for one in since.waiting:
        known = firing.pop(one.change.alert.fingerprint, None)  # of the first change of it alone
        if known is not None and one.change.kind is ChangeKind.FIRED:
            if one.change.alert.severity.rank <= known.severity.rank:
                superseded += 1
                continue
            one = replace(one, change=replace(one.change, kind=ChangeKind.ESCALATED))
        waiting.append(one)
    return Outbox(waiting, (told | {alert.fingerprint: alert for alert in since.told}).values(), standing), superseded


def _read_waiting(
    left: Left, rows: Rows, sinks: Collection[str], clock: Clock, group_by: Sequence[str], *, numbered_since: bool
) -> Mapping[str, Sequence[Waiting]]:
    waiting: dict[str, list[Waiting]] = {sink: [] for sink in sinks}
    wall, monotonic = clock.wall(), clock.monotonic()
    numbers = _renumbered(left, rows, numbered_since=numbered_since)
    for sink, sequence, since, text in rows.waiting:
        try:
            if sequence not in numbers:
                raise RowUnreadable("no sequence")
            change, came = load_change(numbers[sequence], text), monotonic - max(0.0, wall - unix_of(since))
            waiting[sink].append(Waiting(change, group_of(change.alert, group_by), came))
        except (KeyError, RowUnreadable) as error:
            left.unread += isinstance(error, RowUnreadable)
            left.dropped.append(sink)
    return waiting


def _renumbered(left: Left, rows: Rows, *, numbered_since: bool) -> Mapping[int, int]:
    """Sequences of the file as they are to be; sets the last one that was given."""
    found = sorted({sequence for _, sequence, _, _ in rows.waiting if isinstance(sequence, int)})
    last = max([rows.sequence if isinstance(rows.sequence, int) else 0, *found])
    wild = last > LAST_SEQUENCE or any(sequence < -LAST_SEQUENCE for sequence in found)
    if not wild:
        left.sequence = max(last, 0)
    if not wild and not numbered_since:
        return {sequence: sequence for sequence in found}
    left.as_it_is = False
    return {sequence: index - len(found) for index, sequence in enumerate(found)}


def _read_standing(left: Left, sink: str, text: str | None, clock: Clock) -> Standing:
    if text is None:
        return Standing()
    try:
        standing = Standing.from_json(text, clock)
    except RowUnreadable:
        left.unread += 1
        return Standing()
    if standing.in_flight:
        standing.in_flight, standing.sent_at = frozenset(), clock.monotonic()
        left.unsure.append(sink)
    return standing


def _joined_standing(before: Standing, since: Standing) -> Standing:
    """Of a sink that was tried since, how that went; which groups were told of, and what is to be counted, adds up."""
    tried = since if since.attempts or since.sent_at is not None else before
    return replace(
        tried,
        in_flight=since.in_flight,
        marks=before.marks | since.marks,
        counted=before.counted + since.counted,
    )
