"""Records one map: every event of its ring, and beside them samples of what the ring does not tell, and of devices."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agent.devices.model import DevicesView
from agent.recording.chunks import ChunkKind, ChunkWriter
from agent.recording.contents import (
    MAX_EVENTS,
    NO_FACTS,
    Facts,
    Header,
    columns_of,
    encode_events,
    encode_gap,
    encode_header,
    encode_sample,
    encode_words,
    facts_of,
)
from agent.recording.device_contents import Plain, encode_devices, plain_view
from agent.recording.replica import Replica
from agent.sampling.model import NANOSECONDS, Clock
from engine_shim import __version__
from engine_shim.errors import MapUnavailable
from engine_shim.snapshot import EngineIdentity, EventBatch, MapFlags, MapSnapshot

BASE_SECONDS = 300.0
"""A reader that looks for a time begins at the base before it."""
FEWEST_POLLS = 4  # of the ring, in the time between two samples
_WHOLE_TRIES = 5
_LEAST_PAUSE_SECONDS = 0.01
SILENT = "this map publishes no events: between two samples nothing is known, and it cannot be simulated"

Outcome = Literal["recording", "ended", "died"]


class RecordableMap(Protocol):
    """An open map, as MapReader is one."""

    @property
    def identity(self) -> EngineIdentity: ...
    def read(self, timeout_seconds: float = ...) -> MapSnapshot: ...
    def flags(self) -> MapFlags: ...
    def sequence(self) -> int: ...
    def writer_alive(self) -> bool: ...
    def events(self, since: int) -> EventBatch: ...


@dataclass(slots=True)
class Tally:
    """What a recording holds so far."""

    events: int = 0
    gaps: int = 0
    lost_events: int = 0
    samples: int = 0
    unavailable_samples: int = 0  # no whole snapshot could be had
    mixed_samples: int = 0  # some columns are of a later publish than the states
    device_readings: int = 0  # what was told of devices, where it was not what was told before
    silent_map: bool = False  # blocks change and its ring has never told of any


@dataclass(slots=True)
class Recorder:
    """`begin` once, `poll` while there is time, then `end`. Not thread-safe.

    It reads the map, and at each sample asks `devices`, where it is given, for the latest view of them: that must come
    at once, and have its times by `clock`.
    """

    source: RecordableMap
    writer: ChunkWriter
    id: str
    interval_seconds: float = 1.0
    clock: Clock = field(default_factory=Clock)
    sleep: Callable[[float], None] = time.sleep
    devices: Callable[[], DevicesView] | None = None
    tally: Tally = field(default_factory=Tally)
    _facts: Facts = NO_FACTS
    _view: DevicesView | None = None  # that was written last
    _told: Plain = field(default_factory=dict)  # what a reader knows of devices by now
    _replica: Replica | None = None
    _next_event: int = 0
    _sample_due: float = 0.0
    _base_due: float = 0.0
    _began: tuple[float, float] = (0.0, 0.0)  # wall, monotonic
    _unavailable: bool = False

    def begin(self) -> None:
        """Write the header and the first base. Raises MapUnavailable where no snapshot can be had, RecordingFull."""
        alive = self.source.writer_alive()
        snapshot, whole = self._snapshot(1.0)
        now = self.clock.monotonic()
        self._began = self.clock.wall(), now
        columns = tuple(columns_of(snapshot))
        header = Header(
            self.id,
            snapshot.identity,
            snapshot.groups,
            columns,
            self.interval_seconds,
            self._began[0],
            __version__,
            socket.gethostname(),
        )
        self.writer.append(ChunkKind.HEADER, self._line_ns(now), encode_header(header))
        self._replica = Replica(snapshot.identity.total_blocks, columns, snapshot.identity.created_unix_ns)
        self._next_event = snapshot.event_head
        self._base_due = self._sample_due = now
        self._write_sample(snapshot, alive, whole, now)

    def poll(self) -> Outcome:
        """Take what the ring holds, and a sample where one is due. Raises RecordingFull, MapCorrupt."""
        alive = self.source.writer_alive()
        self._take_events(None, self.clock.monotonic())
        now = self.clock.monotonic()
        if alive and now < self._sample_due:
            return "recording"
        try:
            snapshot, whole = self._snapshot(0.25 if alive else 0.0)
        except MapUnavailable as error:
            self.tally.unavailable_samples += 1
            if not self._unavailable:
                self._note(now, f"no sample: {error}")
            self._unavailable = True
            self._sample_due = now + self.interval_seconds
            return "recording" if alive else "died"
        self._unavailable = False
        self._take_events(snapshot.event_head, now)
        self._write_sample(snapshot, alive, whole, now)
        if alive:
            return "recording"
        return "ended" if snapshot.flags.closing else "died"

    def pause_seconds(self) -> float:
        """How long the ring may be left alone: until the next sample, or a part of the time between two."""
        left = self._sample_due - self.clock.monotonic()
        return max(min(left, self.interval_seconds / FEWEST_POLLS), _LEAST_PAUSE_SECONDS)

    def end(self, why: str) -> None:
        """Say why this is the end. Raises RecordingFull."""
        told = {name: getattr(self.tally, name) for name in Tally.__slots__}
        self.writer.append(ChunkKind.END, self._line_ns(self.clock.monotonic()), encode_words(reason=why, written=told))

    def _snapshot(self, timeout_seconds: float) -> tuple[MapSnapshot, bool]:
        """A snapshot, and whether nothing was published until all of its columns were read."""
        snapshot = self.source.read(timeout_seconds)
        for attempt in range(_WHOLE_TRIES):
            if self.source.sequence() == snapshot.sequence:
                return snapshot, True
            if attempt + 1 < _WHOLE_TRIES:
                self.sleep(0.0005)
                snapshot = self.source.read(timeout_seconds)
        return snapshot, False

    def _take_events(self, until: int | None, now: float) -> None:
        """Write what the ring holds from the next event on, up to before number `until`, and follow it.

        What leads to a sample has the sample's time: the time line never goes back.
        """
        if until is not None and until <= self._next_event:
            return
        batch = self.source.events(self._next_event)
        if batch.missed:
            lost = batch.missed if until is None else min(batch.missed, until - self._next_event)
            self.writer.append(ChunkKind.GAP, self._line_ns(now), encode_gap(self._next_event, lost))
            self.tally.gaps += 1
            self.tally.lost_events += lost
            self._next_event += lost
            if lost < batch.missed:
                return
        events = batch.events if until is None else batch.events[: max(0, until - self._next_event)]
        for first in range(0, len(events), MAX_EVENTS):
            part = events[first : first + MAX_EVENTS]
            self.writer.append(ChunkKind.EVENTS, self._line_ns(now), encode_events(self._next_event, part))
            if left_out := self._columns().apply(part):
                self._note(now, f"{left_out} events from number {self._next_event} on are of kinds not known here")
            self._next_event += len(part)
            self.tally.events += len(part)

    def _write_sample(self, snapshot: MapSnapshot, alive: bool, whole: bool, now: float) -> None:
        replica, actual = self._columns(), columns_of(snapshot)
        facts = facts_of(snapshot, taken_unix=self.clock.wall(), alive=alive, whole=whole)
        kind, before = ChunkKind.SAMPLE, self._facts
        if now >= self._base_due:
            kind, before = ChunkKind.BASE, NO_FACTS
            self._base_due = now + BASE_SECONDS
            self._view, self._told = None, {}
            for column in replica.columns.values():
                column[:] = 0
        self.writer.append(kind, self._line_ns(now), encode_sample(before, facts, replica.columns, actual))
        for name, column in replica.columns.items():
            column[:] = actual[name]
        self._facts = facts
        self.tally.samples += 1
        if not self.tally.silent_map and not snapshot.event_head and snapshot.counters.get("blocks_allocated", 0):
            self.tally.silent_map = True
            self._note(now, SILENT)
        self.tally.mixed_samples += not whole
        self._sample_due = max(self._sample_due + self.interval_seconds, now)
        self._write_devices(now)

    def _write_devices(self, now: float) -> None:
        """What is told of devices, where that is news. It follows the sample that it belongs to."""
        view = None if self.devices is None else self.devices()
        if view is None or view is self._view:
            return
        told = plain_view(view, self._line_ns)
        if told != self._told:
            self.writer.append(ChunkKind.DEVICES, self._line_ns(now), encode_devices(self._told, told))
            self.tally.device_readings += 1
        self._view, self._told = view, told

    def _note(self, now: float, text: str) -> None:
        self.writer.append(ChunkKind.NOTE, self._line_ns(now), encode_words(note=text))

    def _columns(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("begin() comes first")
        return self._replica

    def _line_ns(self, now: float) -> int:
        """The time line: Unix time as of the beginning, and from there on by a clock that is never set."""
        wall, monotonic = self._began
        return round(wall * NANOSECONDS) + round((now - monotonic) * NANOSECONDS)


def record(
    recorder: Recorder, *, stopping: Callable[[float], bool], seconds: float | None, told: Callable[[Path], None]
) -> str:
    """Record until the engine ends, `seconds` have passed, or `stopping`, which waits so many seconds, says so.

    Returns why it ended. Whatever ends it, what was written is given its name. Raises MapUnavailable, MapCorrupt,
    RecordingFull and RecordingError.
    """
    try:
        recorder.begin()
    except BaseException:
        recorder.writer.discard()
        raise
    try:
        told(recorder.writer.path)
        began = recorder.clock.monotonic()
        while True:
            outcome = recorder.poll()
            if outcome == "ended":
                why = "the engine ended in good order"
                break
            if outcome == "died":
                why = "the engine ended without closing its map"
                break
            left = float("inf") if seconds is None else began + seconds - recorder.clock.monotonic()
            if left <= 0:
                why = f"{seconds:g} s were asked for"
                break
            if stopping(min(left, recorder.pause_seconds())):
                why = "it was stopped"
                recorder.poll()
                break
        recorder.end(why)
    finally:
        recorder.writer.finish()
    return why
