"""Error families of alerts, named by what the caller should do."""

from __future__ import annotations


class AlertsError(Exception):
    """Root of those of this package."""


class AlertsConfigError(AlertsError):
    """The operator must change something; the text says what."""
