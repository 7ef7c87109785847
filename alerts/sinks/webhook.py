"""Any receiver of Alertmanager's webhook payload, version 4.

https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from alerts.clock import SYSTEM_CLOCK, Clock
from alerts.grouping import Cadence
from alerts.notice import Entry, Notice
from alerts.sinks import prometheus_form as form
from alerts.sinks.base import Outcome, Permanent, Retry, Shrink, safe_url
from alerts.sinks.http import TIMEOUT_SECONDS, Poster, Proxy, Unanswered, classify
from alerts.sinks.secret_url import SecretUrl

VERSION: Final = "4"
MOST_CHANGES: Final = 500


class WebhookSink:
    """Posts each notice as one payload, as Alertmanager would for one of its groups."""

    def __init__(
        self,
        name: str,
        url: SecretUrl,
        *,
        cadence: Cadence | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        proxy: Proxy = "environment",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Raises AlertsConfigError for a proxy that cannot be used."""
        self.name = name
        self.cadence = cadence or Cadence(most_changes=MOST_CHANGES, storm_seconds=0.0, parked_seconds=300.0)
        self._clock = clock
        self._poster = Poster(url, timeout_seconds=timeout_seconds, proxy=proxy, what=name)

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        """Once."""
        body = json.dumps(payload(notice, self.name), allow_nan=False).encode("ascii")
        try:
            reply = self._poster.post(body, {"Content-Type": "application/json"})
        except Unanswered as error:
            return Retry(error.reason)
        outcome = classify(reply, self._clock.wall)
        return Permanent(outcome.reason, outcome.status) if isinstance(outcome, Shrink) else outcome

    def __repr__(self) -> str:
        return f"<webhook sink {self.name!r}>"


def payload(notice: Notice, receiver: str) -> dict[str, Any]:
    """`truncatedAlerts` are the firings that are only counted."""
    alerts = [_alert(entry) for entry in notice.entries]
    return {
        "version": VERSION,
        "groupKey": "{}:{" + ",".join(sorted(name.replace("\x1f", "/") for name in notice.groups)) + "}",
        "truncatedAlerts": sum(notice.counted.values()),
        "status": "firing" if notice.firing or not notice.entries else "resolved",
        "receiver": receiver,
        "groupLabels": {},
        "commonLabels": _common(alert["labels"] for alert in alerts),
        "commonAnnotations": _common(alert["annotations"] for alert in alerts),
        "externalURL": safe_url(notice.list_url) or "",
        "alerts": alerts,
    }


def _alert(entry: Entry) -> dict[str, Any]:
    alert = entry.alert
    return {
        "status": "resolved" if entry.over else "firing",
        "labels": form.labels_of(alert),
        "annotations": form.annotations_of(entry) | {"firings": str(entry.firings)},
        "startsAt": form.rfc3339(alert.started_at),
        "endsAt": form.NO_TIME if alert.ended_at is None else form.rfc3339(alert.ended_at),
        "generatorURL": form.generator_url(alert) or "",
        "fingerprint": alert.fingerprint,
    }


def _common(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What all of them hold."""
    first, *others = [*mappings] or [{}]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
