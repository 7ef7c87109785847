"""When something is due and what one notice then says; and what an outbox gives up first where too much waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alerts.grouping import Cadence, GroupMark, Waiting, compose, group_of, plan
from alerts.model import Alert, Change, ChangeKind, Severity
from alerts.notice import News
from alerts.outbox import Outbox
from tests.alerts.conftest import START, fired, make_alert, resolved

CRITICAL = Severity.CRITICAL
NOW = 100.0


def waiting(*changes: Change, since: float = NOW) -> list[Waiting]:
    return [
        Waiting(replace(change, sequence=number), group_of(change.alert), since)
        for number, change in enumerate(changes, start=1)
    ]


def due(found: Sequence[Waiting], *, now: float, calm_at: float = 0.0, **marks: GroupMark) -> tuple[list[int], float]:
    """Sequences that are due, and when the next look is worth it."""
    result = plan(found, marks, Cadence(), now=now, calm_at=calm_at)
    assert result.next_at is not None
    return [one.change.sequence for one in result.due], result.next_at


def test_what_happens_together_is_told_together() -> None:
    found = waiting(fired(make_alert("a"))) + waiting(fired(make_alert("b")), since=NOW + 0.3)
    assert due(found, now=NOW + 0.4) == ([], NOW + 0.5)
    assert due(found, now=NOW + 0.5)[0] == [1]
    assert due(found, now=NOW + 0.8)[0] == [1, 1]


def test_a_group_is_told_of_once_a_minute() -> None:
    found = waiting(resolved(make_alert("a")), fired(make_alert("b")))
    mark = GroupMark(NOW - 10.0, Severity.WARNING.rank)
    assert due(found, now=NOW + 1.0, a=mark) == ([2], NOW + 0.5)
    assert due(found, now=NOW + 50.0, a=mark)[0] == [1, 2]


def test_something_worse_does_not_wait_for_the_minute() -> None:
    found = waiting(fired(make_alert("a", severity=CRITICAL)), resolved(make_alert("a", rule="other")))
    assert due(found, now=NOW + 0.5, a=GroupMark(NOW, Severity.WARNING.rank))[0] == [1, 2]
    assert due(found, now=NOW + 0.5, a=GroupMark(NOW, CRITICAL.rank))[0] == []
    over = waiting(resolved(make_alert("a", severity=CRITICAL)))
    assert due(over, now=NOW + 0.5, a=GroupMark(NOW, Severity.WARNING.rank))[0] == []


def test_in_a_storm_everything_waits_for_the_calm() -> None:
    found = waiting(fired(make_alert("a", severity=CRITICAL)))
    assert due(found, now=NOW + 5.0, calm_at=NOW + 9.0) == ([], NOW + 9.0)
    assert due(found, now=NOW + 9.0, calm_at=NOW + 9.0)[0] == [1]


def test_nothing_waits_and_nothing_is_due() -> None:
    assert plan([], {}, Cadence(), now=NOW).next_at is None


def test_a_message_holds_no_more_than_it_may_and_the_rest_follows_at_once() -> None:
    found = waiting(fired(make_alert("a")), fired(make_alert("b")), fired(make_alert("a", rule="other")))
    result = plan(found, {}, Cadence(most_changes=2), now=NOW + 1)
    assert [one.change.sequence for one in result.due] == [1, 2]
    notice = compose(result.due, {}, at=START, unfinished=result.unfinished)
    assert notice.groups == {"b": 1}  # the group of "a" is not told yet, so that nothing of it waits for a minute


@pytest.mark.parametrize(
    ("labels", "group"),
    [({"engine_id": "a", "pool": "p"}, "a"), ({"pool": "p"}, "\x1fr"), ({"engine_id": ""}, "\x1fr")],
)
def test_a_group_is_an_engine_or_else_a_rule(labels: dict[str, str], group: str) -> None:
    assert group_of(make_alert(rule="r", labels=labels)) == group


ALERT = make_alert("a")
NEXT = make_alert("a", episode=2)
FIRED, OVER = fired(ALERT), resolved(ALERT)
FIRED_2, OVER_2 = fired(NEXT), resolved(NEXT)
REPEATED = Change(0, ChangeKind.REPEATED, ALERT, START)
WORSE = Change(0, ChangeKind.ESCALATED, replace(ALERT, severity=CRITICAL), START)


@pytest.mark.parametrize(
    ("changes", "told", "news", "firings"),
    [
        ([FIRED], None, News.FIRING, 1),
        ([FIRED, WORSE], None, News.FIRING, 1),
        ([FIRED, OVER], None, News.BRIEF, 1),
        ([OVER], ALERT, News.RESOLVED, 0),
        ([OVER], None, News.BRIEF, 0),
        ([REPEATED], ALERT, News.REPEATED, 0),
        ([REPEATED], None, News.FIRING, 0),
        ([WORSE], ALERT, News.ESCALATED, 0),
        ([OVER, FIRED_2], ALERT, News.FIRING, 1),
        ([OVER, FIRED_2, OVER_2], ALERT, News.RESOLVED, 1),
        ([FIRED, OVER, FIRED_2, OVER_2], None, News.BRIEF, 2),
        ([FIRED, OVER, FIRED_2], None, News.FIRING, 2),
    ],
)
def test_what_is_new_of_an_alert(changes: list[Change], told: Alert | None, news: News, firings: int) -> None:
    notice = compose(waiting(*changes), {ALERT.fingerprint: told} if told else {}, at=START)
    [entry] = notice.entries
    assert (entry.news, entry.firings) == (news, firings)
    assert entry.alert == changes[-1].alert
    assert entry.told == (told.severity if told else None)
    assert notice.sequences == tuple(range(1, len(changes) + 1))


def test_the_worst_comes_first_and_what_is_over_last() -> None:
    info, critical = make_alert("i", severity=Severity.INFO), make_alert("c", severity=CRITICAL)
    gone = make_alert("o", severity=CRITICAL)
    changes = [fired(info), resolved(gone), fired(ALERT), fired(critical)]
    notice = compose(waiting(*changes), {gone.fingerprint: gone}, at=START)
    assert [entry.alert.labels["engine_id"] for entry in notice.entries] == ["c", "a", "i", "o"]
    assert notice.groups == {"i": 0, "o": 2, "a": 1, "c": 2}


def test_what_is_upheld_is_what_was_told_and_has_not_changed() -> None:
    other = make_alert("b")
    told = {ALERT.fingerprint: ALERT, other.fingerprint: other}
    notice = compose(waiting(OVER), told, at=START, uphold=True)
    assert {entry.alert.fingerprint: entry.news for entry in notice.entries} == {
        ALERT.fingerprint: News.RESOLVED,
        other.fingerprint: News.UPHELD,
    }


def test_where_too_much_waits_episodes_that_are_over_become_counts_first() -> None:
    outbox = Outbox(told=[make_alert("told")], most_waiting=4)
    changes = [
        resolved(make_alert("told")),
        fired(make_alert("open")),
        fired(make_alert("brief")),
        resolved(make_alert("brief")),
        fired(make_alert("late")),
        fired(make_alert("later")),
    ]
    for one in waiting(*changes):
        outbox.put(one)
    delta = outbox.fold()
    assert delta.removed == (3, 4)
    assert outbox.backlog().counted == {"pool_nearly_full": 1}
    for one in waiting(*[fired(make_alert(f"e{number}")) for number in range(10)]):
        outbox.put(replace(one, change=replace(one.change, sequence=one.change.sequence + 10)))
    outbox.fold()
    backlog = outbox.backlog()
    assert len(backlog.waiting) == 4
    assert backlog.waiting[0].change.kind is ChangeKind.RESOLVED  # of a firing that was told: never left out
    assert sum(backlog.counted.values()) + sum(one.change.kind is ChangeKind.FIRED for one in backlog.waiting) == 14
    assert len(backlog.told) == 1 + 10  # the resolves of what is only counted will be told


def test_what_is_on_its_way_does_not_become_a_count() -> None:
    outbox = Outbox(most_waiting=1)
    changes = waiting(fired(make_alert("a")), fired(make_alert("b")), fired(make_alert("c")))
    for one in changes:
        outbox.put(one)
    outbox.standing.in_flight = frozenset({1, 2})
    assert outbox.fold().removed == (3,)
