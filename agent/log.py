"""Structured logs: one line of JSON an event, and nothing said twice."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

ROOT = "kvatlas"
MAX_REMEMBERED = 4096

LogValue = str | int | float | bool | None


class EventLog:
    """Events with fields. `on_change` speaks only when the value of a subject differs from the last one it logged."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: dict[tuple[str, str], str] = {}

    def event(self, event: str, *, level: int = logging.INFO, **fields: LogValue) -> None:
        self._logger.log(level, event, extra={"fields": fields})

    def on_change(
        self,
        event: str,
        subject: str,
        value: str,
        *,
        level: int = logging.INFO,
        quiet_first: str = "",
        **fields: LogValue,
    ) -> None:
        """Log that `subject` is now `value`, unless that was said last; `quiet_first` is no news at first."""
        key = (event, subject)
        last = self._last.get(key)
        if last == value:
            return
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        self._last[key] = value
        if last is not None or value != quiet_first:
            self.event(event, level=level, subject=subject, value=value, **fields)

    def forget(self, subject: str) -> None:
        """The subject is gone for good; should it come back, it is news again."""
        for key in [key for key in self._last if key[1] == subject]:
            del self._last[key]


class JsonFormatter(logging.Formatter):
    """{"time": RFC 3339 in UTC, "level": …, "logger": …, "event": …, and the fields}, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, LogValue] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything of ours and of the HTTP server to `stream` (standard error) in this format."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in (ROOT, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == ROOT else logging.WARNING)
