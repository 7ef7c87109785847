"""Changes and alerts as JSON, for the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from alerts.model import Alert, Change, ChangeKind, Severity
from alerts.mutes import Mute

_ALERT_FIELDS = tuple(field.name for field in fields(Alert))
_MUTE_FIELDS = tuple(field.name for field in fields(Mute))


class RowUnreadable(ValueError):
    """A stored row is none of ours, or of another version; it is left out."""


def dump_alert(alert: Alert) -> str:
    return _dump(_alert_to_plain(alert))


def load_alert(text: str) -> Alert:
    """Raises RowUnreadable."""
    try:
        return _alert_from_plain(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RowUnreadable(repr(error)) from error


def dump_change(change: Change) -> str:
    plain = _alert_to_plain(change.alert)
    return _dump({"kind": change.kind, "at": change.at, "reason": change.reason, "alert": plain})


def load_change(sequence: int, text: str) -> Change:
    """Raises RowUnreadable."""
    try:
        plain = json.loads(text)
        alert = _alert_from_plain(plain["alert"])
        return Change(sequence, ChangeKind(plain["kind"]), alert, float(plain["at"]), str(plain.get("reason", "")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RowUnreadable(repr(error)) from error


def dump_mute(mute: Mute) -> str:
    return _dump({name: getattr(mute, name) for name in _MUTE_FIELDS})


def load_mute(text: str) -> Mute:
    """Raises RowUnreadable, or AlertsConfigError for a mute that cannot be."""
    try:
        plain = json.loads(text)
        return Mute(**{name: plain[name] for name in _MUTE_FIELDS if name in plain})
    except (ValueError, TypeError, KeyError) as error:
        raise RowUnreadable(repr(error)) from error


def _alert_to_plain(alert: Alert) -> dict[str, Any]:
    return {name: getattr(alert, name) for name in _ALERT_FIELDS} | {"labels": dict(alert.labels)}


def _alert_from_plain(plain: Mapping[str, Any]) -> Alert:
    known = {name: plain[name] for name in _ALERT_FIELDS if name in plain}
    labels = {str(name): str(value) for name, value in known["labels"].items()}
    return Alert(**known | {"severity": Severity(known["severity"]), "labels": MappingProxyType(labels)})


def _dump(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, ensure_ascii=True, separators=(",", ":"))
