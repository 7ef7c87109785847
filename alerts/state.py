"""What the lifecycle remembers of one open alert, and how that is written down."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Self

from alerts.encoding import MISREAD, alert_from_plain, alert_to_plain
from alerts.errors import AlertsError
from alerts.model import Alert, Phase, Severity

VERSION = 1
_DURATIONS = ("true_seconds", "quiet_seconds", "absent_seconds")
_TEXTS = ("source", "incarnation", "condition", "held")


class StateUnreadable(AlertsError):
    """A stored state is of another version, or damaged. It cannot be used; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertState:
    """One alert that is pending or firing. An alert without a state is inactive.

    Durations count what was observed, by a clock that is never set: time in which the number was unknown, or the agent
    did not run, counts for none of them but `absent_seconds`.
    """

    phase: Phase  # PENDING or FIRING
    alert: Alert  # as it is, or as it was last told; texts of the time it was judged last
    source: str  # of the readings that it came from
    incarnation: str  # of that source; another one starts a pending alert anew
    condition: str  # the rule's, so that a changed rule is noticed
    held: str = ""  # why its number is unknown now; "" while it is known
    told: Severity | None = None  # the severity that was told; None while nobody was told of this firing
    true_seconds: float = 0.0  # for how long the threshold has been crossed: the rule's `for`
    clear_seconds: float | None = None  # for how long it has not been any more: `keep_firing_for`; None: it still is
    quiet_seconds: float = 0.0  # since it was told last: the repeat interval
    absent_seconds: float = 0.0  # for how long nothing has been known of it

    @property
    def fingerprint(self) -> str:
        return self.alert.fingerprint

    def to_json(self) -> str:
        """One line of JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["alert"] = alert_to_plain(self.alert)
        return json.dumps({"version": VERSION, **plain}, allow_nan=False, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises StateUnreadable."""
        try:
            plain: dict[str, Any] = json.loads(text)
            if plain.pop("version") != VERSION:
                raise StateUnreadable(f"not version {VERSION}")
            told, clear = plain.pop("told"), plain.pop("clear_seconds")
            durations = {name: _seconds(plain.pop(name)) for name in _DURATIONS}
            texts = {name: _text(plain.pop(name)) for name in _TEXTS}
            state = cls(
                alert=alert_from_plain(plain.pop("alert")),
                phase=Phase(plain.pop("phase")),
                told=None if told is None else Severity(told),
                clear_seconds=None if clear is None else _seconds(clear),
                **durations | texts | plain,  # a name too many is refused
            )
        except MISREAD as error:
            raise StateUnreadable(f"a stored alert cannot be read: {error}") from error
        if state.phase not in (Phase.PENDING, Phase.FIRING) or not state.alert.firing:
            raise StateUnreadable("a stored alert cannot be read: it is not open")
        return state


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a duration that is none")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text that is none")
    return value
