"""Structured logs: one line of JSON an event, and nothing said twice, whatever floods in."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TextIO

ROOT = "kvatlas"
FOREIGN = ("uvicorn", "asyncio")  # loggers of libraries that may repeat themselves without end
MAX_REMEMBERED = 4096
REMEMBERED_SECONDS = 60.0  # a subject that was asked about since then keeps its place
REPEAT_SECONDS = 60.0
MAX_TEXTS = 64  # of foreign loggers, in that time

LogValue = str | int | float | bool | None
Monotonic = Callable[[], float]


class EventLog:
    """Events with fields. `on_change` speaks only when the value of a subject differs from the last one it logged.

    At most MAX_REMEMBERED subjects are followed. Further ones are counted, not named: were the oldest forgotten while
    it is still in use, a flood of subjects would be news again at each turn.
    """

    def __init__(self, logger: logging.Logger, clock: Monotonic = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._last: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # least lately asked about first
        self._left_out = 0
        self._left_out_told = -REMEMBERED_SECONDS

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
        key, now = (event, subject), self._clock()
        known = self._last.pop(key, None)
        if known is None and len(self._last) >= MAX_REMEMBERED and not self._make_room(now):
            self._leave_out(event, now)
            return
        self._last[key] = (value, now)
        if (known is None and value != quiet_first) or (known is not None and known[0] != value):
            self.event(event, level=level, subject=subject, value=value, **fields)

    def forget(self, subject: str) -> None:
        """The subject is gone for good; should it come back, it is news again."""
        for key in [key for key in self._last if key[1] == subject]:
            del self._last[key]

    def _make_room(self, now: float) -> bool:
        oldest, (_, asked) = next(iter(self._last.items()))
        if now - asked < REMEMBERED_SECONDS:
            return False
        del self._last[oldest]
        return True

    def _leave_out(self, event: str, now: float) -> None:
        self._left_out += 1
        if now - self._left_out_told >= REMEMBERED_SECONDS:
            self._left_out_told = now
            self.event("subjects left out", level=logging.WARNING, last=event, times=self._left_out)


class RepeatFilter(logging.Filter):
    """Lets each text of a foreign logger through once in REPEAT_SECONDS, and says how often it came meanwhile.

    Texts are told apart by their first line; beyond MAX_TEXTS of them, those of one logger count as one.
    """

    def __init__(self, clock: Monotonic = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when it was let through, and how many were not

    def filter(self, record: logging.LogRecord) -> bool:
        now, key = self._clock(), (record.name, record.getMessage().partition("\n")[0])
        with self._lock:
            if key not in self._said and len(self._said) >= MAX_TEXTS:
                self._said = {one: seen for one, seen in self._said.items() if now - seen[0] < REPEAT_SECONDS}
                if len(self._said) >= MAX_TEXTS:
                    key = (record.name, "")
            at, left_out = self._said.get(key, (now - REPEAT_SECONDS, 0))
            if now - at < REPEAT_SECONDS:
                self._said[key] = (at, left_out + 1)
                return False
            self._said[key] = (now, 0)
        if left_out:
            record.fields = {"repeats_left_out": left_out}
        return True


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
    """Send everything of ours, of the HTTP server and of its event loop to `stream` (standard error) in this format."""
    for name in (ROOT, *FOREIGN):
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(JsonFormatter())
        if name != ROOT:
            handler.addFilter(RepeatFilter())
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == ROOT else logging.WARNING)
