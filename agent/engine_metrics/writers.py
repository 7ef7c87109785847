"""Notices that several processes answer at one address in turn, as behind a load balancer."""

from __future__ import annotations

from collections import deque

from agent.engine_metrics.exposition import counters_of
from agent.engine_metrics.model import Answer
from agent.engine_metrics.names import Quantity

REMEMBERED = 12  # answers; also how long the finding stands


class WriterWatch:
    """One address. A process that started anew is another one, too, but the one before it never answers again."""

    def __init__(self) -> None:
        self._writers: deque[float] = deque(maxlen=REMEMBERED)  # each as often as it answered
        self._falls: deque[bool] = deque(maxlen=REMEMBERED)
        self._counters: dict[tuple[str, str, Quantity], float] = {}
        self._stands_for = 0

    def several(self, answer: Answer) -> bool:
        """Take in one more answer: is it one of several processes'?"""
        writer, found = answer.writer, False
        if writer is not None:
            found = writer in self._writers and self._writers[-1] != writer
            self._writers.append(writer)
        else:
            # Without a name for the process its counters must tell: after one restart they go back once.
            counters = counters_of(answer.engines)
            self._falls.append(any(value < self._counters.get(key, 0.0) for key, value in counters.items()))
            self._counters = counters
            found = sum(self._falls) > 1
        self._stands_for = REMEMBERED if found else max(0, self._stands_for - 1)
        return self._stands_for > 0
