"""Chooses where moved blocks go: next to their sequence's other blocks, else together in the hole that fits them best.

What lies together by owner and position is a *chain*, what is contiguous and may be taken is a *hole*. Everything is
done on whole classes of chains and holes of one length, so that the number of Python steps does not grow with moves.

Arrays of megabytes are let go of, or changed in place, as early as can be: the first plan of a process has to get all
that is in use at once from the system, at a page fault for every 4 KiB, a third of its time in the worst case.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from engine_shim.layout import BlockState
from engine_shim.runs import find_runs

_POSITION_BITS = 32
# Fibonacci hashing (Knuth, TAOCP 6.4), which keeps keys that follow each other apart; odd, as are its powers.
_SPREAD = np.array([0x9E3779B97F4A7C15], np.uint64)  # an array: the product of two scalars would warn that it wraps


def choose_destinations(
    states: NDArray[np.uint8],
    sources: NDArray[np.int64],
    window_start: int,
    window_length: int,
    owners: NDArray[np.integer] | None = None,
    positions: NDArray[np.integer] | None = None,
) -> NDArray[np.int64]:
    """One destination for each of `sources`, all distinct, FREE or CACHED and outside the window.

    CACHED blocks are taken only when every FREE one is. With owners, blocks of one owner stay together in the order of
    `positions` (of address, without): first in holes beside the block that they follow or precede in their sequence,
    then whole in the smallest hole that holds them, and over several of the largest holes where none does. Without
    owners the smallest holes are filled, so that large ones last.
    """
    if sources.size == 0:
        return np.empty(0, np.int64)
    starts, lengths = find_runs(_candidates(states, sources.size, window_start, window_length))
    starts = starts.copy()  # it is a part of something larger
    if owners is None:
        return _fill(starts, lengths, np.argsort(_narrow(lengths), kind="stable"), sources.size)
    order, keys, chain_starts = _chains(sources, owners, positions)
    placing = _Placing(keys.size)
    first = chain_starts
    length = np.diff(chain_starts, append=keys.size)
    first, length, starts, lengths = _place_beside_neighbours(
        placing, keys, first, length, starts, lengths, states, owners, positions, window_start, window_length
    )
    _place_in_holes(placing, first, length, starts, lengths)
    destinations = np.empty(sources.size, np.int64)
    destinations[order] = placing.destinations
    return destinations


def _candidates(states: NDArray[np.uint8], count: int, window_start: int, window_length: int) -> NDArray[np.bool_]:
    """Blocks to choose from: FREE ones outside the window, and where they are too few, just enough CACHED ones.

    FREE blocks that would lengthen the window's run are left out where they can be, those next to it longest. The
    CACHED ones are those of the shortest allocatable runs, so that long ones last.
    """
    window_end = window_start + window_length
    chosen: NDArray[np.bool_] = states == BlockState.FREE
    chosen[window_start:window_end] = False
    missing = count - int(np.count_nonzero(chosen))
    if missing <= 0:
        before, after = _beside(states, window_start, window_end)
        beside = np.flatnonzero(chosen[before:after]) + before
        surplus = min(-missing, beside.size)
        nearest = np.argsort(np.maximum(window_start - beside, beside - window_end), kind="stable")
        chosen[beside[nearest[:surplus]]] = False
        return chosen
    cached = states == BlockState.CACHED
    cached[window_start:window_end] = False
    starts, lengths = find_runs(chosen | cached)
    shortest = np.argsort(_narrow(lengths), kind="stable")
    # So many blocks of them hold enough cached ones, even if every FREE block came first.
    in_order = _fill(starts, lengths, shortest, count)
    chosen[in_order[cached[in_order]][:missing]] = True
    return chosen


def _beside(states: NDArray[np.uint8], start: int, end: int) -> tuple[int, int]:
    """The window [start, end) with the allocatable blocks on both sides of it."""
    taken = states > BlockState.CACHED
    left, right = taken[:start][::-1], taken[end:]
    before = start - (int(left.argmax()) if left.any() else left.size)
    after = end + (int(right.argmax()) if right.any() else right.size)
    return before, after


def _chains(
    sources: NDArray[np.int64], owners: NDArray[np.integer], positions: NDArray[np.integer] | None
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
    """Sort sources into chains: (order of sources, their keys in that order, index of each chain's first).

    A key is owner and position in one number, so that the next block of a sequence has the next key.
    """
    owner = owners[sources].astype(np.uint64)
    if positions is None:
        # Addresses stand in for positions: an owner's blocks, however far apart, in the order in which they lie.
        order = _stable_order(owner)
        keys = owner.take(order) << np.uint64(_POSITION_BITS)
        follows = (keys[1:] == keys[:-1]) & (keys[1:] != 0)
    else:
        position = positions[sources].astype(np.uint64)
        keys = owner << np.uint64(_POSITION_BITS) | position
        bits = int(position.max()).bit_length()
        fits = int(owner.max()).bit_length() + bits <= 64
        order = _stable_order(owner << np.uint64(bits) | position if fits else keys)
        keys = keys.take(order)
        follows = (keys[1:] - keys[:-1] == 1) & (keys[:-1] >> np.uint64(_POSITION_BITS) != 0)
    return order, keys, np.concatenate(([0], np.flatnonzero(~follows) + 1))


def _place_beside_neighbours(
    placing: _Placing,
    keys: NDArray[np.uint64],
    first: NDArray[np.int64],
    length: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    states: NDArray[np.uint8],
    owners: NDArray[np.integer],
    positions: NDArray[np.integer] | None,
    window_start: int,
    window_length: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Put chains, or as much of them as fits, behind the block that they follow and before the one they precede.

    A part split off costs its sequence the run that the neighbour saves it, so this never makes more runs, and it
    leaves the larger holes alone. Returns what is left: chains (first, length) and holes (starts, lengths); those that
    it was given are changed.
    """
    for before in (True, False):
        beside = starts - 1 if before else starts + lengths
        state = states.take(beside, mode="clip")
        live = state == BlockState.USED
        live |= state == BlockState.PINNED
        if not before:
            live &= lengths > 0
        # They ascend: what lies before the pool, in the window and behind the pool is found without a look at each.
        first_block, into, out_of, end = np.searchsorted(
            beside, (0, window_start, window_start + window_length, states.size)
        )
        live[:first_block] = live[into:out_of] = live[end:] = False
        holes = np.flatnonzero(live)
        blocks = beside.take(holes)
        del beside, state, live
        owner = owners.take(blocks)
        if np.count_nonzero(owner) < owner.size:
            owned = np.flatnonzero(owner)
            holes, blocks, owner = holes.take(owned), blocks.take(owned), owner.take(owned)
        wanted = owner.astype(np.uint64)
        wanted <<= np.uint64(_POSITION_BITS)
        if positions is not None:
            wanted |= positions.take(blocks).astype(np.uint64)
            wanted += np.uint64(1) if before else np.uint64(2**64 - 1)
        del blocks, owner
        ends = keys[first if before else first + length - 1]
        count = ends.size
        found, matches = _join(wanted, ends)
        del wanted, ends
        hole_of = np.full(count, -1)
        hole_of[matches] = holes.take(found)  # one hole a chain, where columns that contradict name several
        chains = np.flatnonzero(hole_of >= 0)
        holes = hole_of[chains]
        taken = np.minimum(length[chains], lengths[holes])
        if before:
            placing.put(first[chains], starts[holes], taken)
            starts[holes] += taken
            first[chains] += taken
        else:
            placing.put(first[chains] + length[chains] - taken, starts[holes] + lengths[holes] - taken, taken)
        lengths[holes] -= taken
        length[chains] -= taken
        left = np.flatnonzero(length > 0)
        first, length = first.take(left), length.take(left)
        if positions is None:
            break  # without positions an owner's blocks have no before and after
    kept = lengths > 0
    return first, length, starts[kept], lengths[kept]


def _place_in_holes(
    placing: _Placing,
    first: NDArray[np.int64],
    length: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Longest chains first: each whole into the smallest hole that holds it, else end to end over the largest holes."""
    holes = _Holes(starts, lengths)
    longest_first = np.argsort(_narrow(length), kind="stable")[::-1]
    first, length = first[longest_first], length[longest_first]
    falling = -length
    begin = 0
    while begin < first.size:
        too_long = int(np.searchsorted(falling[begin:], -holes.largest, side="left"))
        if too_long:
            chosen = slice(begin, begin + too_long)
            blocks = _expand(first[chosen], length[chosen])
            placing.destinations[blocks] = holes.take_largest(blocks.size)
            begin += too_long
            continue
        size = int(length[begin])
        count = int(np.searchsorted(falling[begin:], -size, side="right"))
        placed = holes.take_fitting(size, count)
        placing.put(first[begin : begin + placed.size], placed, np.full(placed.size, size))
        begin += placed.size


class _Placing:
    """The destination of each source, in the order of chains, as it becomes known."""

    def __init__(self, count: int) -> None:
        self.destinations = np.empty(count, np.int64)

    def put(self, first: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Chain pieces that begin at `first` go to the blocks from `starts` on."""
        if int(lengths.max(initial=0)) == 1:  # as wherever blocks lie singly
            self.destinations[first] = starts
            return
        places = _expand(first, lengths)
        to = np.repeat(starts - first, lengths)
        to += places
        self.destinations[places] = to


class _Holes:
    """Holes by length."""

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        order = np.argsort(_narrow(lengths), kind="stable")
        starts, lengths = starts[order], lengths[order]
        sizes, firsts = np.unique(lengths, return_index=True)
        self._sizes: list[int] = sizes.tolist()
        self._starts: dict[int, NDArray[np.int64]] = {}
        if self._sizes:
            self._starts.update(zip(self._sizes, np.split(starts, firsts[1:]), strict=True))

    @property
    def largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def take_fitting(self, size: int, count: int) -> NDArray[np.int64]:
        """Room for up to `count` pieces of `size`, in holes of the one best-fitting length; where each begins."""
        length = self._sizes[bisect_left(self._sizes, size)]
        starts = self._take(length)
        each = length // size
        used = min(starts.size, -(-count // each))
        places: NDArray[np.int64] = (starts[:used, None] + np.arange(each) * size).ravel()[:count]
        self._give(length, starts[used:])
        last = places.size - (used - 1) * each
        self._give(length - each * size, starts[: used - 1] + each * size)
        self._give(length - last * size, starts[used - 1 : used] + last * size)
        return places

    def take_largest(self, count: int) -> NDArray[np.int64]:
        """`count` blocks from the largest holes, hole after hole."""
        parts: list[NDArray[np.int64]] = []
        while count:
            length = self.largest
            starts = self._take(length)
            used = min(starts.size, -(-count // length))
            blocks = (starts[:used, None] + np.arange(length)).ravel()[:count]
            self._give(length, starts[used:])
            left = used * length - blocks.size
            self._give(left, starts[used - 1 : used] + length - left)
            count -= blocks.size
            parts.append(blocks)
        return np.concatenate(parts)

    def _take(self, length: int) -> NDArray[np.int64]:
        del self._sizes[bisect_left(self._sizes, length)]
        return self._starts.pop(length)

    def _give(self, length: int, starts: NDArray[np.int64]) -> None:
        if length == 0 or starts.size == 0:
            return
        if length in self._starts:
            self._starts[length] = np.concatenate((self._starts[length], starts))
        else:
            insort(self._sizes, length)
            self._starts[length] = starts


def _fill(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], order: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """The first `count` blocks of the holes in `order`."""
    enough = int(np.searchsorted(np.cumsum(lengths[order]), count)) + 1
    return _expand(starts[order[:enough]], lengths[order[:enough]])[:count]


def _expand(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every block of runs, run after run."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    blocks: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    blocks += np.arange(total)
    return blocks


def _stable_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places in the order of their keys. With the place in the key's low bits, where both fit, a plain sort will do."""
    bits = keys.size.bit_length()
    if int(keys.max()).bit_length() + bits > 64:
        return np.argsort(keys, kind="stable")
    packed = np.sort(keys << np.uint64(bits) | np.arange(keys.size, dtype=np.uint64))
    packed &= np.uint64((1 << bits) - 1)
    return packed.view(np.int64)


def _join(wanted: NDArray[np.uint64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
    """Which of `wanted` are among `keys`, and which key each is: places in both.

    By tables of hashes, since a search of hundreds of thousands in as many waits for memory at each step: the keys that
    one table has no room for go to the next. Where a key is there twice, one of the two is found.
    """
    if not wanted.size or not keys.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    found: list[NDArray[np.int64]] = []
    matches: list[NDArray[np.integer]] = []
    rest: NDArray[np.int64] | None = None  # None: all of them
    left: NDArray[np.int64] | None = None
    asked, there = wanted, keys
    multiplier = _SPREAD
    while True:  # at least one key finds room each time
        bits = max(16, (2 * there.size).bit_length())
        shift = np.uint64(64 - bits)
        hashed = there * multiplier
        hashed >>= shift
        slots = hashed.view(np.int64)
        number = np.arange(there.size, dtype=np.int32)
        table = np.zeros(1 << bits, np.int32)
        table[slots] = number
        winner = table.take(slots)
        del hashed, slots
        hashed = asked * multiplier
        hashed >>= shift
        candidate = table.take(hashed.view(np.int64))
        del hashed, table
        equal = there.take(candidate) == asked
        hit = np.flatnonzero(equal)
        match = candidate.take(hit)
        found.append(hit if rest is None else rest.take(hit))
        matches.append(match if left is None else left.take(match))
        without = np.flatnonzero(winner != number)
        without = without.take(np.flatnonzero(there.take(winner.take(without)) != there.take(without)))
        missed = np.flatnonzero(~equal)
        if not without.size or not missed.size:
            return np.concatenate(found), np.concatenate(matches)
        left, there = without if left is None else left.take(without), there.take(without)
        rest, asked = missed if rest is None else rest.take(missed), asked.take(missed)
        multiplier = multiplier * _SPREAD


def _narrow(lengths: NDArray[np.int64]) -> NDArray[np.integer]:
    """The same numbers in 16 bits where they fit: a stable sort of those is a radix sort, ten times quicker."""
    return lengths.astype(np.uint16) if int(lengths.max(initial=0)) < 1 << 16 else lengths
