"""Holds a sender to a rate by an absolute schedule: the time for n bytes does not depend on how they are cut."""

from __future__ import annotations

from collections.abc import Callable

LEAST_WAIT_SECONDS = 0.005  # shorter waits are put together: the kernel overshoots each by a good part of that


class Pacer:
    """Says when the bytes sent so far are due at `bytes_per_second`, and waits until then.

    A wait that took too long, and the time that reading and writing took, shorten the next waits; a link that was
    idle saves nothing up. One thread calls.
    """

    def __init__(self, bytes_per_second: float, *, clock: Callable[[], float], wait: Callable[[float], object]) -> None:
        """`clock`: seconds, monotonic. `wait`: returns after so many seconds, or sooner where sending is to end."""
        self._rate, self._clock, self._wait = bytes_per_second, clock, wait
        self._due = clock()

    def begin(self) -> None:
        """The next bytes begin now, or when those before them are due, if that is later."""
        self._due = max(self._due, self._clock())

    def sent(self, count: int) -> None:
        """So many bytes more were sent: wait, unless the schedule is ahead by so little that it can wait."""
        self._due += count / self._rate
        self._catch_up(LEAST_WAIT_SECONDS)

    def end(self) -> None:
        """Wait until everything is due."""
        self._catch_up(0.0)

    def _catch_up(self, least: float) -> None:
        ahead = self._due - self._clock()
        if ahead > least:
            self._wait(ahead)
