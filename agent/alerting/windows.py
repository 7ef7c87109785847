"""What a map's counters and histograms gained lately: over a window, and not over a restart of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_shim.snapshot import Histogram

LEAST_SHARE = 0.25  # of a window that must have been watched before its gain means anything
POINTS = 30  # kept of a window


@dataclass(frozen=True, slots=True)
class Gain:
    """What was counted in `seconds`."""

    seconds: float
    counters: Mapping[str, int]
    evicted_idle: tuple[int, ...]  # evictions by bucket of the histogram

    def per_minute(self, name: str) -> float:
        return self.counters.get(name, 0) * 60.0 / self.seconds

    def ratio(self, part: str, whole: str) -> float | None:
        """None where nothing of the whole was counted."""
        total = self.counters.get(whole, 0)
        return self.counters.get(part, 0) / total if total > 0 else None


@dataclass(slots=True)
class Window:
    """The counters of one pool over the last `seconds`. Times are monotonic."""

    seconds: float
    _incarnation: int | None = None
    _points: deque[tuple[float, Mapping[str, int], tuple[int, ...]]] = field(default_factory=deque)

    def take(
        self, now: float, incarnation: int, counters: Mapping[str, int], evicted_idle: Histogram | None
    ) -> Gain | None:
        """Counters as they are now; the gain over the window, or None while too little of it was watched.

        Counters of another incarnation, or smaller than before, begin anew: what was gained meanwhile is not known. So
        do those of a pool that nothing was heard of for much longer than the window.
        """
        counts = evicted_idle.counts if evicted_idle is not None else ()
        newest = self._points[-1][1] if self._points else {}
        late = bool(self._points) and now - self._points[-1][0] > 2 * self.seconds
        back = any(counters.get(name, 0) < value for name, value in newest.items())
        if incarnation != self._incarnation or back or late:
            self._points.clear()
            self._incarnation = incarnation
        while len(self._points) > 1 and self._points[1][0] <= now - self.seconds:
            self._points.popleft()
        if not self._points or now - self._points[-1][0] >= self.seconds / POINTS:
            self._points.append((now, counters, counts))
        began, before, counts_before = self._points[0]
        if now - began < self.seconds * LEAST_SHARE:
            return None
        gained = {name: value - before.get(name, 0) for name, value in counters.items()}
        idle = tuple(new - old for new, old in zip(counts, counts_before, strict=False))
        return Gain(now - began, gained, idle)


def median_bound(counts: tuple[int, ...], bounds: tuple[float, ...]) -> float | None:
    """Upper bound of the bucket that holds the median; None where nothing was counted or it has no bound."""
    total, seen = sum(counts), 0
    for count, bound in zip(counts, bounds, strict=False):
        seen += count
        if total and 2 * seen >= total:
            return bound
    return None


@dataclass(slots=True)
class BestLately:
    """The highest of a number over the last `seconds`, to `step_seconds`."""

    seconds: float = 3600.0
    step_seconds: float = 60.0
    _highest: deque[tuple[float, float]] = field(default_factory=deque)  # begin of a step and its highest

    def take(self, now: float, value: float) -> float:
        """With this value among them."""
        while self._highest and self._highest[0][0] < now - self.seconds:
            self._highest.popleft()
        if self._highest and now - self._highest[-1][0] < self.step_seconds:
            began, highest = self._highest[-1]
            self._highest[-1] = (began, max(highest, value))
        else:
            self._highest.append((now, value))
        return max(highest for _, highest in self._highest)
