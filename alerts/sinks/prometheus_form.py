"""Alerts in the form that Prometheus gives them: labels that name them, annotations that tell of them, two times."""

from __future__ import annotations

import re
import time
from typing import Final

from alerts.model import Alert, Severity
from alerts.notice import Entry
from alerts.sinks import words
from alerts.sinks.base import clean, safe_url

NAME_LABEL: Final = "alertname"
NO_TIME: Final = "0001-01-01T00:00:00Z"  # how Go writes the time that is none
_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


def labels_of(alert: Alert, severity: Severity | None = None) -> dict[str, str]:
    """The same for a firing and its resolve, since they name the alert. An empty label is no label."""
    own = {label_name(name): clean(value) for name, value in alert.labels.items() if value}
    return own | {NAME_LABEL: clean(alert.rule), "severity": (severity or alert.severity).value}


def annotations_of(entry: Entry) -> dict[str, str]:
    """What there is to say of it, without what is empty."""
    alert = entry.alert
    found = {
        "summary": alert.summary,
        "value": alert.value_text,
        "threshold": alert.threshold_text,
        "description": alert.meaning,
        "action": alert.action,
        "runbook_url": alert.runbook_url or "",
        "reason": entry.reason,
    }
    if alert.ended_at is not None:
        found["lasted"] = words.duration(alert.ended_at - alert.started_at)
    return {name: clean(text) for name, text in found.items() if text}


def generator_url(alert: Alert) -> str | None:
    return safe_url(alert.link)


def label_name(name: str) -> str:
    """With an underscore for each character that Prometheus has no place for."""
    plain = _NOT_IN_A_NAME.sub("_", name) or "_"
    return f"_{plain}" if plain[0].isdigit() else plain


def rfc3339(unix: float) -> str:
    """In UTC, with milliseconds."""
    whole, milliseconds = divmod(round(unix * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03d}Z"
