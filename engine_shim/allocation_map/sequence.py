"""One engine step, stored in the map block by block: what `columns` and `event_ring` do in bulk, for a compiler.

As Python this is far too slow. Compiled, a step costs a fifth of what the NumPy calls take, which are some 70 whether
it has ten blocks or a thousand. The two functions are of the plain kind that any compiler of Python can take: numbers,
arrays and loops. Steps in which blocks moved are left to the bulk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.columns import ColumnStore
from engine_shim.allocation_map.event_ring import EventRing
from engine_shim.allocation_map.journal import HEAD_FIELDS
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.layout import EventKind

Ints = NDArray[np.int64]
Compiler = Callable[[Any], Any]

# Constants of the compiled code.
_KINDS = len(journal.STATE_AFTER)
_STATE_AFTER, _OWNER_BLOCKS = journal.STATE_AFTER, journal.OWNER_BLOCKS
_REFERENCES_AFTER, _REFERENCES_ADDED = journal.REFERENCES_AFTER, journal.REFERENCES_ADDED
_IS_MOVE, _SILENT, _EMPTIES = journal.MOVES.table, journal.SILENT.table, journal.EMPTIES.table
_TAKES_OWNER, _SETS_OWNER = journal.TAKES_OWNER.table, journal.SETS_OWNER.table
_SETS_GROUP, _SETS_BIRTH, _TOUCHES = journal.SETS_GROUP.table, journal.SETS_BIRTH.table, journal.TOUCHES.table
_ENDS_LIFE, _EVICTS, _HITS = journal.ENDS_LIFE.table, journal.EVICTS.table, journal.HITS.table
_WROTE, _UNPIN = journal.WROTE, int(EventKind.UNPIN)
_NO_GROUP = layout.NO_GROUP
_SLOT_MASK = (1 << layout.OWNER_SLOT_BITS) - 1
_SEGMENT_BITS = layout.SEGMENT_BLOCKS.bit_length() - 1
_COUNTER_OF: Ints = np.full(_KINDS, -1, np.int64)
for _kind, _counter in journal.EVENT_COUNTERS:
    _COUNTER_OF[_kind] = _counter
_FAR = -9  # a block that none is next to


def look_over(words: Ints, blocks: Ints, written: int, total_blocks: int, slots: int, hits: NDArray[np.uint64]) -> int:
    """How many events a step makes, and in `hits` 1 for each segment it changes; -1 where something is wrong with it,
    or a block moves. `words` (e, 4) as journal.Head, `blocks` (n,), `written` tokens counts are at hand."""
    hits[:] = 0
    place, events, writes = 0, 0, 0
    for entry in range(words.shape[0]):
        length, kind = words[entry, 1], words[entry, 3] & 0xFF
        if length < 0 or place + length > blocks.shape[0] or kind >= _KINDS or _IS_MOVE[kind]:
            return -1
        if words[entry, 2] & _SLOT_MASK >= slots:
            return -1
        if kind == _WROTE:
            writes += length
        last, direction = _FAR, 0
        for element in range(place, place + length):
            block = blocks[element]
            if block < 0 or block >= total_blocks:
                return -1
            hits[block >> _SEGMENT_BITS] = 1
            step = block - last
            if (step == 1 or step == -1) and direction != -step:
                direction = step
            elif not _SILENT[kind]:
                events += 1
                direction = 0
            last = block
        place += length
    if place != blocks.shape[0] or writes != written:
        return -1
    return events


def store(
    words: Ints,
    blocks: Ints,
    written: Ints,
    skip: int,
    created_ns: int,
    state: NDArray[np.uint8],
    references: NDArray[np.uint16],
    owner: NDArray[np.uint32],
    position: NDArray[np.uint32],
    group: NDArray[np.uint8],
    tokens: NDArray[np.uint16],
    touched: NDArray[np.uint32],
    born: NDArray[np.uint32],
    state_counts: Ints,
    bounds_ms: NDArray[np.uint32],
    buckets: Ints,
    sums: NDArray[np.float64],
    counters: Ints,
    owner_blocks: Ints,
    held: NDArray[Any],
    ring: Ints,
    head: NDArray[np.uint64],
) -> None:
    """Store a step that `look_over` has found good, but for its first `skip` events, which would be overwritten."""
    place, token, event = 0, 0, -1
    slots, first_slot = ring.shape[0], np.int64(head[0])
    took_ms = np.zeros(3, np.int64)
    for entry in range(words.shape[0]):
        time_ns, length, holder = words[entry, 0], words[entry, 1], words[entry, 2]
        kind, first_position = words[entry, 3] & 0xFF, words[entry, 3] >> 32
        who, extra = holder & 0xFFFFFFFF, holder >> 32
        now = ((time_ns - created_ns) // 1_000_000) & 0xFFFFFFFF
        if _COUNTER_OF[kind] >= 0:
            counters[_COUNTER_OF[kind]] += length
        if who != 0 and _OWNER_BLOCKS[kind] != 0:
            slot = who & _SLOT_MASK
            owner_blocks[slot] += _OWNER_BLOCKS[kind] * length
            held[slot] = max(owner_blocks[slot], 0)
        after = extra if kind == _UNPIN else _STATE_AFTER[kind]
        fixed, added = _REFERENCES_AFTER[kind], _REFERENCES_ADDED[kind]
        takes, owns, groups = _TAKES_OWNER[kind], _SETS_OWNER[kind], _SETS_GROUP[kind]
        silent, empties, touches, births = _SILENT[kind], _EMPTIES[kind], _TOUCHES[kind], _SETS_BIRTH[kind]
        ends, evicts, hits = _ENDS_LIFE[kind], _EVICTS[kind], _HITS[kind]
        last, direction, row = _FAR, 0, 0
        for element in range(length):
            block = blocks[place + element]
            if after >= 0:
                state_counts[state[block] & 7] -= 1
                state[block] = after
                state_counts[after & 7] += 1
            if fixed >= 0:
                references[block] = fixed
            elif added != 0:
                references[block] = min(max(np.int64(references[block]) + added, 0), 0xFFFF)
            if ends or evicts or hits:
                for index in range(3):
                    if (index == 0 and ends) or (index == 1 and evicts) or (index == 2 and hits):
                        took = (now - np.int64(born[block] if index == 0 else touched[block])) & 0xFFFFFFFF
                        bucket = 0
                        while bucket < bounds_ms.shape[0] and bounds_ms[bucket] < took:
                            bucket += 1
                        if took > 0x7FFFFFFF:
                            took, bucket = 0, 0  # a clock that was set back, not a block of 25 days
                        buckets[index, bucket] += 1
                        took_ms[index] += took
            if owns:
                owner[block] = who if takes else 0
                position[block] = first_position + element
            if groups:
                group[block] = extra if takes else _NO_GROUP
            if empties:
                tokens[block] = 0
            elif kind == _WROTE:
                tokens[block] = min(max(written[token], 0), 0xFFFF)
                token += 1
            if touches:
                touched[block] = now
            if births:
                born[block] = now
            step = block - last
            last = block
            if silent:
                continue
            if (step == 1 or step == -1) and direction != -step:
                direction = step
                if event >= skip:
                    ring[row, 1] += 1 << 32
                    if direction < 0:
                        ring[row, 3] |= 1 << 8
                continue
            event += 1
            direction = 0
            if event >= skip:
                row = (first_slot + event) % slots
                ring[row, 0] = time_ns
                ring[row, 1] = 1 << 32 | block
                ring[row, 2] = holder
                ring[row, 3] = (first_position + element) << 32 | kind
        place += length
    for index in range(3):
        sums[index] += took_ms[index] / 1000


class Prepared(NamedTuple):
    """A step that can be stored."""

    words: Ints
    blocks: Ints
    written: Ints
    events: int


class SequentialStore:
    """The two functions, compiled, with the arrays of one writer's map."""

    def __init__(
        self, writer: MapWriter, columns: ColumnStore, events: EventRing, owner_blocks: Ints, compiler: Compiler
    ) -> None:
        """Compiles at once, by storing an empty step. Raises what the compiler raises; ValueError where the map lacks a
        column."""
        missing = [name for name in layout.COLUMNS if name not in writer.columns]
        if missing:
            raise ValueError(f"the map has no {', '.join(missing)}")
        self._segment_words: NDArray[np.uint64] = writer.tables["segments"]
        self._hits = np.zeros(len(self._segment_words), np.uint64)
        self._total, self._slots = writer.spec.total_blocks, writer.spec.owner_slots
        self._events = events
        live, histograms = writer.live, writer.tables["histograms"]
        self._arrays = (
            writer.created_unix_ns,
            writer.columns["state"],
            columns.references,
            writer.columns["owner"],
            writer.columns["position"],
            writer.columns["group"],
            writer.columns["tokens"],
            columns.touched_ms,
            columns.born_ms,
            live.state_counts.view(np.int64),
            journal.BOUNDS_MS,
            histograms["counts"].view(np.int64),
            histograms["sum_seconds"],
            live.counters.view(np.int64),
            owner_blocks,
            writer.tables["owners"]["blocks"],
            events.ring,
            live.event_head,
        )
        self._look_over, self._store = compiler(look_over), compiler(store)
        nothing = self.prepare((), (), ())
        if nothing is None or nothing.events:
            raise ValueError("compiled, an empty step is not empty")
        self._store(nothing.words, nothing.blocks, nothing.written, 0, *self._arrays)

    def prepare(
        self, heads: Sequence[int], named: Sequence[int], token_lists: Sequence[Sequence[int]]
    ) -> Prepared | None:
        """Lay a step out, and look it over; None where it must be left to the bulk, which says what is wrong with it.
        Stores nothing in the map. struct.error where something is no whole number."""
        words = np.frombuffer(struct.pack(f"{len(heads)}q", *heads), np.int64).reshape(-1, HEAD_FIELDS)
        blocks = journal.whole_numbers(named)
        written = journal.whole_numbers(list(chain.from_iterable(token_lists)))
        events = self._look_over(words, blocks, len(written), self._total, self._slots, self._hits)
        return None if events < 0 else Prepared(words, blocks, written, events)

    def store(self, step: Prepared) -> int:
        """Bring all columns, counts and histograms up to date and write the events, within a publish of the whole. Must
        follow its `prepare` at once. Returns how many events were more than the ring holds, and so are lost."""
        # Here, and not in compiled code: a compiler may put stores in another order, but not past a call.
        lost = self._events.claim(step.events)
        self._segment_words += self._hits
        self._store(step.words, step.blocks, step.written, lost, *self._arrays)
        self._segment_words += self._hits
        self._events.advance(step.events)
        return lost
