"""Alertmanager, through its API v2: it groups, silences and inhibits itself, and forgets what it is not told again."""

from __future__ import annotations

import json
from typing import Any, Final

from alerts.clock import SYSTEM_CLOCK, Clock
from alerts.errors import AlertsConfigError
from alerts.grouping import Cadence
from alerts.notice import Entry, Notice
from alerts.sinks import prometheus_form as form
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink
from alerts.sinks.http import TIMEOUT_SECONDS, Poster, Proxy, Unanswered, classify, is_page
from alerts.sinks.secret_url import SecretUrl

PATH: Final = "/api/v2/alerts"
RESEND_SECONDS: Final = 60.0
KEPT_RESENDS: Final = 4  # that may fail before Alertmanager takes an alert for over, as Prometheus has it
MOST_CHANGES: Final = 1000


class AlertmanagerSink:
    """Posts alerts as they stand, and those that fire again at an interval."""

    def __init__(
        self,
        name: str,
        url: SecretUrl,
        *,
        resend_seconds: float = RESEND_SECONDS,
        cadence: Cadence | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        proxy: Proxy = "environment",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`url` is Alertmanager's own, with its route prefix where it has one. Raises AlertsConfigError."""
        self.name = name
        self.cadence = cadence or Cadence.at_once(resend_seconds=resend_seconds, most_changes=MOST_CHANGES)
        self._lasting_seconds = KEPT_RESENDS * (self.cadence.resend_seconds or resend_seconds)
        self._clock = clock
        if "?" in url.reveal() or "#" in url.reveal():
            raise AlertsConfigError(f"the address of {name} has more behind its path; give it without ? and #")
        base = url.reveal().rstrip("/").removesuffix(PATH)
        target = SecretUrl(base + PATH, what=name, plain_http=True)  # whether plain HTTP may be was asked already
        self._poster = Poster(target, timeout_seconds=timeout_seconds, proxy=proxy, what=name)

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        """Once."""
        alerts = [alert for entry in notice.entries for alert in self._alerts(entry, notice.at)]
        body = json.dumps(alerts, allow_nan=False).encode("ascii")
        try:
            reply = self._poster.post(body, {"Content-Type": "application/json"})
        except Unanswered as error:
            return Retry(error.reason)
        outcome = classify(reply, self._clock.wall)
        if isinstance(outcome, Sent) and is_page(reply):
            return Retry(Reason.NOT_A_RECEIVER)
        # Of a batch that holds something invalid Alertmanager has taken the rest, and there is no simpler form.
        return Permanent(outcome.reason, outcome.status) if isinstance(outcome, Shrink) else outcome

    def _alerts(self, entry: Entry, at: float) -> list[dict[str, Any]]:
        alert = entry.alert
        ends_at = at + self._lasting_seconds if alert.ended_at is None else alert.ended_at
        shared = {"annotations": form.annotations_of(entry), "startsAt": form.rfc3339(alert.started_at)}
        if url := form.generator_url(alert):
            shared["generatorURL"] = url
        found = [{"labels": form.labels_of(alert), "endsAt": form.rfc3339(max(ends_at, alert.started_at)), **shared}]
        if entry.told not in (None, alert.severity):
            # The severity is a label, so to Alertmanager the one before was another alert, which is over now.
            before = form.labels_of(alert, entry.told)
            found.append({"labels": before, "endsAt": form.rfc3339(max(at, alert.started_at)), **shared})
        return found

    def __repr__(self) -> str:
        return f"<Alertmanager sink {self.name!r}>"
