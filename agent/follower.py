"""Follows one map: opens it, reads it, judges its engine, and keeps the last whole sample when that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from agent.discovery import FoundMap
from agent.forecast import NOT_BLOCKED, Admission, ExhaustionForecast, forecast_exhaustion, judge_admission, queue_grows
from agent.fragmentation import FragmentationReport, analyze
from agent.history import History
from agent.judgement import Judgement, Limits, judge
from agent.model import NANOSECONDS, Clock, PoolSample, measure_waste, oldest_pinned
from engine_shim.errors import KvatlasError, MapCorrupt, MapUnavailable
from engine_shim.snapshot import MapFlags, MapSnapshot

FORECAST_WINDOW_SECONDS = 120.0
QUEUE_WINDOW_SECONDS = 30.0  # of a queue what matters is now
READ_TIMEOUT_SECONDS = 0.25


class MapSource(Protocol):
    """An open map."""

    def read(self, timeout_seconds: float = ...) -> MapSnapshot:
        """A whole snapshot. Raises MapUnavailable where none could be had now, MapCorrupt where none can be."""
        ...

    def flags(self) -> MapFlags:
        """Valid even where no whole snapshot can be had."""
        ...

    def heartbeat_unix_ns(self) -> int:
        """Likewise."""
        ...

    def writer_alive(self) -> bool: ...

    def close(self) -> None: ...


OpenMap = Callable[[Path], MapSource]


@dataclass(slots=True)
class Follower:
    """One map from the time it is found until it leaves the view. `poll` once a tick; never from two threads."""

    found: FoundMap
    open_map: OpenMap
    history: History
    limits: Limits
    clock: Clock
    latest: PoolSample | None = None
    fault: str = ""  # why the last poll gave no new snapshot; "" where it did
    _source: MapSource | None = field(default=None, repr=False)
    _torn_reads: int = 0
    _whole_unix: float = 0.0  # when the last whole snapshot was read
    _hopeless: bool = False  # the contents are wrong: only another file can help
    _previous_tokens: tuple[float, int, int] | None = None  # time, incarnation, tokens written

    def poll(self, now_unix: float) -> PoolSample | None:
        """A new sample; where the map cannot be read, the last one with a state that says so, None if there is none."""
        if self._hopeless or (self.latest is not None and self.latest.state == "gone"):
            return self.latest  # nobody writes to it any more
        began = self.clock.monotonic()
        try:
            if self._source is None:
                self._source = self.open_map(self.found.path)
            # Asked before the read: a writer that is gone by now has written its last, and the read gets all of it.
            alive = self._source.writer_alive()
            snapshot, torn_seconds = self._read(self._source, alive, now_unix)
        except (MapUnavailable, MapCorrupt, OSError) as error:
            self._hopeless = isinstance(error, MapCorrupt)
            self.fail(error)
            return self.latest
        self.fault = ""
        judgement = judge(
            snapshot, writer_alive=alive, now_unix=now_unix, limits=self.limits, torn_seconds=torn_seconds
        )
        self.latest = self._analyse(snapshot, judgement, torn_seconds > 0, now_unix, began)
        return self.latest

    def _read(self, source: MapSource, alive: bool, now_unix: float) -> tuple[MapSnapshot, float]:
        """A whole snapshot; else the last one with the flags and the heartbeat of now, and how old it is in seconds.

        Raises MapUnavailable where there is no last one.
        """
        try:
            snapshot = source.read(READ_TIMEOUT_SECONDS)
        except MapUnavailable as error:
            self._torn_reads += 1
            if self.latest is None:
                if alive:
                    raise
                raise MapCorrupt(f"{error}; its writer died while it published") from error
            heartbeat = source.heartbeat_unix_ns()
            snapshot = replace(self.latest.snapshot, flags=source.flags(), heartbeat_unix_ns=heartbeat)
            return snapshot, max(now_unix - self._whole_unix, 0.001)
        self._whole_unix = now_unix
        return snapshot, 0.0

    def fail(self, error: Exception) -> None:
        """The map cannot be read: keep the last numbers, say so, and close it so that the next poll opens it anew."""
        expected = isinstance(error, (KvatlasError, OSError))
        self.fault = str(error) if expected else f"{type(error).__name__}: {error}"
        self.close()
        if self.latest is not None:
            self.latest = replace(self.latest, state="unreadable", reason=self.fault)

    def gone_for_seconds(self, now_unix: float) -> float:
        """How long ago the engine ended, by its last sign of life; 0 while it has not."""
        if self.latest is None or self.latest.state != "gone":
            return 0.0
        snapshot = self.latest.snapshot
        last_ns = max(snapshot.heartbeat_unix_ns, snapshot.published_unix_ns, snapshot.identity.created_unix_ns)
        return max(0.0, now_unix - last_ns / NANOSECONDS)

    @property
    def is_open(self) -> bool:
        return self._source is not None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _analyse(
        self, snapshot: MapSnapshot, judgement: Judgement, torn: bool, now_unix: float, began: float
    ) -> PoolSample:
        last = self.latest
        if (
            last is not None
            and last.snapshot.sequence == snapshot.sequence
            and last.identity.incarnation == snapshot.identity.incarnation
        ):
            report, waste = last.report, last.waste  # nothing was published since
        else:
            report, waste = analyze(snapshot.states), measure_waste(snapshot)
        awake = not snapshot.flags.sleeping
        rate = self._tokens_per_second(snapshot, now_unix)
        # Nothing is remembered of a time that nothing is known about.
        if judgement.state in ("live", "stalled", "sleeping") and not torn:
            self.history.append(
                self.found.id,
                now_unix,
                {
                    "fragmentation": report.fragmentation_rate if awake else None,
                    "strict_fragmentation": report.strict_fragmentation_rate if awake else None,
                    "free": report.free_blocks,
                    "cached": report.cached_blocks,
                    "used": report.used_blocks,
                    "pinned": report.pinned_blocks,
                    "largest_allocatable_run": report.largest_allocatable_run if awake else None,
                    "tail_waste_bytes": waste.bytes if waste else None,
                    "tokens_per_second": rate,
                    "waiting_requests": snapshot.waiting_requests,
                },
            )
        return PoolSample(
            id=self.found.id,
            state=judgement.state,
            reason=judgement.reason,
            snapshot=snapshot,
            report=report,
            fragmentation_known=awake,
            waste=waste,
            oldest_pinned_seconds=oldest_pinned(snapshot, now_unix),
            forecast=self._forecast(judgement, snapshot.identity.headroom_blocks),
            admission=_admission(judgement, snapshot, report),
            queue_grows=judgement.state == "live" and self._queue_grows(),
            tokens_per_second=rate,
            torn_reads=self._torn_reads,
            read_seconds=self.clock.monotonic() - began,
        )

    def _forecast(self, judgement: Judgement, headroom_blocks: int) -> ExhaustionForecast:
        if judgement.state != "live":
            return ExhaustionForecast(None, f"the engine is {judgement.state}", known=False)
        times, free = self.history.recent(self.found.id, "free", FORECAST_WINDOW_SECONDS)
        _, cached = self.history.recent(self.found.id, "cached", FORECAST_WINDOW_SECONDS)
        return forecast_exhaustion(times, free + cached, headroom_blocks)

    def _queue_grows(self) -> bool:
        return queue_grows(*self.history.recent(self.found.id, "waiting_requests", QUEUE_WINDOW_SECONDS))

    def _tokens_per_second(self, snapshot: MapSnapshot, now_unix: float) -> float | None:
        """Tokens written since the last poll; None at the first one and after a restart."""
        now = (now_unix, snapshot.identity.incarnation, snapshot.counters.get("tokens_written", 0))
        previous, self._previous_tokens = self._previous_tokens, now
        if previous is None or previous[1] != now[1] or now[0] <= previous[0] or now[2] < previous[2]:
            return None
        return (now[2] - previous[2]) / (now[0] - previous[0])


def _admission(judgement: Judgement, snapshot: MapSnapshot, report: FragmentationReport) -> Admission:
    if judgement.state != "live":
        return NOT_BLOCKED
    return judge_admission(
        allocatable_blocks=report.allocatable_blocks,
        headroom_blocks=snapshot.identity.headroom_blocks,
        usable_blocks=report.usable_blocks,
        used_blocks=report.used_blocks,
        running=snapshot.running_requests,
        waiting=snapshot.waiting_requests,
    )
