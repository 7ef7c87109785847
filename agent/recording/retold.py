"""A recording as what sequences did: took blocks, found some of them in the prefix cache, and gave them back.

Each time that a block is allocated its contents get a number. A prefix hit names the number that the block holds then,
so that the numbers say which contents were found again, wherever they lay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.recording.chunks import ChunkKind
from agent.recording.contents import NO_FACTS, Facts
from agent.recording.reading import Recording
from agent.recording.replica import Replica
from agent.sampling.model import NANOSECONDS
from engine_shim.layout import EventKind

_HITS = (int(EventKind.REUSE), int(EventKind.SHARE))
_RELEASES = (int(EventKind.FREE), int(EventKind.CACHE), int(EventKind.UNSHARE))
_MOVES = (int(EventKind.MOVE), int(EventKind.RELOCATE))
_ALLOCATE, _CACHE = int(EventKind.ALLOCATE), int(EventKind.CACHE)


@dataclass(frozen=True, slots=True)
class Seed:
    """The pool at the beginning, and after a gap: block b holds contents number `first` + b. Columns are (blocks,)."""

    time_ns: int
    first: int
    state: NDArray[np.uint8]
    references: NDArray[np.int64]
    owner: NDArray[np.uint32]
    age_ms: NDArray[np.uint32]  # since each block was touched


@dataclass(slots=True)
class Take:
    """A sequence took blocks into use: contents that it found, in order, and then new ones."""

    time_ns: int
    owner: int
    position: int  # of the first new block
    group: int
    hits: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Release:
    """A sequence gave up one reference to each of these contents, in this order."""

    time_ns: int
    owner: int
    contents: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Passed:
    """So late it is: the last sample or event."""

    time_ns: int


Deed = Seed | Take | Release | Passed


class Retelling:
    """Goes through a recording as often as it is asked to, with a bounded part of it in memory.

    `findable` says of each number whether its contents were found again, or kept for that, at any later time; it is
    complete once `deeds` has been gone through.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.findable = bytearray()

    def deeds(self) -> Iterator[Deed]:
        """Everything in order. Raises RecordingError where the recording is damaged."""
        identity = self.recording.header.identity
        replica = Replica(identity.total_blocks, self.recording.header.columns, identity.created_unix_ns)
        told = _Told(self.findable, identity.created_unix_ns)
        facts: Facts = NO_FACTS
        seeded, samples = False, 0
        for place in self.recording.places():
            if place.kind in (ChunkKind.SAMPLE, ChunkKind.BASE):
                samples += 1
                facts = self.recording.sample_at(place, facts, replica.columns)
                now_ns = round(facts.taken_unix * NANOSECONDS)
                if not seeded:
                    yield told.seed(now_ns, replica.columns)
                    seeded = True
                yield from told.finish()
                yield Passed(now_ns)
                if samples == len(self.recording.sample_times_ns):
                    return  # what came after the last sample has no counters to be held against
            elif place.kind == ChunkKind.EVENTS:
                _, rows = self.recording.events_at(place)
                replica.apply(rows)
                if seeded:
                    yield from told.follow(rows[replica.sound(rows)])
            elif place.kind == ChunkKind.GAP:
                yield from told.finish()
                seeded = False


class _Told:
    """What has been told so far: which contents each block holds, and the deed that is not finished."""

    def __init__(self, findable: bytearray, created_ns: int) -> None:
        self._findable = findable
        self._created_ns = created_ns
        self._known = bool(findable)  # from an earlier time
        self._contents: list[int] = []  # by block
        self._next = 0
        self._deed: Take | Release | None = None

    def seed(self, time_ns: int, columns: dict[str, NDArray[Any]]) -> Seed:
        state = columns["state"].copy()
        blocks = len(state)
        first = self._next
        self._contents = list(range(first, first + blocks))
        self._number(blocks)
        nothing = np.zeros(blocks, np.uint32)
        references = columns.get("references")
        return Seed(
            time_ns,
            first,
            state,
            (state >= 2).astype(np.int64) if references is None else references.astype(np.int64),
            columns.get("owner", nothing).copy(),
            np.uint32(self._elapsed_ms(time_ns)) - columns.get("touched", nothing),
        )

    def _elapsed_ms(self, time_ns: int) -> int:
        """Since the map was made, as the column of touches counts it: it wraps round after 49 days."""
        return ((time_ns - self._created_ns) // 1_000_000) & 0xFFFFFFFF

    def finish(self) -> Iterator[Deed]:
        """The deed that was not finished, if there is one."""
        deed, self._deed = self._deed, None
        if deed is not None:
            yield deed

    def follow(self, rows: NDArray[np.void]) -> Iterator[Deed]:
        """Rows of layout.EVENT."""
        names = ["time_ns", "block", "count", "owner", "other", "kind", "descending", "position"]
        for time_ns, block, count, owner, other, kind, descending, position in rows[names].tolist():
            if kind in _MOVES:
                contents = self._contents
                contents[block], contents[other] = contents[other], contents[block]
                continue
            blocks = range(block, block - count, -1) if descending else range(block, block + count)
            if kind == _ALLOCATE:
                yield from self._allocate(time_ns, owner, position, other, blocks)
            elif kind in _HITS:
                yield from self._hit(time_ns, owner, [self._contents[one] for one in blocks])
            elif kind in _RELEASES:
                given = [self._contents[one] for one in blocks]
                if kind == _CACHE:
                    self._mark(given)
                if not (isinstance(self._deed, Release) and self._deed.owner == owner):
                    yield from self.finish()
                    self._deed = Release(time_ns, owner)
                self._deed.contents += given

    def _allocate(self, time_ns: int, owner: int, position: int, group: int, blocks: range) -> Iterator[Deed]:
        deed = self._deed
        goes_on = isinstance(deed, Take) and deed.owner == owner and deed.group in (group, -1)
        if isinstance(deed, Take) and goes_on and deed.fresh:
            goes_on = deed.time_ns == time_ns and deed.position + len(deed.fresh) == position
        if not goes_on or not isinstance(deed, Take):
            yield from self.finish()
            deed = self._deed = Take(time_ns, owner, position, group)
        if not deed.fresh:
            deed.time_ns, deed.position, deed.group = time_ns, position, group
        first = self._next
        self._number(len(blocks))
        for number, block in enumerate(blocks, start=first):
            self._contents[block] = number
        deed.fresh += range(first, first + len(blocks))

    def _hit(self, time_ns: int, owner: int, contents: list[int]) -> Iterator[Deed]:
        self._mark(contents)
        deed = self._deed
        if not (isinstance(deed, Take) and deed.owner == owner and not deed.fresh):
            yield from self.finish()
            deed = self._deed = Take(time_ns, owner, 0, -1)
        deed.hits += contents

    def _number(self, count: int) -> None:
        self._next += count
        if not self._known:
            self._findable.extend(bytes(count))

    def _mark(self, contents: list[int]) -> None:
        if not self._known:
            for number in contents:
                self._findable[number] = 1
