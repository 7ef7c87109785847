"""The reading end of an allocation map: whole snapshots, beside a writer that never waits.

Reads go through `preadv`, so that a file cut short is an error here and not a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map.claim import writer_holds
from engine_shim.allocation_map.file import MapFile, identity_of, open_map
from engine_shim.errors import MapCorrupt, MapUnavailable
from engine_shim.layout import COLUMNS, COUNTERS, HISTOGRAM_BOUNDS_SECONDS, HISTOGRAMS, SEGMENT_BLOCKS
from engine_shim.snapshot import (
    EngineIdentity,
    EventBatch,
    GroupEntry,
    Histogram,
    MapFlags,
    MapSnapshot,
    OwnerEntry,
)

_NEVER = np.uint64(2**64 - 1)  # no segment word: words are even when at rest
_ALIGNMENT = 64  # bytes: a cache line, and more than any column's item
_COLUMN_TRIES = 20
_OWNER_FIELDS = ["owner", "blocks", "tokens", "first_seen_unix_ns", "request_id", "lora", "cache_salt"]


class MapReader:
    """Reads one map. Keeps the file open, so that it can read a map whose name is gone.

    Not thread-safe. Must not run in the writer's own process: closing any descriptor of a file drops the POSIX
    locks that the process has on it.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises MapUnavailable where nothing can be read, MapCorrupt or MapVersionError where it is no map."""
        self.path = path
        self._clock = clock
        self._sleep = sleep
        self._map: MapFile = open_map(path)
        self._live_sequence = -1
        blocks = self._map.total_blocks
        segments = self._map.regions["segments"].count
        self._states = np.zeros(blocks, np.uint8)
        self._state_words = np.full(segments, _NEVER)
        self._columns = {
            name: np.zeros(blocks, COLUMNS[name]) for name in layout.OPTIONAL_COLUMNS if name in self._map.regions
        }
        self._column_words = np.full(segments, _NEVER)
        self._groups = self._read_groups()
        self.torn_reads = 0  # attempts that met a publish; each was thrown away
        self.stale_segments = 0  # segments of optional columns that kept an older state in some snapshot

    @property
    def identity(self) -> EngineIdentity:
        """Who writes this map."""
        return identity_of(self._map.header, self._read_live())

    def read(self, timeout_seconds: float = 0.25) -> MapSnapshot:
        """One whole snapshot.

        Raises:
            MapUnavailable: no whole one could be had in time: the writer is too restless, or died while publishing.
            MapCorrupt: the file was cut short or changed under us.
        """
        deadline = self._clock() + timeout_seconds
        while True:
            live, owners, histograms = self._attempt()
            if live is not None:
                break
            self.torn_reads += 1
            if self._clock() >= deadline:
                raise MapUnavailable(f"{self.path}: no whole snapshot within {timeout_seconds:g} s")
            # A random pause, so that a reader cannot stay in step with the writer's publishes.
            self._sleep(random.uniform(0.0001, 0.001))
        self._refresh_columns()
        return self._snapshot(live, owners, histograms)

    def flags(self) -> MapFlags:
        """The flags alone, valid even where a publish never ended."""
        return _flags(self._read_live())

    def heartbeat_unix_ns(self) -> int:
        """The last sign of life of the writer's process, valid even where a publish never ended."""
        return int(self._read_live()["heartbeat_unix_ns"])

    def sequence(self) -> int:
        """The publish that the writer is at; odd within one."""
        return int(self._read_live()["sequence"])

    def writer_alive(self) -> bool:
        """Does the process that made this map still hold its lock? Freed by the kernel on any end, kill -9 included."""
        return writer_holds(self._map.file)

    def replaced(self) -> bool:
        """Does the path lead to another file by now, or to none?"""
        try:
            found = os.stat(self.path)
        except OSError:
            return True
        return (found.st_ino, found.st_dev) != self._map.file_id

    def events(self, since: int) -> EventBatch:
        """Events from number `since` up to the newest; those that the ring no longer holds count as missed."""
        slots = self._map.regions["events"].count
        head = int(self._read_live()["event_head"])
        first = min(max(since, head - slots, 0), head)
        rows = np.empty(head - first, layout.EVENT)
        at = first % slots
        upper = min(len(rows), slots - at)
        self._read_items("events", at, rows[:upper])
        self._read_items("events", 0, rows[upper:])
        # What the writer began to overwrite meanwhile is not what it was.
        safe = int(self._read_live()["event_claim"]) - slots
        lost = min(max(0, safe - first), len(rows))
        missed = max(0, first - since) + lost
        return EventBatch(events=rows[lost:], next_head=head, missed=missed)

    def close(self) -> None:
        """Let go of the file; the map stays."""
        with suppress(OSError):
            os.close(self._map.file)

    # ---- one attempt at a whole snapshot --------------------------------------------------------------------------

    def _attempt(self) -> tuple[np.void | None, NDArray[Any], NDArray[Any]]:
        """States, counts, owners and histograms of one publish, or None for the first where one got in between.

        Segments that are as they were need not be read again, so retries get ever shorter.
        """
        live = self._read_live()
        nothing: NDArray[Any] = np.empty(0)
        if int(live["sequence"]) % 2:
            return None, nothing, nothing
        words = self._read_table("segments")
        dirty = np.flatnonzero(words != self._state_words)
        # Recorded before the data is read: data newer than its word is read once more next time, never trusted.
        self._state_words[dirty] = np.where(words[dirty] % 2 == 0, words[dirty], _NEVER)
        for first, last in _ranges(dirty):
            self._read_items(
                "state", first * SEGMENT_BLOCKS, self._states[first * SEGMENT_BLOCKS : last * SEGMENT_BLOCKS]
            )
        rows = min(int(live["owner_rows"]), self._map.regions["owners"].count)
        owners = np.empty(rows, layout.OWNER)
        self._read_items("owners", 0, owners)
        histograms = self._read_table("histograms")
        if not self._unchanged_since(live):
            return None, nothing, nothing
        return live, owners, histograms

    def _unchanged_since(self, live: np.void) -> bool:
        """The check that makes a snapshot whole: no publish has begun since `live` was read."""
        return int(self._read_live()["sequence"]) == int(live["sequence"])

    def _refresh_columns(self) -> None:
        """Bring the optional columns up to date, each segment valid in itself."""
        if not self._columns:
            return
        pending = np.flatnonzero(self._read_table("segments") != self._column_words)
        whole_ranges = True
        for _ in range(_COLUMN_TRIES):
            if not len(pending):
                return
            pieces = _ranges(pending) if whole_ranges else [(int(s), int(s) + 1) for s in pending]
            for first, last in pieces:
                self._read_column_segments(first, last)
            pending = np.flatnonzero(self._read_table("segments") != self._column_words)
            whole_ranges = False  # a restless writer leaves no long stretch alone, but a single segment
        self.stale_segments += len(pending)

    def _read_column_segments(self, first: int, last: int) -> None:
        words = np.empty(last - first, np.uint64)
        self._read_items("segments", first, words)
        start, stop = first * SEGMENT_BLOCKS, min(last * SEGMENT_BLOCKS, self._map.total_blocks)
        fresh = {name: np.empty(stop - start, column.dtype) for name, column in self._columns.items()}
        for name, part in fresh.items():
            self._read_items(name, start, part)
        after = np.empty(last - first, np.uint64)
        self._read_items("segments", first, after)
        good = (words == after) & (words % 2 == 0)
        self._column_words[first:last][good] = words[good]
        if good.all():
            for name, part in fresh.items():
                self._columns[name][start:stop] = part
            return
        for segment in np.flatnonzero(good).tolist():
            low = segment * SEGMENT_BLOCKS
            high = min(low + SEGMENT_BLOCKS, stop - start)
            for name, part in fresh.items():
                self._columns[name][start + low : start + high] = part[low:high]

    # ---- raw reads --------------------------------------------------------------------------------------------------

    def _read_live(self) -> np.void:
        live = np.zeros(1, layout.LIVE)
        self._read_into(self._map.live_offset, live, self._map.live_bytes)
        row: np.void = live[0]
        return row

    def _read_table(self, name: str) -> NDArray[Any]:
        region = self._map.regions[name]
        table = np.empty(region.count, region.dtype)
        self._read_items(name, 0, table)
        return table

    def _read_items(self, name: str, first: int, into: NDArray[Any]) -> None:
        if len(into):
            region = self._map.regions[name]
            self._read_into(region.offset + first * region.dtype.itemsize, into, into.nbytes)

    def _read_into(self, offset: int, into: NDArray[Any], size: int) -> None:
        size = min(size, into.nbytes)
        view = memoryview(into.data).cast("B")[:size]
        try:
            got = os.preadv(self._map.file, [view], offset)
            while 0 < got < size:
                more = os.preadv(self._map.file, [view[got:]], offset + got)
                if more == 0:
                    break
                got += more
        except OSError as error:
            raise MapUnavailable(f"{self.path}: cannot be read ({error.strerror})") from error
        if got < size:
            raise MapCorrupt(f"{self.path}: cut short: {size} bytes wanted at {offset}, {got} there")

    def _read_groups(self) -> tuple[GroupEntry, ...]:
        return tuple(
            GroupEntry(
                id=int(row["id"]),
                kind=row["kind"].decode("utf-8", "replace"),
                block_tokens=int(row["block_tokens"]),
                layers=int(row["layers"]),
                bytes_per_block=int(row["bytes_per_block"]),
                window_tokens=int(row["window_tokens"]),
            )
            for row in self._read_table("groups")
        )

    def _snapshot(self, live: np.void, owners: NDArray[Any], histograms: NDArray[Any]) -> MapSnapshot:
        columns = _frozen({"state": self._states, **self._columns})
        return MapSnapshot(
            path=str(self.path),
            identity=identity_of(self._map.header, live),
            flags=_flags(live),
            sequence=int(live["sequence"]),
            published_unix_ns=int(live["published_unix_ns"]),
            heartbeat_unix_ns=int(live["heartbeat_unix_ns"]),
            last_step_unix_ns=int(live["last_step_unix_ns"]),
            running_requests=int(live["running_requests"]),
            waiting_requests=int(live["waiting_requests"]),
            state_counts=tuple(live["state_counts"].tolist()),
            counters=MappingProxyType(dict(zip(COUNTERS, live["counters"].tolist(), strict=False))),
            states=columns["state"],
            references=columns.get("references"),
            tokens=columns.get("tokens"),
            owner=columns.get("owner"),
            position=columns.get("position"),
            touched_ms=columns.get("touched"),
            group=columns.get("group"),
            groups=self._groups,
            owners=_owners(owners),
            histograms=MappingProxyType(
                {
                    name: Histogram(HISTOGRAM_BOUNDS_SECONDS, tuple(row["counts"].tolist()), float(row["sum_seconds"]))
                    for name, row in zip(HISTOGRAMS, histograms, strict=False)
                }
            ),
            event_head=int(live["event_head"]),
        )


def _owners(rows: NDArray[Any]) -> tuple[OwnerEntry, ...]:
    """The rows in use. As plain tuples: a field of a NumPy record costs a microsecond, and there may be thousands."""
    return tuple(
        OwnerEntry(
            owner=owner,
            request_id=request_id.decode("utf-8", "replace"),
            lora=lora.decode("utf-8", "replace"),
            cache_salt=cache_salt.decode("utf-8", "replace"),
            tokens=tokens,
            blocks=blocks,
            first_seen_unix_ns=first_seen_unix_ns,
        )
        for owner, blocks, tokens, first_seen_unix_ns, request_id, lora, cache_salt in rows[_OWNER_FIELDS][
            rows["owner"] != layout.NO_OWNER
        ].tolist()
    )


def _frozen(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Read-only copies, all in pages of their own that go back to the system with the last of them.

    Samples outlive the work between them: on the heap they would end up strewn between shorter-lived arrays, and the
    heap of an agent that samples each second would grow for minutes before it finds a shape that holds them.
    """
    starts, size = {}, 0
    for name, column in columns.items():
        starts[name] = size
        size += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    room = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copies = {}
    for name, column in columns.items():
        copy = np.frombuffer(room, column.dtype, len(column), starts[name])
        copy[:] = column
        copy.flags.writeable = False
        copies[name] = copy
    return copies


def _flags(live: np.void) -> MapFlags:
    value = int(live["flags"])
    return MapFlags(
        sleeping=bool(value & layout.FLAG_SLEEPING),
        degraded=bool(value & layout.FLAG_DEGRADED),
        closing=bool(value & layout.FLAG_CLOSING),
        relocating=bool(value & layout.FLAG_RELOCATING),
    )


def _ranges(segments: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Neighbouring segments as half-open ranges."""
    if not len(segments):
        return []
    breaks = np.flatnonzero(np.diff(segments) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(segments, breaks)]
