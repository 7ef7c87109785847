"""Reads a recording: what it is, which samples it has, and the pool at any instant of it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.devices.model import DevicesView
from agent.recording.chunks import MAX_PAYLOAD, ChunkFile, ChunkKind, ChunkPlace, RecordingError
from agent.recording.contents import (
    NO_FACTS,
    Facts,
    Header,
    decode_events,
    decode_gap,
    decode_header,
    decode_sample,
    decode_words,
    events_in,
    snapshot_of,
)
from agent.recording.device_contents import Plain, decode_devices
from agent.recording.replica import Replica
from agent.sampling.model import NANOSECONDS
from engine_shim.snapshot import MapSnapshot

MAX_NAMED = 1000  # gaps and notes that are kept; the others are counted


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that were lost before they were recorded. The sample after it is right again."""

    time_unix: float
    first: int  # number of the first lost event
    count: int


@dataclass(frozen=True, slots=True)
class State:
    """The pool at one instant of a recording."""

    snapshot: MapSnapshot
    taken_unix: float  # by the wall clock of the recorder, at the sample before
    alive: bool  # did the engine run?
    devices: DevicesView | None = None  # as told at the sample before, times on the time line; None: not recorded


class Recording:
    """One file, looked through once: a few bytes are kept for each sample."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError where the file is none, or is damaged."""
        self.path = path
        self._chunks = ChunkFile(path)
        try:
            self._look_through()
        except BaseException:
            self._chunks.close()
            raise

    def close(self) -> None:
        self._chunks.close()

    def _look_through(self) -> None:
        places = self._chunks.places()
        head = next(places, None)
        if head is None or head.kind != ChunkKind.HEADER:
            raise RecordingError(f"{self.path} does not begin with the header of a recording; it ended at its start")
        with self._blamed(head):
            self.header: Header = decode_header(self._chunks.read(head))
        self._limit = min(MAX_PAYLOAD, 64 * 2**20 + 32 * self.header.identity.total_blocks)
        self._first = head.end
        self._times, self._offsets, self._bases = array("q"), array("q"), array("q")
        self.gaps: list[Gap] = []
        self.more_gaps = self.lost_events = self.events = 0
        self.notes: list[str] = []
        self.ended = ""  # why the recording ends; "" where its recorder was killed
        last_ns, told_devices = head.time_ns, True
        for place in places:
            if place.time_ns < last_ns:
                raise RecordingError(f"{self.path} is damaged at byte {place.offset}: its time goes back")
            last_ns = place.time_ns
            if place.kind in (ChunkKind.SAMPLE, ChunkKind.BASE):
                if place.kind == ChunkKind.BASE:
                    self._bases.append(len(self._times))
                self._times.append(place.time_ns)
                self._offsets.append(place.offset)
                told_devices = False
            elif place.kind == ChunkKind.DEVICES:
                if told_devices:  # many of them would take their time, and a recorder writes none
                    raise RecordingError(
                        f"{self.path} is damaged at byte {place.offset}: devices are told of once behind a sample"
                    )
                told_devices = True
            elif place.kind == ChunkKind.EVENTS:
                self.events += events_in(place.size)
            elif place.kind == ChunkKind.GAP:
                gap = self._gap(place)
                self.lost_events += gap.count
                if len(self.gaps) < MAX_NAMED:
                    self.gaps.append(gap)
                else:
                    self.more_gaps += 1
            elif place.kind == ChunkKind.NOTE and len(self.notes) < MAX_NAMED:
                with self._blamed(place):
                    self.notes.append(str(decode_words(self._small(place)).get("note", "")))
            elif place.kind == ChunkKind.END:
                with self._blamed(place):
                    self.ended = str(decode_words(self._small(place)).get("reason", ""))
        if not self._bases or self._bases[0] != 0:
            raise RecordingError(f"{self.path} holds no sample to begin with; it ended at its start")
        self._end_ns = last_ns

    @property
    def torn(self) -> str:
        """What was dropped at the end of the file; "" where nothing was."""
        return self._chunks.torn

    @property
    def start_ns(self) -> int:
        """The first sample, on the recording's time line."""
        return self._times[0]

    @property
    def end_ns(self) -> int:
        """The last thing that is recorded."""
        return max(self._end_ns, self._times[-1])

    @property
    def sample_times_ns(self) -> array[int]:
        """When samples were taken, rising."""
        return self._times

    def cursor(self) -> Cursor:
        """Something that goes along the recording; any number may at once."""
        return Cursor(self)

    def places(self, sample: int = 0) -> Iterator[ChunkPlace]:
        """The chunks from the sample of this number on."""
        return self._chunks.places(self._offsets[sample])

    def events_at(self, place: ChunkPlace) -> tuple[int, NDArray[np.void]]:
        """The number of the first event of a chunk, and its rows. Raises RecordingError."""
        with self._blamed(place):
            self._check_size(place)
            return decode_events(self._chunks.read(place))

    def sample_at(self, place: ChunkPlace, before: Facts, columns: Mapping[str, NDArray[Any]]) -> Facts:
        """The facts of a sample, with `columns` brought up to it in place. Raises RecordingError."""
        with self._blamed(place):
            self._check_size(place)
            if place.kind == ChunkKind.BASE:
                before = NO_FACTS
                for column in columns.values():
                    column[:] = 0
            return decode_sample(self._chunks.read(place), before, columns)

    def devices_at(self, place: ChunkPlace, before: Plain) -> tuple[Plain, DevicesView]:
        """What a chunk tells of devices, after what was known `before`. Raises RecordingError."""
        with self._blamed(place):
            return decode_devices(self._small(place), before)

    def gap_at(self, place: ChunkPlace) -> Gap:
        """Raises RecordingError."""
        return self._gap(place)

    def _check_size(self, place: ChunkPlace) -> None:
        if place.size > self._limit:
            raise ValueError(f"{place.size} bytes are more than a pool of this size can need")

    def _gap(self, place: ChunkPlace) -> Gap:
        with self._blamed(place):
            first, count = decode_gap(self._small(place))
        return Gap(place.time_ns / NANOSECONDS, first, count)

    def _small(self, place: ChunkPlace) -> bytes:
        if place.size > 1 << 20:
            raise ValueError(f"{place.size} bytes cannot be")
        return self._chunks.read(place)

    @contextmanager
    def _blamed(self, place: ChunkPlace) -> Iterator[None]:
        """A chunk that tells what cannot be is damage, or no work of ours."""
        try:
            yield
        except ValueError as error:
            raise RecordingError(f"{self.path} cannot be read at byte {place.offset}: {error}") from error

    def base_before(self, time_ns: int) -> int:
        """The number of the sample to begin with for a time: the last base up to it, or the first of all."""
        upto = bisect_right(self._times, time_ns)
        return self._bases[max(0, bisect_right(self._bases, upto - 1) - 1)]

    def samples_up_to(self, time_ns: int) -> int:
        """How many samples were taken up to a time."""
        return bisect_right(self._times, time_ns)


class Cursor:
    """The pool at one instant of a recording, which moves; exact to the event.

    Between samples, tokens and the table of requests are as of the sample before: events do not tell them.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        identity = recording.header.identity
        self.replica = Replica(identity.total_blocks, recording.header.columns, identity.created_unix_ns)
        self._start(0)

    def _start(self, sample: int) -> None:
        self._places = self.recording.places(sample)
        self._place: ChunkPlace | None = next(self._places, None)
        self._rows: NDArray[np.void] | None = None  # of the chunk at `_place`, not yet followed
        self._facts = NO_FACTS
        self._devices_told: Plain = {}
        self._devices: DevicesView | None = None
        self._sample_ns = 0
        self._next_event = 0
        self._since_sample = 0  # events that were followed
        self.time_ns = -1
        self.samples = sample  # that were passed
        self.events_followed = 0  # since it was last set anew

    def seek(self, time_ns: int) -> None:
        """Go to an instant, forwards or back; one before the first sample is that. Raises RecordingError."""
        time_ns = max(time_ns, self.recording.start_ns)
        base, wanted = self.recording.base_before(time_ns), self.recording.samples_up_to(time_ns)
        if time_ns < self.time_ns or self.time_ns < 0 or base >= self.samples:
            self._start(base)
        self.time_ns = -1  # until it has come there: what breaks off half-way is begun anew
        while self._place is not None and self.samples < wanted:
            self._follow(self._place, None)
        while self._place is not None and self._place.kind not in (ChunkKind.SAMPLE, ChunkKind.BASE):
            if not self._follow(self._place, time_ns):
                break
        self.time_ns = time_ns

    def _follow(self, place: ChunkPlace, until_ns: int | None) -> bool:
        """Follow one chunk, of events as far as to a time; False where some are left."""
        if place.kind in (ChunkKind.SAMPLE, ChunkKind.BASE):
            self._take_sample(place)
        elif place.kind == ChunkKind.EVENTS:
            if not self._take_events(place, until_ns):
                return False
        elif place.kind == ChunkKind.GAP:
            gap = self.recording.gap_at(place)
            self._expect(place, gap.first)
            self._next_event += gap.count
        elif place.kind == ChunkKind.DEVICES:
            self._devices_told, self._devices = self.recording.devices_at(place, self._devices_told)
        self._place, self._rows = next(self._places, None), None
        return True

    def _take_sample(self, place: ChunkPlace) -> None:
        facts = self.recording.sample_at(place, self._facts, self.replica.columns)
        if place.kind == ChunkKind.BASE:
            self._devices_told, self._devices = {}, None  # said anew after it
        if self._facts is not NO_FACTS:
            self._expect(place, facts.event_head)
        self._facts, self._next_event, self._since_sample = facts, facts.event_head, 0
        self._sample_ns = place.time_ns
        self.samples += 1

    def _take_events(self, place: ChunkPlace, until_ns: int | None) -> bool:
        if self._rows is None:
            first, self._rows = self.recording.events_at(place)
            self._expect(place, first)
        rows = self._rows
        if until_ns is not None:
            # The writer's clock, on the recording's time line; where it was set back, in order all the same.
            ahead_ns = round(self._facts.taken_unix * NANOSECONDS) - self._sample_ns
            times = np.maximum.accumulate(rows["time_ns"]) - ahead_ns
            rows = rows[: int(np.searchsorted(times, until_ns, side="right"))]
        self.replica.apply(rows)
        self._next_event += len(rows)
        self._since_sample += len(rows)
        self.events_followed += len(rows)
        self._rows = self._rows[len(rows) :]
        return not len(self._rows)

    def _expect(self, place: ChunkPlace, event: int) -> None:
        if event != self._next_event:
            raise RecordingError(
                f"{self.recording.path} is not whole at byte {place.offset}: event {self._next_event} was to come, and"
                f" {event} does, without a gap that says so"
            )

    def state(self) -> State:
        """The pool now. Raises RecordingError where what is told of it cannot be."""
        facts, columns = self._facts, self.replica.columns
        try:
            snapshot = snapshot_of(self.recording.header, facts, columns, str(self.recording.path))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{self.recording.path}: a sample cannot be: {error}") from error
        if self._since_sample:
            counts = np.bincount(columns["state"], minlength=len(facts.values["state_counts"]))
            # A reader that knows the sequence takes the blocks for known.
            snapshot = replace(
                snapshot,
                sequence=snapshot.sequence + 1,
                event_head=self._next_event,
                state_counts=tuple(counts[: len(facts.values["state_counts"])].tolist()),
            )
        return State(snapshot, facts.taken_unix, facts.alive, self._devices)

    @property
    def sample_ns(self) -> int:
        """When the last sample before was taken."""
        return self._sample_ns
