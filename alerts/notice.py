"""What a sink is given to send: alerts as they stand now, what is new of each, and how many more are only counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from alerts.model import Alert, Severity

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


class News(StrEnum):
    """What is new of an alert since the sink was last told of it."""

    FIRING = "firing"
    RESOLVED = "resolved"
    BRIEF = "fired and resolved"  # both since the last message
    REPEATED = "still firing"
    ESCALATED = "worse"
    UPHELD = "upheld"  # nothing is new: told again to a receiver that forgets what it is not told


@dataclass(frozen=True, slots=True)
class Entry:
    """One alert in one notice, as of its newest change."""

    alert: Alert
    news: News
    firings: int = 0  # of its episodes, those that this notice tells of for the first time
    reason: str = ""  # of a resolve: why it is over
    told: Severity | None = None  # the severity that the sink was told before; None where it takes it for over

    @property
    def over(self) -> bool:
        return not self.alert.firing


@dataclass(frozen=True, slots=True)
class Notice:
    """One message. Every firing of `sequences` is told by an entry (`firings`) or counted, by rule, in `counted`."""

    at: float  # Unix seconds
    entries: tuple[Entry, ...]  # the worst first
    sequences: tuple[int, ...] = ()  # of the changes that it tells of
    groups: Mapping[str, int] = field(default_factory=lambda: NOTHING)  # rank of the worst alert of each, by name
    counted: Mapping[str, int] = field(default_factory=lambda: NOTHING)  # firings by rule: too many waited, or given up
    list_url: str | None = None  # the page that lists every alert

    @property
    def firing(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.over)

    @property
    def over(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.over)
