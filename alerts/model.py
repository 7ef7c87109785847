"""What passes between rules, lifecycle and delivery: named numbers in, alerts and their changes out.

Nothing here knows of KV caches. `agent.alerting` turns what it sees into sources of readings; rules judge them; the
lifecycle turns judgements into changes; the pipeline turns changes into notices, and sinks deliver these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

UNRECORDED: Final = 0
NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


class Severity(StrEnum):
    """How bad it is, from the least. `rank` orders them: the worst has the highest."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class Phase(StrEnum):
    """Where one alert stands. A pending one has crossed its threshold and waits for the rule's `for`."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class ChangeKind(StrEnum):
    """What happened to an alert. Only these leave the lifecycle."""

    FIRED = "fired"
    RESOLVED = "resolved"
    REPEATED = "repeated"  # still firing after the rule's repeat interval
    ESCALATED = "escalated"  # its severity rose while it fired


@dataclass(frozen=True, slots=True)
class Alert:
    """One episode of one alert, as it is told to people. Times are Unix seconds.

    `fingerprint` names the alert over all its episodes (rule and labels); `episode` names this one firing of it, and a
    resolve carries the episode of its firing. Texts are finished; they may hold anything that a label held, so a sink
    escapes them.
    """

    fingerprint: str
    episode: str
    rule: str
    severity: Severity
    labels: Mapping[str, str]
    value: float | None  # the number that crossed, in the rule's unit; None where the condition has none
    value_text: str  # the same for people: "41 %", "3 min"
    threshold_text: str  # "over 30 %"
    summary: str  # what, where
    meaning: str  # what it means for the service
    action: str  # what to do
    started_at: float
    ended_at: float | None = None  # None while it fires
    runbook_url: str | None = None
    link: str | None = None  # the page that shows it

    @property
    def firing(self) -> bool:
        return self.ended_at is None


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one alert. `sequence` rises with every change an agent's store ever recorded, over restarts."""

    sequence: int  # UNRECORDED until a store has recorded it
    kind: ChangeKind
    alert: Alert
    at: float  # Unix seconds
    reason: str = ""  # of a resolve: why it is over, as "back at 18 %, at most 20 %" or "the rule was removed"
