"""Events of alerting, with fields, to whatever the process has set up for its logs."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("kvatlas.alerts")


def log_event(event: str, *, level: int = logging.INFO, **fields: str | float | bool | None) -> None:
    """One event. A formatter finds the fields at the record as `fields`."""
    LOGGER.log(level, event, extra={"fields": fields})
