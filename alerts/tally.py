"""What became of notifications, counted by sink and outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import StrEnum


class Counted(StrEnum):
    """Label values of the counter; each counts messages unless it says otherwise."""

    SENT = "sent"
    RETRIED = "retried"  # failed, and will be tried again
    SHRUNK = "shrunk"  # refused as it was, and tried again as short plain text
    DEAD_LETTERED = (
        "dead_lettered"  # refused for good: given up, or kept until the sink is mended and the agent started
    )
    UNSURE = "unsure"  # the agent ended between sending and recording, so that it may have been sent twice
    COALESCED = "coalesced"  # changes that a later one made superfluous before they were told
    FOLDED = "folded"  # changes of episodes that are counted instead of named, since too much waits
    DROPPED = "dropped"  # changes that nobody will be told: of a sink that is gone, or unreadable in the store
    NOT_KEPT = "not_kept"  # changes that were held in memory alone, since the store could not be written


class Tally:
    """Counters that start at 0 for every sink and outcome. Safe for several threads."""

    def __init__(self, sinks: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = {(sink, outcome.value): 0 for sink in sinks for outcome in Counted}

    def add(self, sink: str, outcome: Counted, number: int = 1) -> None:
        with self._lock:
            self._counts[sink, outcome.value] = self._counts.get((sink, outcome.value), 0) + number

    def read(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)
