"""Marks of a replay: what happened to the recorded pool and was found about it, as the agent's history keeps it."""

from __future__ import annotations

import threading
from collections import deque

from agent.history.entries import HOLD, Entry, Mark
from agent.history.reading import MAX_MARKS_READ
from agent.history.recorder import Recorder

MAX_MARKS = 10_000


class ReplayMarks:
    """The newest MAX_MARKS marks of one session; any thread may ask. `recorder` is told what the agent's own is."""

    def __init__(self) -> None:
        self.recorder = Recorder(self._put)
        self._kept: deque[Mark] = deque(maxlen=MAX_MARKS)
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Of a session that begins amid a recording: what stood so at its first sample may have begun long before."""
        with self._lock:
            self._kept.clear()

    def between(
        self, pool: str, start_unix: float, end_unix: float, limit: int = MAX_MARKS_READ, *, holds: bool = True
    ) -> tuple[Mark, ...]:
        """As HistoryReader.marks answers."""
        start_ms, end_ms = start_unix * 1000, end_unix * 1000
        with self._lock:
            kept = [(round(one.time_unix * 1000), one) for one in self._kept if one.pool in (pool, "")]
        found = [
            Mark(time_ms / 1000, one.pool, one.kind, one.text, one.detail)
            for time_ms, one in sorted(kept, key=lambda pair: pair[0])
            if start_ms <= time_ms < end_ms and (holds or one.kind != "decision" or not one.text.startswith(HOLD))
        ]
        return tuple(found[-limit:])

    def _put(self, entry: Entry) -> bool:
        if isinstance(entry, Mark):  # frames are read from the recording itself
            with self._lock:
                self._kept.append(entry)
        return True
