"""The log: one line of JSON for each alert of a notice."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, Final, TextIO

from alerts.grouping import Cadence
from alerts.notice import Entry, News, Notice
from alerts.sinks.base import Outcome, Reason, Retry, Sent, clean
from alerts.sinks.prometheus_form import rfc3339

SCHEMA: Final = "kvatlas.alert/v1"


class LogSink:
    """Writes to a stream, standard error unless another one is given."""

    def __init__(self, name: str, stream: TextIO | None = None, *, cadence: Cadence | None = None) -> None:
        self.name = name
        self.cadence = cadence or Cadence.at_once()
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        """All lines at once, so that no other output comes between them."""
        lines = [json.dumps(_line(entry, notice.at)) for entry in notice.entries if entry.news is not News.UPHELD]
        lines += [json.dumps(_counted(rule, number, notice.at)) for rule, number in notice.counted.items()]
        try:
            with self._lock:
                stream = self._stream or sys.stderr
                stream.write("".join(f"{line}\n" for line in lines))
                stream.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            return Retry(Reason.BROKEN)
        return Sent()


def _line(entry: Entry, at: float) -> dict[str, Any]:
    alert = entry.alert
    return {
        "schema": SCHEMA,
        "time": rfc3339(at),
        "event": "alert",
        "news": entry.news.value,
        "status": "resolved" if entry.over else "firing",
        "rule": alert.rule,
        "severity": alert.severity.value,
        "labels": {name: clean(value) for name, value in alert.labels.items()},
        "summary": clean(alert.summary),
        "value": alert.value_text,
        "threshold": alert.threshold_text,
        "meaning": clean(alert.meaning),
        "action": clean(alert.action),
        "reason": clean(entry.reason),
        "started_at": rfc3339(alert.started_at),
        "ended_at": None if alert.ended_at is None else rfc3339(alert.ended_at),
        "firings": entry.firings,
        "link": alert.link,
        "runbook_url": alert.runbook_url,
        "fingerprint": alert.fingerprint,
        "episode": alert.episode,
    }


def _counted(rule: str, number: int, at: float) -> dict[str, Any]:
    return {"schema": SCHEMA, "time": rfc3339(at), "event": "alerts_counted", "rule": rule, "firings": number}
