"""Turns what the agent sees into what its history keeps: frames of blocks, and marks of what happened."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from agent.alerting.evaluator import AlertsStanding
from agent.compaction.audit import AuditEntry
from agent.history.entries import Entry, Frame, Line, Mark
from agent.log import JsonFormatter
from agent.sampling.model import AgentView, PoolSample
from alerts.model import Phase
from alerts.state import AlertState

KEPT_STATES = ("live", "stalled", "sleeping")  # in the others the blocks are those of an earlier time
MAX_LINE = 4000  # characters of a line of the log, and of a mark's text


class Recorder:
    """`notice` is one thread's, `notice_alerts` too; `note_decision` may be called from any. None waits for a disk."""

    def __init__(self, put: Callable[[Entry], bool]) -> None:
        self._put = put
        self._framed: dict[str, int] = {}  # the second of the last frame, by pool
        self._told: dict[str, tuple[str, int]] = {}  # state and incarnation, by pool
        self._alerts: dict[str, AlertState] | None = None

    def notice(self, view: AgentView) -> None:
        """There are new samples."""
        for id, sample in view.samples.items():
            self._note_state(sample, view.taken_unix)
            second = math.floor(view.taken_unix)
            if sample.state in KEPT_STATES and sample.snapshot.sequence and self._framed.get(id) != second:
                self._framed[id] = second
                snapshot = sample.snapshot
                incarnation = f"{sample.identity.incarnation:016x}"
                # A copy, since the array shares its memory with all other columns of its snapshot.
                self._put(Frame(id, view.taken_unix, incarnation, snapshot.sequence, snapshot.states.copy()))
        for id in [id for id in self._told if id not in view.samples]:
            del self._told[id]
            self._framed.pop(id, None)

    def notice_alerts(self, standing: AlertsStanding, now_unix: float) -> None:
        """Alerts as they stand, at first and after each evaluation: mark those that have begun to fire and those that
        do not any more."""
        firing = {one.fingerprint: one for one in standing.open if one.phase is Phase.FIRING}
        before = firing if self._alerts is None else self._alerts  # what fires at the start fired before it
        for fingerprint, state in firing.items():
            if fingerprint not in before:
                self._put(_alert_mark(state, "fires", now_unix))
        for fingerprint, state in before.items():
            if fingerprint not in firing:
                self._put(_alert_mark(state, "is over", now_unix))
        self._alerts = firing

    def note_decision(self, entry: AuditEntry) -> None:
        """Something was decided, asked for or done."""
        detail = {"outcome": entry.outcome, "asked_by": entry.asker.route, "seconds": entry.seconds}
        text = f"{entry.action}: {entry.outcome}" + (f", {entry.reason}" if entry.reason else "")
        self._put(Mark(entry.time_unix, entry.engine, "decision", text[:MAX_LINE], detail))

    def _note_state(self, sample: PoolSample, now_unix: float) -> None:
        incarnation = sample.identity.incarnation
        known, self._told[sample.id] = self._told.get(sample.id), (sample.state, incarnation)
        if known == (sample.state, incarnation):
            return
        detail = {"state": sample.state, "incarnation": f"{incarnation:016x}"}
        if known is not None and known[1] != incarnation:
            self._put(Mark(now_unix, sample.id, "engine", "the engine was started anew", detail))
        text = f"the engine is {sample.state}" + (f": {sample.reason}" if sample.reason else "")
        self._put(Mark(now_unix, sample.id, "engine", text[:MAX_LINE], detail))


class LineHandler(logging.Handler):
    """Keeps the lines of a log as they are written elsewhere."""

    def __init__(self, put: Callable[[Entry], bool]) -> None:
        super().__init__()
        self._put_line = put
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._put_line(Line(self.format(record)[:MAX_LINE]))


def _alert_mark(state: AlertState, word: str, now_unix: float) -> Mark:
    alert = state.alert
    detail = {"rule": alert.rule, "severity": alert.severity.value, "labels": dict(alert.labels)}
    return Mark(now_unix, state.source, "alert", f"{alert.rule} {word}: {alert.summary}"[:MAX_LINE], detail)
