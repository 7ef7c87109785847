"""A few threads for work that waits for somebody else, so that whoever hands it out does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("kvatlas.agent")


class Crew:
    """At most `size` at work; there is no queue, since work that finds nobody free is decided on anew later.

    The threads are daemons: what is still being waited for when the process ends is given up.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._at_work = 0
        self._refused = False  # the last thread that was asked for
        self._changed = threading.Condition()

    @property
    def free(self) -> bool:
        """Is somebody free? With one thread that hands out work, `start` then succeeds."""
        return self._at_work < self._size

    def start(self, work: Callable[[], None], name: str) -> bool:
        """Do it on a thread; False, and nothing done, where all are at work or the process may start no thread for now.
        `work` must not raise."""
        with self._changed:
            if self._at_work >= self._size:
                return False
            self._at_work += 1
        try:
            threading.Thread(target=self._do, args=(work,), name=name, daemon=True).start()
        except (RuntimeError, MemoryError) as error:  # the limit of processes is shared with the engine's
            if not self._refused:  # once a stretch: anybody may ask for more
                _log.warning("%s: no thread could be started: %s; raise the limit of processes (pids.max)", name, error)
            self._refused = True
            self._left()
            return False
        self._refused = False
        return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nobody is at work; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at_work == 0, timeout_seconds)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._left()

    def _left(self) -> None:
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()
