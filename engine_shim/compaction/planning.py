"""Plans the fewest moves of live blocks that bring fragmentation down to a target: pure, optimal, O(n).

With A allocatable blocks (FREE or CACHED), fragmentation is 1 - R / A for a largest allocatable run of R. The target is
met by the smallest integer L with 1 - L / A <= target. Any end state with an allocatable run of L has emptied some
window of L blocks, and each USED block in that window cost at least one move; a window that holds nothing immovable can
be emptied with exactly one move for each, since at least as many allocatable blocks lie outside it. So the cheapest
window, found from prefix sums, is the fewest moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine_shim.compaction.destinations import choose_destinations
from engine_shim.compaction.owner_runs import count_runs, count_runs_after, owned_blocks
from engine_shim.errors import PoolError, SettingsError
from engine_shim.layout import BlockState

_UNKNOWN = 255
# Blocks worked on at a time: what they take stays in the cache.
_CHUNK = 1 << 16
_PLAN_BYTES = 24  # a block, at the height of a plan
_MOST_KEPT_BYTES = 31 << 20  # glibc learns from no piece above 32 MiB
_FEW = 16  # windows whose blocks are counted one by one


class Window(NamedTuple):
    """Blocks start .. start + length - 1."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class MovePlan:
    """What to move, and what that changes. Lengths and counts are blocks.

    `moves` is (n, 2) int64, rows of source and destination: sources are the USED blocks of `window` in ascending order,
    destinations are distinct allocatable blocks outside it. It is read-only and belongs to the states it was made from.
    """

    moves: NDArray[np.int64]
    window: Window  # what the moves empty; the largest allocatable run where there are none
    wanted_run: int  # the run that the target asks for
    largest_run_before: int
    largest_run_after: int
    fragmentation_before: float | None  # None where nothing is allocatable
    fragmentation_after: float | None
    cached_lost: int  # destinations that hold a cached prefix
    reachable: bool  # False: no window of `wanted_run` is free of PINNED, RESERVED and unknown blocks
    limited: bool  # max_moves cut the plan: the window is the longest that it can empty
    runs_before: int | None  # `sequence_runs` of the pool; None where no owners were given
    runs_after: int | None
    reason: str

    @property
    def meets_target(self) -> bool:
        return self.largest_run_after >= self.wanted_run


def plan_moves(
    states: ArrayLike,
    *,
    target: float = 0.10,
    owners: ArrayLike | None = None,
    max_moves: int | None = None,
    positions: ArrayLike | None = None,
) -> MovePlan:
    """Plan the fewest moves after which fragmentation is at most `target`.

    `states` is a column of BlockState values, one a block; a value that this version does not know is never moved and
    never a destination. `owners` and `positions` are columns of the same length, as in the map: 0 is nobody's, a
    position is the logical index of a block in its owner's sequence. They choose among destinations, so that
    sequences get longer runs; the number of moves is the same without them.

    Among equally cheap windows the one that loses fewer cached blocks is taken, then the one at the higher address.
    Where no window of the wanted length is movable, or `max_moves` forbids it, the plan reaches for the longest run
    that there is to be had, and says so in `reachable`, `limited` and `reason`.

    Raises SettingsError for a target outside 0..1 or a negative `max_moves`, PoolError for columns that are none.
    """
    wanted_share = 1 - _exact_share(target)
    if max_moves is not None and max_moves < 0:
        raise SettingsError(f"max_moves={max_moves}: give 0 or more, or None for no limit")
    column = _state_column(states)
    owner_column = None if owners is None else _matching_column(owners, column.size, "owners")
    position_column = None if positions is None else _matching_column(positions, column.size, "positions")
    if position_column is not None and owner_column is None:
        raise PoolError("positions without owners say nothing; give both")

    _keep_memory(column.size)
    allocatable = column <= BlockState.CACHED
    total = int(np.count_nonzero(allocatable))
    wanted = -(-total * wanted_share.numerator // wanted_share.denominator)
    standing = _longest_run(allocatable)

    found = _Search(column).find(wanted, standing.length, max_moves)
    sources = found.sources
    destinations = choose_destinations(
        column, sources, found.window.start, found.window.length, owner_column, position_column
    )
    run_after = standing.length
    if sources.size:
        allocatable[destinations] = False
        allocatable[sources] = True
        run_after = _longest_run(allocatable).length
    runs_before = runs_after = None
    if owner_column is not None:
        owned = owned_blocks(owner_column, column)
        runs_before = runs_after = count_runs(owned, owner_column, position_column)
        if sources.size:
            runs_after = count_runs_after(owned, owner_column, position_column, sources, destinations)
    moves = np.column_stack((sources, destinations))
    moves.setflags(write=False)
    return MovePlan(
        moves=moves,
        window=found.window if sources.size else standing,
        wanted_run=wanted,
        largest_run_before=standing.length,
        largest_run_after=run_after,
        fragmentation_before=_rate(standing.length, total),
        fragmentation_after=_rate(run_after, total),
        cached_lost=int(np.count_nonzero(column[destinations] == BlockState.CACHED)),
        reachable=found.reachable,
        limited=found.limited,
        runs_before=runs_before,
        runs_after=runs_after,
        reason=found.reason if total else "nothing is allocatable, so that fragmentation is not defined",
    )


def sequence_runs(owners: ArrayLike, positions: ArrayLike | None, states: ArrayLike) -> int:
    """Contiguous runs of blocks over all live sequences: what a transfer of them all pays for (descriptors).

    Two neighbouring live blocks (USED or PINNED) of one owner are in one run where their positions follow each other;
    without positions, wherever they are neighbours. Owner 0 is nobody and counts nothing. A shared block counts for
    the owner that the column names. Raises PoolError for columns that do not match.
    """
    column = _state_column(states)
    owner_column = _matching_column(owners, column.size, "owners")
    position_column = None if positions is None else _matching_column(positions, column.size, "positions")
    return count_runs(owned_blocks(owner_column, column), owner_column, position_column)


def chunks(plan: MovePlan, *, max_moves: int, max_bytes: int, block_bytes: int) -> Iterator[NDArray[np.int64]]:
    """Cut a plan's moves, in order, into pieces that copy at most `max_moves` blocks and `max_bytes` bytes each.

    A block larger than `max_bytes` still moves, alone. Raises SettingsError for a limit below 1.
    """
    for name, value in (("max_moves", max_moves), ("max_bytes", max_bytes), ("block_bytes", block_bytes)):
        if value < 1:
            raise SettingsError(f"{name}={value}: give 1 or more")
    size = max(1, min(max_moves, max_bytes // block_bytes))
    return (plan.moves[start : start + size] for start in range(0, len(plan.moves), size))


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    window: Window
    sources: NDArray[np.int64]
    reachable: bool
    limited: bool
    reason: str


class _Search:
    """Finds the window of one pool that is worth emptying."""

    def __init__(self, column: NDArray[np.uint8]) -> None:
        self._column = column
        self._used = column == BlockState.USED
        self._immovable = np.flatnonzero(column > BlockState.USED)

    def find(self, wanted: int, standing: int, max_moves: int | None) -> _Found:
        """The cheapest window for a run of `wanted`, or the longest that is to be had; `standing` is there already."""
        if standing >= wanted:
            return self._nothing("the target is met without a move")
        barriers = np.concatenate(([-1], self._immovable, [self._column.size]))
        longest = int(np.diff(barriers).max()) - 1
        reachable = longest >= wanted
        length = min(wanted, longest)
        reason = f"a window of {length:,} blocks is emptied"
        if not reachable:
            reason = (
                f"no {wanted:,} blocks in a row are free of pinned, reserved and unknown ones; "
                f"the best reachable run is {longest:,}"
            )
            if length <= standing:
                return self._nothing(f"{reason}, which is there already", reachable=False)
        cheapest, cost = self._cheapest(length)
        limited = max_moves is not None and cost > max_moves
        if max_moves is not None and limited:
            length = min(length, self._longest_within(max_moves, barriers))
            reason = (
                f"{cost:,} moves are needed and {max_moves:,} allowed; the longest run within them is {length:,}"
                + ("" if reachable else f"; {reason}")
            )
            if length <= standing:
                return self._nothing(f"{reason}, which is there already", reachable=reachable, limited=True)
            cheapest, cost = self._cheapest(length)
        window = self._choose(cheapest, length, cost)
        sources = np.flatnonzero(self._used[window.start : window.start + length]) + window.start
        return _Found(window, sources, reachable, limited, reason)

    def _nothing(self, reason: str, *, reachable: bool = True, limited: bool = False) -> _Found:
        return _Found(Window(0, 0), np.empty(0, np.int64), reachable, limited, reason)

    def _cheapest(self, length: int) -> tuple[NDArray[np.int64], int]:
        """Starts of the movable windows of `length` with the fewest USED blocks, and how many those are.

        At least one window of that length must be movable.
        """
        used = self._used.view(np.int8)
        # What the cost of a window changes by, from its start to the next.
        steps = used[length:] - used[:-length]
        blocked_steps = None
        cost, blocked = int(np.count_nonzero(self._used[:length])), 0
        if self._immovable.size:
            immovable = (self._column > BlockState.USED).view(np.int8)
            blocked_steps = immovable[length:] - immovable[:-length]
            blocked = int(np.count_nonzero(immovable[:length]))
        never = self._column.size + 1
        fewest = never if blocked else cost
        cheapest = [np.zeros(1, np.int64)]
        for first in range(0, steps.size, _CHUNK):
            costs = np.cumsum(steps[first : first + _CHUNK], dtype=np.int32)
            costs += cost
            cost = int(costs[-1])
            if blocked_steps is not None:
                inside = np.cumsum(blocked_steps[first : first + _CHUNK], dtype=np.int32)
                inside += blocked
                blocked = int(inside[-1])
                costs[inside != 0] = never
            least = int(costs.min())
            if least <= fewest:
                if least < fewest:
                    cheapest.clear()
                fewest = least
                cheapest.append(np.flatnonzero(costs == least) + (first + 1))
        return np.concatenate(cheapest), fewest

    def _choose(self, starts: NDArray[np.int64], length: int, moves: int) -> Window:
        """Of equally cheap windows the one that loses the fewest cached blocks, then that at the highest address."""
        if starts.size > 1:
            starts = self._fewest_lost(starts, length, moves)
        return Window(int(starts[-1]), length)

    def _fewest_lost(self, candidates: NDArray[np.int64], length: int, moves: int) -> NDArray[np.int64]:
        """Those of equally cheap windows whose moves overwrite the fewest cached blocks: FREE ones are used first."""
        free = self._column == BlockState.FREE
        total_free = int(np.count_nonzero(free))
        if total_free - length >= moves:
            return candidates
        if candidates.size <= _FEW:
            inside = np.array([np.count_nonzero(free[start : start + length]) for start in candidates.tolist()])
        else:
            free_before = _prefix_sums(free)
            inside = free_before[candidates + length] - free_before[candidates]
        outside = total_free - inside
        lost = np.maximum(moves - outside, 0)
        fewest: NDArray[np.int64] = candidates[lost == lost.min()]
        return fewest

    def _longest_within(self, max_moves: int, barriers: NDArray[np.int64]) -> int:
        """The length of the longest movable window with at most `max_moves` USED blocks.

        Such a window begins behind a barrier or a USED block, and ends before the next barrier or before one USED
        block too many.
        """
        used = np.flatnonzero(self._used)
        first_behind = np.searchsorted(used, barriers)  # of each barrier, the first USED block behind it
        one_too_many = np.append(used, np.full(max_moves + 1, self._column.size))
        behind_barrier = np.minimum(one_too_many[first_behind[:-1] + max_moves], barriers[1:]) - barriers[:-1]
        next_barrier = np.repeat(barriers[1:], np.diff(first_behind))
        behind_used = np.minimum(one_too_many[max_moves + 1 :], next_barrier) - used
        return max(int(behind_barrier.max()), int(behind_used.max(initial=0))) - 1


def _longest_run(mask: NDArray[np.bool_]) -> Window:
    """The longest run of True, the first of equals; (0, 0) where nothing is set."""
    longest, before = Window(0, 0), -1  # the last block that is not set
    for first in range(0, mask.size + 1, _CHUNK):
        unset = np.flatnonzero(~mask[first : first + _CHUNK])
        unset += first
        borders = np.concatenate(([before], unset, [mask.size] if first + _CHUNK > mask.size else unset[:0]))
        gaps = np.diff(borders)
        if gaps.size:
            place = int(gaps.argmax())
            if gaps[place] - 1 > longest.length:
                longest = Window(int(borders[place]) + 1, int(gaps[place]) - 1)
        before = int(borders[-1])
    return longest


def _prefix_sums(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    sums = np.empty(mask.size + 1, np.int32)
    sums[0] = 0
    np.cumsum(mask, dtype=np.int32, out=sums[1:])
    return sums


def _keep_memory(blocks: int) -> None:
    """Have the allocator keep what a plan takes for the next one: else, in some states of the heap, each plan gives it
    back to the system, and pays a third of its time for having it mapped again.

    What glibc keeps is twice the largest piece that it ever let go of (mallopt(3), M_MMAP_THRESHOLD). This one is let
    go of untouched, so that it takes no memory. Elsewhere it does nothing.
    """
    np.empty(min(_PLAN_BYTES * blocks, _MOST_KEPT_BYTES), np.uint8)


def _exact_share(target: float) -> Fraction:
    """The share as it is written: 0.1 is one tenth, not the binary number beside it."""
    try:
        share = Fraction(str(target))
    except ValueError:
        share = Fraction(-1)
    if isinstance(target, bool) or not 0 <= share <= 1:
        raise SettingsError(f"target={target!r} is a fragmentation rate: give a number from 0 to 1")
    return share


def _state_column(states: ArrayLike) -> NDArray[np.uint8]:
    values = _integers(states, "states")
    if values.dtype == np.uint8:
        return values.astype(np.uint8, copy=False)
    # A wider number must not wrap round to a state that means something.
    return np.where((values >= 0) & (values < _UNKNOWN), values, _UNKNOWN).astype(np.uint8)


def _matching_column(values: ArrayLike, blocks: int, name: str) -> NDArray[np.integer]:
    column = _integers(values, name)
    if column.size != blocks:
        raise PoolError(f"{name} has {column.size} entries and the pool {blocks} blocks; give one a block")
    return column


def _integers(values: ArrayLike, name: str) -> NDArray[np.integer]:
    column = np.asarray(values)
    if column.size == 0 and column.ndim == 1:
        return np.empty(0, np.uint8)
    if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
        raise PoolError(f"{name} must be a one-dimensional column of integers, not {column.dtype} {column.shape}")
    return column


def _rate(largest: int, total: int) -> float | None:
    return None if total == 0 else 1.0 - largest / total
