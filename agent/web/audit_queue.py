"""Audit entries on their way to the disk: in order, on one thread, so that no request waits for it."""

from __future__ import annotations

import threading
from collections import deque

from agent.compaction.audit import AuditEntry, AuditLog

MOST_WAITING = 2048


class AuditQueue:
    """Hands entries to an audit log. The thread is a daemon that begins with the first entry."""

    def __init__(self, audit: AuditLog, most: int = MOST_WAITING) -> None:
        self._audit, self._most = audit, most
        self._waiting: deque[AuditEntry] = deque()
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, entry: AuditEntry) -> bool:
        """False, and nothing done, where too many wait already, the queue is closed, or the process may start no thread
        for now. Returns at once."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._most or not self._at_work():
                return False
            self._waiting.append(entry)
            self._changed.notify_all()
            return True

    def wait_empty(self, timeout_seconds: float) -> bool:
        """Wait until everything is on the disk; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Take no more, and wait as `wait_empty` does."""
        empty = self.wait_empty(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return empty

    def _at_work(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="api-audit", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
                entry, self._busy = self._waiting.popleft(), True
            self._audit.record(entry)  # never raises for a file that cannot be written
