"""A test message to a receiver: whether what the agent would tell arrives there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from alerts.model import Alert, Severity
from alerts.notice import Entry, News, Notice
from alerts.sinks.base import Outcome, Retry, Sent, Shrink, Sink


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one message, which was sent once and is in no outbox."""

    sink: str
    outcome: Outcome
    seconds: float

    @property
    def sent(self) -> bool:
        return isinstance(self.outcome, Sent)

    @property
    def reason(self) -> str:
        """Why it did not arrive: a word of a closed set; "" where it did."""
        return "" if isinstance(self.outcome, Sent) else self.outcome.reason.value

    @property
    def status(self) -> int | None:
        """Of HTTP."""
        return None if isinstance(self.outcome, Sent) else self.outcome.status

    @property
    def then(self) -> str:
        """What the agent would do with an alert after that; "" where it arrived."""
        if self.sent:
            return ""
        if isinstance(self.outcome, Retry):
            return "the agent would try again"
        if isinstance(self.outcome, Shrink):
            return "the agent would send it as short plain text"
        return "the agent would give it up"


def send_trial(sink: Sink, *, asked_for_by: Mapping[str, str], link: str | None, now_unix: float) -> Trial:
    """Send one message that says that it is a test; waits for the receiver. `asked_for_by` becomes its labels."""
    alert = Alert(
        fingerprint="0" * 16,
        episode=f"test-{round(now_unix * 1000):x}",
        rule="kvatlas-test",
        severity=Severity.INFO,
        labels=MappingProxyType(dict(asked_for_by)),
        value=None,
        value_text="none",
        threshold_text="",
        summary="This is a test of KVAtlas",
        meaning="Alerts of the agent arrive here. Nothing is wrong.",
        action="Nothing.",
        started_at=now_unix,
        link=link,
    )
    began = time.monotonic()
    outcome = sink.send(Notice(at=now_unix, entries=(Entry(alert, News.FIRING, 1),)))
    return Trial(sink.name, outcome, time.monotonic() - began)
