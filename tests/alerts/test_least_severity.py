"""A sink that is told only of what is bad enough."""

from __future__ import annotations

from dataclasses import replace

from alerts.model import UNRECORDED, Alert, Change, ChangeKind, Severity
from alerts.store import Store

ALERT = Alert(
    fingerprint="f",
    episode="f-1",
    rule="rule",
    severity=Severity.INFO,
    labels={"engine_id": "a"},
    value=None,
    value_text="",
    threshold_text="",
    summary="it is so",
    meaning="",
    action="",
    started_at=1.0,
)


def change(kind: ChangeKind, severity: Severity) -> Change:
    ended = 2.0 if kind is ChangeKind.RESOLVED else None
    return Change(UNRECORDED, kind, replace(ALERT, severity=severity, ended_at=ended), 2.0)


def waiting(store: Store, sink: str) -> list[ChangeKind]:
    return [one.change.kind for one in store.backlog(sink).waiting]


def test_what_is_not_bad_enough_is_told_to_the_others() -> None:
    store = Store(None, ["slack", "log"], least={"slack": Severity.WARNING})
    store.commit({}, [change(ChangeKind.FIRED, Severity.INFO)])
    assert (waiting(store, "slack"), waiting(store, "log")) == ([], [ChangeKind.FIRED])
    store.commit({}, [change(ChangeKind.RESOLVED, Severity.INFO)])
    assert waiting(store, "slack") == []


def test_what_becomes_bad_enough_is_told_from_then_on() -> None:
    store = Store(None, ["slack"], least={"slack": Severity.WARNING})
    store.commit({}, [change(ChangeKind.FIRED, Severity.INFO)])
    store.commit({}, [change(ChangeKind.ESCALATED, Severity.CRITICAL)])
    assert waiting(store, "slack") == [ChangeKind.ESCALATED]
    store.commit({}, [change(ChangeKind.RESOLVED, Severity.CRITICAL)])
    assert waiting(store, "slack")[-1] is ChangeKind.RESOLVED
