"""Time as the engine sees it: real seconds, or seconds that pass only when somebody waits."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start, and a wait that a wake-up may cut short."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or sooner where `wake` was called since the last wait."""
        ...

    def wake(self) -> None:
        """End the wait under way or the next one; callable from any thread and from a signal handler's thread."""
        ...


class RealClock:
    """Monotonic wall time; a waiting engine uses no CPU."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        if seconds > 0:
            self._woken.wait(seconds)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class VirtualClock:
    """Time that passes only by waiting: a trace of an hour is served as fast as the engine can compute."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def wake(self) -> None:
        """Nothing waits for real, so there is nothing to wake."""
