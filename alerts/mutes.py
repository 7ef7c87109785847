"""Mutes: who wants to hear nothing of a rule or an engine, until when, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from unicodedata import category

from alerts.errors import AlertsConfigError

ENGINE_LABEL = "engine_id"
LONGEST_SECONDS = 30 * 86_400.0
LONGEST_TEXT = 200
_HIDDEN = frozenset({"Cc", "Cs"})  # control characters, and halves of others
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # make a text read otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """Mutes alerts of `rule`, of `engine`, or of that rule at that engine. Times are Unix seconds."""

    id: str
    rule: str | None
    engine: str | None
    author: str
    comment: str
    created_at: float
    expires_at: float

    def __post_init__(self) -> None:
        """Raises AlertsConfigError on a mute of everything, by nobody, or without a proper end."""
        if not self.rule and not self.engine:
            raise AlertsConfigError("a mute names a rule, an engine, or both; everything cannot be muted")
        if not self.author.strip():
            raise AlertsConfigError("a mute has an author: say who asks for it")
        for name in ("rule", "engine", "author", "comment"):
            text = getattr(self, name) or ""
            if len(text) > LONGEST_TEXT:
                raise AlertsConfigError(f"{name} is longer than {LONGEST_TEXT} characters; shorten it")
            if any(category(one) in _HIDDEN or one in _TURNING for one in text):
                raise AlertsConfigError(f"{name} holds a character that cannot be shown; write plain text")
        if self.engine and "*" in self.engine:
            raise AlertsConfigError("engine is the name of one engine, and no pattern; give each a mute of its own")
        seconds = self.expires_at - self.created_at
        if not (math.isfinite(seconds) and 0 < seconds <= LONGEST_SECONDS):
            raise AlertsConfigError(
                f"a mute lasts more than nothing and at most {LONGEST_SECONDS / 86_400:.0f} days, not {seconds:,.0f} s"
            )

    def active(self, at: float) -> bool:
        return at < self.expires_at

    def covers(self, rule: str, labels: Mapping[str, str]) -> bool:
        """Whether it mutes an alert of that rule with those labels, as long as it lasts."""
        return self.rule in (None, rule) and self.engine in (None, labels.get(ENGINE_LABEL))


def muting(mutes: Iterable[Mute], rule: str, labels: Mapping[str, str], at: float) -> Mute | None:
    """Of the mutes of such an alert the one that lasts longest; None where there is none."""
    found = [mute for mute in mutes if mute.active(at) and mute.covers(rule, labels)]
    return max(found, key=lambda mute: mute.expires_at, default=None)
