"""Changes and alerts as JSON, for the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from alerts.model import Alert, Change, ChangeKind, Severity
from alerts.mutes import Mute

_ALERT_FIELDS = tuple(field.name for field in fields(Alert))
_MUTE_FIELDS = tuple(field.name for field in fields(Mute))
_TEXTS: Final = (
    "fingerprint", "episode", "rule", "value_text", "threshold_text", "summary", "meaning", "action",
)  # fmt: skip
_PERHAPS_TEXTS: Final = ("runbook_url", "link")
LAST_UNIX: Final = 253_402_300_800.0  # the year 10000, which no calendar of ours writes
# Whatever a damaged text makes of the code that reads it.
MISREAD: Final = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)


class RowUnreadable(ValueError):
    """A stored row is none of ours, or of another version; it is left out."""


def dump_alert(alert: Alert) -> str:
    return _dump(alert_to_plain(alert))


def load_alert(text: str) -> Alert:
    """Raises RowUnreadable."""
    try:
        return alert_from_plain(_load(text))
    except MISREAD as error:
        raise RowUnreadable(repr(error)) from error


def dump_change(change: Change) -> str:
    plain = alert_to_plain(change.alert)
    return _dump({"kind": change.kind, "at": change.at, "reason": change.reason, "alert": plain})


def load_change(sequence: int, text: str) -> Change:
    """Raises RowUnreadable."""
    try:
        plain = _load(text)
        alert, kind = alert_from_plain(plain["alert"]), ChangeKind(plain["kind"])
        if alert.firing is (kind is ChangeKind.RESOLVED):
            raise RowUnreadable(f"{kind}, and the alert says otherwise")
        return Change(sequence, kind, alert, unix_of(plain["at"]), str(plain.get("reason", "")))
    except MISREAD as error:
        raise RowUnreadable(repr(error)) from error


def dump_mute(mute: Mute) -> str:
    return _dump({name: getattr(mute, name) for name in _MUTE_FIELDS})


def load_mute(text: str) -> Mute:
    """Raises RowUnreadable, or AlertsConfigError for a mute that cannot be."""
    try:
        plain = _load(text)
        known = {name: plain[name] for name in _MUTE_FIELDS}
        texts = (known[name] for name in ("id", "author", "comment"))
        if not all(isinstance(one, str) for one in (*texts, known["rule"] or "", known["engine"] or "")):
            raise RowUnreadable("a text of the mute is none")
        return Mute(**known | {name: unix_of(known[name]) for name in ("created_at", "expires_at")})
    except MISREAD as error:
        raise RowUnreadable(repr(error)) from error


def alert_to_plain(alert: Alert) -> dict[str, Any]:
    """With plain values alone."""
    return {name: getattr(alert, name) for name in _ALERT_FIELDS} | {"labels": dict(alert.labels)}


def alert_from_plain(plain: Mapping[str, Any]) -> Alert:
    """Raises one of MISREAD for what no alert of ours can have been."""
    known = {name: plain[name] for name in _ALERT_FIELDS if name in plain}
    labels = {str(name): str(value) for name, value in known["labels"].items()}
    texts = [known[name] for name in _TEXTS] + [known.get(name) or "" for name in _PERHAPS_TEXTS]
    value, ended = known["value"], known.get("ended_at")
    if not all(isinstance(one, str) for one in texts) or not (value is None or math.isfinite(value)):
        raise RowUnreadable("a text or the value of the alert is none")
    times = {"started_at": unix_of(known["started_at"]), "ended_at": None if ended is None else unix_of(ended)}
    return Alert(**known | times | {"severity": Severity(known["severity"]), "labels": MappingProxyType(labels)})


def unix_of(value: object) -> float:
    """A time that can be written as a date. Raises RowUnreadable."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LAST_UNIX:
        raise RowUnreadable("a time that cannot be")
    return float(value)


def _load(text: str) -> Any:
    """What `_dump` wrote is ASCII; a text that is not was damaged."""
    if not isinstance(text, str) or not text.isascii():
        raise RowUnreadable("no text of ours")
    return json.loads(text)


def _dump(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, ensure_ascii=True, separators=(",", ":"))
