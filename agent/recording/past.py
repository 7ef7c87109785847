"""The past of a recorded pool, as far as a replay has come: a frame for each sample, read from the recording, and marks
of what was met on the way."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agent.history.entries import Mark
from agent.history.frames import FrameCorrupt
from agent.history.reading import MAX_MARKS_READ, KeptFrame
from agent.recording.chunks import RecordingError
from agent.recording.marks import ReplayMarks
from agent.recording.reading import Cursor, Recording
from agent.sampling.discovery import printable

_MILLISECOND_NS = 1_000_000


class RecordedPast:
    """Answers as the history's reader does, from any thread. What is still to come is not told."""

    def __init__(self, recording: Recording, upto_ns: Callable[[], int], marks: ReplayMarks) -> None:
        """`upto_ns` is the place that the replay has come to, on the recording's time line; `marks` are up to it."""
        self._recording, self._marks = recording, marks
        self._upto_ns = upto_ns
        self._lock = threading.Lock()
        self._cursor: Cursor = recording.cursor()

    def pools(self) -> tuple[str, ...]:
        return (printable(self._recording.header.id),)

    def frame_at(self, pool: str, at_unix: float) -> KeptFrame | None:
        """The newest sample that is not after `at_unix`. Raises FrameCorrupt where it cannot be read."""
        times = self._recording.sample_times_ns
        known = self._samples_known(pool)
        # A frame is named by its millisecond.
        at = min(bisect_right(times, round(at_unix * 1000) * _MILLISECOND_NS + _MILLISECOND_NS // 2), known) - 1
        if at < 0:
            return None
        try:
            with self._lock:
                self._cursor.seek(times[at])
                snapshot = self._cursor.state().snapshot
        except RecordingError as error:
            raise FrameCorrupt(str(error)) from error
        return KeptFrame(
            time_unix=_seconds(times[at]),
            resolution_seconds=max(1, round(self._recording.header.interval_seconds)),
            incarnation=f"{snapshot.identity.incarnation:016x}",
            sequence=snapshot.sequence,
            states=snapshot.states,
            first_unix=_seconds(times[0]),
            last_unix=_seconds(times[known - 1]),
            previous_unix=_seconds(times[at - 1]) if at else None,
            next_unix=_seconds(times[at + 1]) if at + 1 < known else None,
        )

    def frame_range(self, pool: str) -> tuple[float, float] | None:
        known = self._samples_known(pool)
        times = self._recording.sample_times_ns
        return (_seconds(times[0]), _seconds(times[known - 1])) if known else None

    def frame_times(self, pool: str, start_unix: float, end_unix: float) -> NDArray[np.float64]:
        """Times of all samples in start <= time <= end, oldest first."""
        ns = np.frombuffer(self._recording.sample_times_ns, np.int64)[: self._samples_known(pool)]
        milliseconds = (ns + _MILLISECOND_NS // 2) // _MILLISECOND_NS
        first, last = np.searchsorted(milliseconds, [round(start_unix * 1000), round(end_unix * 1000) + 1])
        return np.unique(milliseconds[first:last]) / 1000

    def marks(
        self, pool: str, start_unix: float, end_unix: float, limit: int = MAX_MARKS_READ, *, holds: bool = True
    ) -> tuple[Mark, ...]:
        """What happened to the engine, the alerts that are judged on the way, and that the policy is off. What the
        policy of another agent decided then, and what was asked of that agent, is its own, and not in a recording."""
        if pool not in self.pools():
            return ()
        return self._marks.between(pool, start_unix, end_unix, limit, holds=holds)

    def _samples_known(self, pool: str) -> int:
        if pool not in self.pools():
            return 0
        return self._recording.samples_up_to(self._upto_ns())


def _seconds(time_ns: int) -> float:
    """In whole milliseconds, as frames are kept."""
    return (time_ns + _MILLISECOND_NS // 2) // _MILLISECOND_NS / 1000
