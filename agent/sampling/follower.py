"""Follows one map: opens it, reads it, judges its engine, and keeps the last whole sample when that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from agent.forecast import NOT_BLOCKED, Admission, ExhaustionForecast, forecast_exhaustion, judge_admission, queue_grows
from agent.fragmentation import FragmentationReport, analyze
from agent.history import History
from agent.sampling.discovery import FoundMap, printable
from agent.sampling.judgement import Ages, Judgement, Limits, Silence, judge
from agent.sampling.model import Clock, PoolSample, measure_waste, oldest_pinned
from engine_shim.errors import KvatlasError, MapCorrupt, MapUnavailable
from engine_shim.snapshot import EngineIdentity, MapFlags, MapSnapshot

FORECAST_WINDOW_SECONDS = 120.0
QUEUE_WINDOW_SECONDS = 30.0  # of a queue what matters is now
READ_TIMEOUT_SECONDS = 0.25
_UNKNOWN_STATE = 255


class MapSource(Protocol):
    """An open map."""

    @property
    def identity(self) -> EngineIdentity:
        """Valid even where no whole snapshot can be had."""
        ...

    def read(self, timeout_seconds: float = ...) -> MapSnapshot:
        """A whole snapshot. Raises MapUnavailable where none could be had now, MapCorrupt where none can be."""
        ...

    def flags(self) -> MapFlags:
        """Valid even where no whole snapshot can be had."""
        ...

    def heartbeat_unix_ns(self) -> int:
        """Likewise."""
        ...

    def sequence(self) -> int:
        """The publish that the writer is at, likewise; odd within one."""
        ...

    def writer_alive(self) -> bool: ...

    def close(self) -> None: ...


OpenMap = Callable[[Path], MapSource]


@dataclass(slots=True)
class Follower:
    """One map from the time it is found until it leaves the view. `poll` once a tick; never from two threads.

    The file is open only while there is something to be had from it: a map of an engine that is gone, and one that is
    wrong, is closed, and looked at again where its file has changed.
    """

    found: FoundMap
    open_map: OpenMap
    history: History
    limits: Limits
    clock: Clock
    latest: PoolSample | None = None
    fault: str = ""  # why the last poll gave no new snapshot; "" where it did
    waited_seconds: float = 0.0  # of the last poll, for a whole snapshot that did not come
    _source: MapSource | None = field(default=None, repr=False)
    _torn_reads: int = 0
    _torn_word: int | None = None  # the publish that the last read met half-way; None where it was whole
    _whole_at: float | None = None  # when the last whole snapshot was read, monotonic
    _settled: tuple[int, int] | None = None  # stamp of a file that needs no further look while it has this one
    _gone: tuple[float, float] | None = None  # when that was first seen, monotonic, and how old it was then
    _step: Silence = field(default_factory=Silence)
    _heartbeat: Silence = field(default_factory=Silence)
    _publish: Silence = field(default_factory=Silence)
    _reading: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _let_go: bool = False
    _previous_failures: tuple[int, int, int] | None = None  # incarnation, sequence, failed allocations
    _refused: bool = False
    _previous_tokens: tuple[float, int, int] | None = None  # time, incarnation, tokens written

    def poll(
        self, now_unix: float, *, patience_seconds: float = READ_TIMEOUT_SECONDS, may_open: bool = True
    ) -> PoolSample | None:
        """A new sample; where the map cannot be read, the last one with a state that says so, None if there is none.

        `patience_seconds` is how long to wait for a whole snapshot; a map that is not open stays shut without
        `may_open`.
        """
        with self._reading:
            sample = self._poll(now_unix, patience_seconds, may_open)
        if self._let_go:
            self.close()
        return sample

    @property
    def busy(self) -> bool:
        """Is a poll under way? Then another thread is at it, and waits for the file."""
        return self._reading.locked()

    def _poll(self, now_unix: float, patience_seconds: float, may_open: bool) -> PoolSample | None:
        self.waited_seconds = 0.0
        if self._settled is not None:
            if self.found.stamp == self._settled:
                return self.latest  # nobody writes to it any more
            self._settled = None
        began = self.clock.monotonic()
        try:
            if self._source is None:
                if not may_open:
                    self.fault = "left out, as many maps are open as the limit of open files allows; raise ulimit -n"
                    return self.latest
                self._source = self.open_map(self.found.path)
            # Asked before the read: a writer that is gone by now has written its last, and the read gets all of it.
            alive = self._source.writer_alive()
            snapshot, torn_seconds = self._read(self._source, alive, began, patience_seconds)
            if snapshot is None:
                self.latest = self._bare_sample(self._source, began)
                return self.latest
        except (MapUnavailable, MapCorrupt, OSError) as error:
            if isinstance(error, MapCorrupt):
                self._settled = self.found.stamp
            self.fail(error)
            return self.latest
        self.fault = ""
        ages = self._ages(snapshot, now_unix, began)
        judgement = judge(snapshot, ages, writer_alive=alive, limits=self.limits, torn_seconds=torn_seconds)
        seen_alive = self.latest is not None and self._gone is None
        self.latest = self._analyse(snapshot, judgement, torn_seconds > 0, now_unix, began)
        if judgement.state == "gone":
            if self._gone is None:
                # What ended before this agent looked is as old as its last sign; what ended just now is not.
                sign = min(ages.step, ages.heartbeat, ages.publish)
                self._gone = (began, 0.0 if seen_alive else sign)
            self._settled = self.found.stamp
            self._close_source()
        else:
            self._gone = None
        return self.latest

    def _read(
        self, source: MapSource, alive: bool, now: float, patience_seconds: float
    ) -> tuple[MapSnapshot | None, float]:
        """A whole snapshot; else the last one with the flags and the heartbeat of now, and how old it is in seconds.

        None where there is no last one. Raises MapCorrupt where there never will be.
        """
        doubtful = self._torn_word is not None or self._whole_at is None
        if doubtful and (source.sequence() == self._torn_word or source.flags().degraded):
            patience_seconds = 0.0  # a publish that did not end since the last look is not worth a wait
        try:
            snapshot = source.read(patience_seconds)
        except MapUnavailable as error:
            self.waited_seconds = self.clock.monotonic() - now
            self._torn_reads += 1
            self._torn_word = source.sequence()
            if self._whole_at is None or self.latest is None:
                if not alive:
                    raise MapCorrupt(f"{error}; its writer died while it published") from error
                self.fault = printable(error)
                return None, 0.0
            heartbeat = source.heartbeat_unix_ns()
            snapshot = replace(self.latest.snapshot, flags=source.flags(), heartbeat_unix_ns=heartbeat)
            return snapshot, max(now - self._whole_at, 0.001)
        self._torn_word, self._whole_at = None, now
        return snapshot, 0.0

    def _ages(self, snapshot: MapSnapshot, now_unix: float, now: float) -> Ages:
        step_ns = max(snapshot.last_step_unix_ns, snapshot.identity.created_unix_ns)
        return Ages(
            step=self._step.seconds(step_ns, now_unix, now),
            heartbeat=self._heartbeat.seconds(snapshot.heartbeat_unix_ns, now_unix, now),
            publish=self._publish.seconds(snapshot.published_unix_ns, now_unix, now),
        )

    def fail(self, error: Exception) -> None:
        """The map cannot be read: keep the last numbers, say so, and close it so that the next poll opens it anew."""
        expected = isinstance(error, (KvatlasError, OSError))
        self.fault = printable(error if expected else f"{type(error).__name__}: {error}")
        self._close_source()
        if self.latest is not None:
            self.latest = replace(self.latest, state="unreadable", reason=self.fault)

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    def gone_for_seconds(self) -> float:
        """How long ago the engine ended, by its last sign of life; 0 while it has not."""
        if self._gone is None:
            return 0.0
        since, age = self._gone
        return age + self.clock.monotonic() - since

    @property
    def is_open(self) -> bool:
        return self._source is not None

    def close(self) -> None:
        """Let go of the file for good; where a poll is under way, once that is done."""
        self._let_go = True
        if self._reading.acquire(blocking=False):
            self._close_source()
            self._reading.release()

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _bare_sample(self, source: MapSource, began: float) -> PoolSample:
        """What can be said of a map that never gave a whole snapshot: its writer and flags. No block is known."""
        identity, flags = source.identity, source.flags()
        states = np.full(identity.total_blocks, _UNKNOWN_STATE, np.uint8)
        snapshot = MapSnapshot(
            path=str(self.found.path),
            identity=identity,
            flags=flags,
            sequence=0,
            published_unix_ns=identity.created_unix_ns,
            heartbeat_unix_ns=source.heartbeat_unix_ns(),
            last_step_unix_ns=0,
            running_requests=0,
            waiting_requests=0,
            state_counts=(),
            counters=MappingProxyType({}),
            states=states,
            references=None,
            tokens=None,
            owner=None,
            position=None,
            touched_ms=None,
            group=None,
            groups=(),
            owners=(),
            histograms=MappingProxyType({}),
            event_head=0,
        )
        why = "; its observer has given up following the pool" if flags.degraded else ""
        return PoolSample(
            id=self.found.id,
            state="unreadable",
            reason=f"no whole snapshot could be had yet{why}",
            snapshot=snapshot,
            report=analyze(states),
            fragmentation_known=False,
            waste=None,
            oldest_pinned_seconds=None,
            forecast=ExhaustionForecast(None, "nothing is known of its blocks", known=False),
            admission=NOT_BLOCKED,
            queue_grows=False,
            tokens_per_second=None,
            torn_reads=self._torn_reads,
            read_seconds=self.clock.monotonic() - began,
        )

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
        rate = self._tokens_per_second(snapshot, began)
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
            admission=_admission(judgement, snapshot, report, self._was_refused(snapshot)),
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

    def _was_refused(self, snapshot: MapSnapshot) -> bool:
        """Whether the engine asked for blocks in vain between two snapshots; as before where none is new."""
        now = (snapshot.identity.incarnation, snapshot.sequence, snapshot.counters.get("allocation_failures", 0))
        previous, self._previous_failures = self._previous_failures, now
        if previous is None or previous[0] != now[0]:
            self._refused = False
        elif previous[1] != now[1]:
            self._refused = now[2] > previous[2]
        return self._refused

    def _queue_grows(self) -> bool:
        return queue_grows(*self.history.recent(self.found.id, "waiting_requests", QUEUE_WINDOW_SECONDS))

    def _tokens_per_second(self, snapshot: MapSnapshot, now_monotonic: float) -> float | None:
        """Tokens written since the last poll; None at the first one and after a restart."""
        now = (now_monotonic, snapshot.identity.incarnation, snapshot.counters.get("tokens_written", 0))
        previous, self._previous_tokens = self._previous_tokens, now
        if previous is None or previous[1] != now[1] or now[0] <= previous[0] or now[2] < previous[2]:
            return None
        return (now[2] - previous[2]) / (now[0] - previous[0])


def _admission(judgement: Judgement, snapshot: MapSnapshot, report: FragmentationReport, refused: bool) -> Admission:
    if judgement.state != "live":
        return NOT_BLOCKED
    return judge_admission(
        allocatable_blocks=report.allocatable_blocks,
        headroom_blocks=snapshot.identity.headroom_blocks,
        usable_blocks=report.usable_blocks,
        used_blocks=report.used_blocks,
        running=snapshot.running_requests,
        waiting=snapshot.waiting_requests,
        refused=refused,
    )
