"""Does what may never come back on a thread of its own, so that whoever wants it done waits only so long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_Job = tuple[Callable[[], None], threading.Event]


class Deputy:
    """One thread, which is given up, and replaced, where a piece of work outlasts its time. Ask from one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def do(self, work: Callable[[], None], timeout_seconds: float) -> bool:
        """Was `work` done in time? Where not, it goes on by itself for as long as it takes. It must not raise.

        Raises RuntimeError where the process may start no thread for now.
        """
        if self._jobs is None:
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(jobs,), name=self._name, daemon=True).start()
            self._jobs = jobs  # not before: what is put where nobody serves would only be waited for
        done = threading.Event()
        self._jobs.put((work, done))
        if done.wait(timeout_seconds):
            return True
        self.close()
        return False

    def close(self) -> None:
        """Let the thread end, now or once its work comes back; a later `do` starts another."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, done = job
        try:
            work()
        finally:
            done.set()
        del job, work, done  # while it waits for more, it keeps nothing alive
