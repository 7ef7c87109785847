"""Turns what happened during one engine step into column values, in bulk.

The engine's hot path only extends two lists of ints for a call: what happened, and the blocks. Here they become flat
arrays, one element for each block named, in the order in which things happened; every column then is a scatter, in
which the last value for a block wins. That costs some 70 NumPy calls of half a microsecond a step, instead of several
for every allocation. Lists of ints, and not of tuples: nothing in them is for Python's collector to look at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim.layout import COUNTERS, HISTOGRAM_BOUNDS_SECONDS, BlockState, EventKind

# Beside the event kinds, and making no events:
WROTE = 0  # tokens were written
HELD = max(EventKind) + 1  # a block in use names another holder from now on

Head = tuple[int, int, int, int]
"""One entry: time in ns, number of blocks, owner | extra << 32 (group; or state after an unpin), kind | first position
<< 32. But for the number these are the words of its events in the ring already."""

HEAD_FIELDS = 4
HIGH = 32  # bits to the upper half of a word
_KINDS = HELD + 1


def _table(values: dict[EventKind, int], default: int = 0) -> NDArray[np.int64]:
    table = np.full(_KINDS, default, np.int64)
    for kind, value in values.items():
        table[kind] = value
    return table


_E, _S = EventKind, BlockState

# What each kind does to a column; -1 leaves it as it is.
STATE_AFTER = _table(
    {
        _E.ALLOCATE: _S.USED,
        _E.REUSE: _S.USED,
        _E.FREE: _S.FREE,
        _E.CACHE: _S.CACHED,
        _E.EVICT: _S.FREE,
        _E.PIN: _S.PINNED,
        _E.RESERVE: _S.RESERVED,
    },
    default=-1,
)
REFERENCES_AFTER = _table(
    {_E.ALLOCATE: 1, _E.REUSE: 1, _E.FREE: 0, _E.CACHE: 0, _E.EVICT: 0, _E.RESERVE: 0}, default=-1
)
REFERENCES_ADDED = _table({_E.SHARE: 1, _E.UNSHARE: -1})


class KindSet:
    """Some kinds. Most steps hold few of them, so that all or none of a step is often meant: `bits` tells at once."""

    __slots__ = ("bits", "table")

    def __init__(self, *kinds: int) -> None:
        self.bits = sum(1 << kind for kind in set(kinds))
        self.table = np.array([bool(self.bits >> kind & 1) for kind in range(_KINDS)])

    def __or__(self, other: KindSet) -> KindSet:
        return KindSet(*(kind for kind in range(_KINDS) if (self.bits | other.bits) >> kind & 1))

    def in_any(self, batch: Batch) -> bool:
        """Does a batch hold any of these?"""
        return bool(self.bits & batch.kinds)

    def entries(self, batch: Batch) -> NDArray[np.bool_]:
        """Which entries are of these kinds, (e,)."""
        return self.table.take(batch.entry_kind)

    def part(self, batch: Batch) -> Part:
        """The elements that are; nothing is looked for where all of them are."""
        if not batch.kinds & ~self.bits:
            return batch.whole
        meant = batch.kinds & self.bits
        found = batch.parts.get(meant)
        if found is None:
            place = self.entries(batch).take(batch.entry).nonzero()[0]
            found = batch.parts[meant] = Part(batch.rows.take(place), batch.entry.take(place), place)
        return found


TAKES_OWNER = KindSet(_E.ALLOCATE, _E.REUSE, HELD)
LOSES_OWNER = KindSet(_E.FREE, _E.CACHE, _E.EVICT)
SETS_OWNER = TAKES_OWNER | LOSES_OWNER
EMPTIES = KindSet(_E.ALLOCATE, _E.FREE, _E.EVICT)
SETS_GROUP = TAKES_OWNER | EMPTIES
SETS_TOKENS = EMPTIES | KindSet(WROTE)
TOUCHES = KindSet(_E.ALLOCATE, _E.REUSE, _E.SHARE, _E.UNSHARE, _E.FREE, _E.CACHE, _E.PIN)
BEGINS_LIFE = KindSet(_E.ALLOCATE)
ENDS_LIFE = KindSet(_E.FREE, _E.EVICT)
SETS_BIRTH = BEGINS_LIFE | ENDS_LIFE  # a free block's birth means nothing: mostly this spares looking for the others
EVICTS = KindSet(_E.EVICT)
HITS = KindSet(_E.REUSE, _E.SHARE)
UNPINS = KindSet(_E.UNPIN)
MOVES = KindSet(_E.MOVE, _E.RELOCATE)
WRITES = KindSet(WROTE)
SILENT = KindSet(WROTE, HELD)
SETS_STATE = KindSet(*np.flatnonzero(STATE_AFTER >= 0).tolist())
SETS_REFERENCES = KindSet(*np.flatnonzero(REFERENCES_AFTER >= 0).tolist())
ADDS_REFERENCES = KindSet(*np.flatnonzero(REFERENCES_ADDED).tolist())
OWNER_BLOCKS = _table({_E.ALLOCATE: 1, _E.REUSE: 1, _E.SHARE: 1, _E.UNSHARE: -1, _E.FREE: -1, _E.CACHE: -1})

EVENT_COUNTERS = tuple(
    (int(kind), COUNTERS.index(name))
    for kind, name in (
        (_E.ALLOCATE, "blocks_allocated"),
        (_E.FREE, "blocks_freed"),
        (_E.CACHE, "blocks_freed"),
        (_E.EVICT, "blocks_evicted"),
        (_E.REUSE, "blocks_reused"),
    )
)

_NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)
_ENTRY_SHIFT = 40  # above any block number
_KIND_MASK, _LOW = 0xFF, 0xFFFFFFFF
_KIND_BITS = [1 << kind for kind in range(_KINDS)]
BOUNDS_MS = np.array([round(bound * 1000) for bound in HISTOGRAM_BOUNDS_SECONDS], np.uint32)
_PLACES: NDArray[np.int64] = np.arange(1 << 16)
_SHORT_PLACES: NDArray[np.int32] = np.arange(1 << 16, dtype=np.int32)
_PLACES.flags.writeable = _SHORT_PLACES.flags.writeable = False


def places(count: int) -> NDArray[np.int64]:
    """0 .. count - 1, not to be written to."""
    return _PLACES[:count] if count <= len(_PLACES) else np.arange(count)


def short_places(count: int) -> NDArray[np.int32]:
    """The same, in 32 bits."""
    return _SHORT_PLACES[:count] if count <= len(_SHORT_PLACES) else np.arange(count, dtype=np.int32)


def whole_numbers(values: Sequence[int]) -> NDArray[np.int64]:
    """As an array that is not written to; struct.error where NumPy alone would cut 1.5 down to 1."""
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)


class Part(NamedTuple):
    """Some elements of a batch; arrays are (p,)."""

    rows: NDArray[np.int64]
    entry: NDArray[np.int64]
    places: NDArray[np.int64]  # in the batch


@dataclass(slots=True, eq=False)
class Batch:
    """A step's entries, flat. Arrays of one element a block named have length n, of one element an entry length e."""

    words: NDArray[np.int64]  # (e, 4) as Head, the position less the place of the first element
    entry_kind: NDArray[np.int64]  # (e,)
    entry_length: NDArray[np.int64]  # (e,)
    entry: NDArray[np.int64]  # (n,) which entry
    blocks: NDArray[np.int64]  # (n,)
    rows: NDArray[np.int64]  # (n,) where the block's values stood before the step; `blocks` itself where none moved
    sources: NDArray[np.int64]  # (m,) what moved, and where to, in order
    totals: Sequence[float]  # how many elements there are of each kind
    kinds: int  # which kinds there are, bit by bit
    holders: int  # all owners, and the extras above them, or-ed: is there any?
    moved_blocks: NDArray[np.int64]  # (b,) blocks whose values stand elsewhere after the step,
    moved_rows: NDArray[np.int64]  # (b,) and the rows to take them from
    whole: Part  # all of them
    parts: dict[int, Part] = field(default_factory=dict)  # some of them by their kinds' bits, once looked for

    @property
    def entry_time_ns(self) -> NDArray[np.int64]:
        """(e,)"""
        return self.words[:, 0]

    @property
    def entry_owner(self) -> NDArray[np.int64]:
        """(e,)"""
        return self.words[:, 2] & _LOW

    @property
    def entry_extra(self) -> NDArray[np.int64]:
        """(e,)"""
        return self.words[:, 2] >> HIGH

    @property
    def entry_shift(self) -> NDArray[np.int64]:
        """(e,) what the position of an entry's blocks is less their place in the batch"""
        return self.words[:, 3] >> HIGH

    @property
    def has_owners(self) -> bool:
        return self.holders & _LOW != 0

    @property
    def has_extras(self) -> bool:
        return self.holders >> HIGH != 0

    @property
    def kind(self) -> NDArray[np.int64]:
        """(n,)"""
        return self.entry_kind.take(self.entry)

    @property
    def position(self) -> NDArray[np.int64]:
        """(n,)"""
        return self.entry_shift.take(self.entry) + places(len(self.blocks))


def flatten(heads: Sequence[int], named: Sequence[int], move_sources: Sequence[Sequence[int]] = ()) -> Batch:
    """Lay a step's entries out as arrays: `heads` holds the fields of Head of one entry after the other, `named` the
    blocks of all of them. Blocks must be ints; a wrong type raises here, before the map is touched.

    `move_sources` has, for each MOVE or RELOCATE entry (whose blocks are the destinations), where they came from. Moves
    are not applied one by one: everything later in the step follows its block to the *row* that holds its values, all
    is stored by row, and the rows change places once, at the end.
    """
    # struct: array() and NumPy take several times as long to lay out Python's small ints.
    words = np.frombuffer(bytearray(struct.pack(f"{len(heads)}q", *heads)), np.int64).reshape(-1, HEAD_FIELDS)
    blocks = whole_numbers(named)
    lengths, last = words[:, 1], words[:, 3]
    kind = last & _KIND_MASK
    ends = np.add.accumulate(lengths)
    if int(ends[-1]) != len(blocks):
        raise ValueError(f"entries of {ends[-1]} blocks name {len(blocks)}")
    last -= (ends - lengths) << HIGH
    rows, moved = (blocks, {}) if not move_sources else _follow_moves(kind.tolist(), _lists(heads, named), move_sources)
    entry = places(len(words)).repeat(lengths)
    totals = np.bincount(kind, weights=lengths, minlength=_KINDS).tolist()
    return Batch(
        words=words,
        entry_kind=kind,
        entry_length=lengths,
        entry=entry,
        blocks=blocks,
        rows=rows,
        sources=whole_numbers(list(chain.from_iterable(move_sources))) if move_sources else _NOTHING,
        totals=totals,
        kinds=sum([bit for bit, total in zip(_KIND_BITS, totals, strict=True) if total]),
        holders=int(np.bitwise_or.reduce(words[:, 2])),
        moved_blocks=np.fromiter(moved.keys(), np.int64, len(moved)) if moved else _NOTHING,
        moved_rows=np.fromiter(moved.values(), np.int64, len(moved)) if moved else _NOTHING,
        whole=Part(rows, entry, places(len(rows))),
    )


def _lists(heads: Sequence[int], named: Sequence[int]) -> Iterator[Sequence[int]]:
    """The blocks of each entry."""
    start = 0
    for length in heads[1::HEAD_FIELDS]:
        yield named[start : start + length]
        start += length


def _follow_moves(
    kinds: Sequence[int], lists: Iterable[Sequence[int]], move_sources: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], dict[int, int]]:
    """The row of each element, (n,), and the row of each block whose row has changed."""
    row_of: dict[int, int] = {}
    rows: list[int] = []
    remaining = iter(move_sources)
    for kind, blocks in zip(kinds, lists, strict=True):
        if MOVES.table[kind]:
            sources = next(remaining, ())
            if len(sources) != len(blocks) or len({*sources, *blocks}) != 2 * len(blocks):
                raise ValueError("a batch of moves names a block twice, or not as many sources as destinations")
            for source, destination in zip(sources, blocks, strict=True):
                taken = row_of.get(source, source)
                row_of[source] = row_of.get(destination, destination)
                row_of[destination] = taken
        rows += [row_of.get(block, block) for block in blocks] if row_of else blocks
    return np.array(rows, np.int64), row_of


Runs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]


def event_runs(batch: Batch) -> Runs | None:
    """Cut a batch into runs of neighbouring blocks of one entry: first element, length, whether it goes downwards (None
    where no run does). None where no two blocks make a run, so that each element is an event."""
    total = len(batch.blocks)
    # The entry above the block in one number: only of one entry are two a step of one apart.
    keys = batch.entry << _ENTRY_SHIFT
    keys += batch.blocks
    step = keys[1:] - keys[:-1]
    joined = np.abs(step) == 1
    if not np.count_nonzero(joined):
        return None if not SILENT.in_any(batch) else (places(total), np.ones(total, np.int64), None)
    if len(batch.sources):
        moves = MOVES.part(batch).places
        joined[moves[moves > 0] - 1] = False  # each move tells where it came from
    falls = None
    down = step == -1
    down &= joined
    if np.count_nonzero(down):
        falls = down
        up = joined & ~down
        # A run must keep its direction: 5, 6, 5 is two runs.
        joined[1:] &= ~((up[1:] & down[:-1]) | (down[1:] & up[:-1]))
    breaks = np.empty(total, bool)  # does a run begin here?
    breaks[0] = True
    np.logical_not(joined, out=breaks[1:])
    starts = breaks.nonzero()[0]
    lengths = np.empty(len(starts), np.int64)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = total - starts[-1]
    return starts, lengths, None if falls is None else falls.take(starts, mode="clip") & (lengths > 1)


def histogram_counts(durations_ms: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Durations in ms, by HISTOGRAM_BOUNDS_SECONDS; (bounds + 1,), not cumulative."""
    return np.bincount(BOUNDS_MS.searchsorted(durations_ms), minlength=len(BOUNDS_MS) + 1)


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """A batch sorted by block, things that happened to one block staying in order; arrays are (n,)."""

    order: NDArray[np.int64]  # places in the batch
    first: NDArray[np.bool_]  # does a block's part begin here?
    start: NDArray[np.int64]  # where the part begins that this element is in


def order_by_block(blocks: NDArray[np.int64]) -> BlockOrder:
    """Sort a batch by block; `blocks` (n,) may name a block several times."""
    total = len(blocks)
    # Sorting block and place in one key is stable and several times as fast as a stable argsort.
    place_bits = max(1, total.bit_length())
    key = np.sort(blocks << place_bits | np.arange(total))
    group = key >> place_bits
    first = np.empty(total, bool)
    first[:1] = True
    np.not_equal(group[1:], group[:-1], out=first[1:])
    start = np.maximum.accumulate(np.where(first, np.arange(total), 0))
    return BlockOrder(key & ((1 << place_bits) - 1), first, start)


def previous(
    by_block: BlockOrder, setter: NDArray[np.bool_], value: NDArray[np.int64], before: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """For each element, what its block's value was just before: of the last earlier setter, else `before`. All (n,)."""
    order = by_block.order
    total = len(order)
    last_setter = np.maximum.accumulate(np.where(setter.take(order), np.arange(total), -1))
    prior = np.empty(total, np.int64)
    prior[0] = -1
    prior[1:] = last_setter[:-1]
    result = np.empty(total, np.int64)
    result[order] = np.where(prior >= by_block.start, value.take(order.take(prior, mode="wrap")), before.take(order))
    return result


def running(
    by_block: BlockOrder,
    setter: NDArray[np.bool_],
    value: NDArray[np.int64],
    added: NDArray[np.int64],
    before: NDArray[np.int64],
) -> NDArray[np.int64]:
    """For each element, its block's value just after: the last value set up to here, plus all added since. (n,)"""
    order, start = by_block.order, by_block.start
    total = len(order)
    sets = setter[order]
    last_setter = np.maximum.accumulate(np.where(sets, np.arange(total), -1))
    known = last_setter >= start
    sums = np.cumsum(np.where(sets, 0, added[order]))
    sums_before = np.concatenate(([0], sums))
    base = np.where(known, value[order][last_setter], before[order])
    since = np.where(known, sums_before[last_setter + 1], sums_before[start])
    result = np.empty(total, np.int64)
    result[order] = base + sums - since
    return result
