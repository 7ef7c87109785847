"""Does on a thread of its own, again and again, what may hang for ever, and tells at any time how that stands."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger("kvatlas.devices")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watched(Generic[T]):
    """The last value, and what has become of the round after it."""

    value: T | None  # None: there is none yet, or the round under way is stuck, so that it is true no longer
    taken_monotonic: float | None
    stuck_seconds: float | None  # how long the round under way has taken, where that is too long
    stuck_in: str  # what it was doing, as it said itself


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, and the clock that they are told by."""

    interval_seconds: float
    timeout_seconds: float  # after which a round is said to be stuck
    monotonic: Callable[[], float] = time.monotonic


class Watcher(Generic[T]):
    """Calls `read` at an interval. There is one thread, so never more than one that is stuck.

    A call that hangs cannot be ended from outside; nothing else waits for it, and should it come back, all is well.
    """

    def __init__(
        self, name: str, read: Callable[[Say], T], timing: Timing, *, after: Callable[[], None] | None = None
    ) -> None:
        """`read` should not raise; it may tell what it is about to do through its argument. `after` follows a round."""
        self._name, self._read, self._timing, self._after = name, read, timing, after
        self._leave = False
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._value: T | None = None
        self._taken: float | None = None
        self._begun: float | None = None
        self._doing = ""
        self._rounds = 0
        self._failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the thread is a daemon, so that a hanging call does not keep the process."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 0.0) -> bool:
        """End after the round under way; was it over in time?"""
        self._leave = True
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Begin the next round now, or one more after that under way."""
        self._wake.set()

    def latest(self) -> Watched[T]:
        """How it stands now. Does not wait."""
        with self._changed:
            running = None if self._begun is None else self._timing.monotonic() - self._begun
            if running is not None and running > self._timing.timeout_seconds:
                return Watched(None, self._taken, running, self._doing)
            return Watched(self._value, self._taken, None, "")

    @property
    def rounds(self) -> int:
        """How many are done."""
        return self._rounds

    def wait(self, rounds: int, timeout_seconds: float) -> bool:
        """Wait until that many rounds are done; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._rounds >= rounds, timeout_seconds)

    def _run(self) -> None:
        while not self._leave:
            with self._changed:
                self._begun, self._doing = self._timing.monotonic(), ""
            value: T | None = None
            try:
                value = self._read(self._say)
            except Exception:  # noqa: BLE001 - the thread must outlive any fault; without a value nothing is told as known
                if not self._failed:
                    _log.exception("%s could not be read; said once", self._name)
                self._failed = True
            with self._changed:
                self._value, self._taken, self._begun = value, self._timing.monotonic(), None
                self._rounds += 1
                self._changed.notify_all()
            if self._after is not None:
                self._after()
            self._wake.wait(self._timing.interval_seconds)
            self._wake.clear()

    def _say(self, doing: str) -> None:
        self._doing = doing  # a whole assignment: no lock, some dozen times a round
