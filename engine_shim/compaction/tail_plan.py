"""Plans the moves that empty a pool's tail, so that it can go on with fewer blocks: pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine_shim.compaction.destinations import choose_destinations
from engine_shim.compaction.planning import MovePlan, Window, sequence_runs
from engine_shim.errors import PoolError, SettingsError
from engine_shim.layout import BlockState
from engine_shim.runs import find_runs


def plan_tail(
    states: ArrayLike,
    *,
    keep: int,
    target: float = 0.0,
    owners: ArrayLike | None = None,
    max_moves: int | None = None,
    positions: ArrayLike | None = None,
) -> MovePlan:
    """Plan one move for each USED block at `keep` or above, to allocatable blocks below it.

    The arguments are those of `plan_moves` (`target` has no meaning here) and `keep`, the blocks that remain. The plan
    meets its target where nothing in the tail is USED or PINNED after it. Where the blocks below do not suffice, or
    `max_moves` forbids it, the highest go first. Raises PoolError and SettingsError as `plan_moves` does.
    """
    column = np.asarray(states)
    if column.ndim != 1:
        raise PoolError(f"states have {column.ndim} dimensions; give one value a block")
    if not 0 <= keep <= column.size:
        raise SettingsError(f"keep={keep}: a pool of {column.size} blocks keeps 0 to {column.size}")
    column = column.astype(np.uint8)
    window = Window(keep, column.size - keep)
    sources = np.flatnonzero(column[keep:] == BlockState.USED) + keep
    room = int(np.count_nonzero(column[:keep] <= BlockState.CACHED))
    fitting = min(room, sources.size if max_moves is None else max_moves)
    limited, sources = fitting < sources.size, sources[max(0, sources.size - fitting) :]
    owner_column = None if owners is None else np.asarray(owners)
    position_column = None if positions is None else np.asarray(positions)
    destinations = choose_destinations(column, sources, keep, window.length, owner_column, position_column)
    after = column.copy()
    after[destinations] = BlockState.USED
    after[sources] = BlockState.FREE
    pinned = int(np.count_nonzero((column[keep:] == BlockState.PINNED) | (column[keep:] > BlockState.RESERVED)))
    moves = np.column_stack((sources, destinations))
    moves.setflags(write=False)
    runs_before = runs_after = None
    if owner_column is not None:
        runs_before = sequence_runs(owner_column, position_column, column)
        runs_after = runs_before
        if sources.size:
            moved_owners, moved_positions = _moved(owner_column, moves), _moved(position_column, moves)
            runs_after = sequence_runs(moved_owners, moved_positions, after) if moved_owners is not None else None
    largest_before, rate_before = _standing(column)
    largest_after, rate_after = _standing(after)
    return MovePlan(
        moves=moves,
        window=window,
        # `meets_target` compares runs, and a tail that is withdrawn is none: these stand for emptied, and for not.
        wanted_run=0 if not (limited or pinned) else largest_after + 1,
        largest_run_before=largest_before,
        largest_run_after=largest_after,
        fragmentation_before=rate_before,
        fragmentation_after=rate_after,
        cached_lost=int(np.count_nonzero(column[destinations] == BlockState.CACHED)),
        reachable=not pinned and room >= int(np.count_nonzero(column[keep:] == BlockState.USED)),
        limited=limited,
        runs_before=runs_before,
        runs_after=runs_after,
        reason=_reason(window, sources.size, pinned, limited),
    )


def _reason(window: Window, moves: int, pinned: int, limited: bool) -> str:
    text = f"{moves} blocks leave the tail of {window.length} blocks"
    if pinned:
        text += f"; {pinned} in it are pinned"
    return f"{text}; there is no room for the others" if limited else text


def _moved(column: NDArray[np.integer] | None, moves: NDArray[np.int64]) -> NDArray[np.integer] | None:
    if column is None:
        return None
    after = column.copy()
    after[moves[:, 1]] = column[moves[:, 0]]
    return after


def _standing(column: NDArray[np.uint8]) -> tuple[int, float | None]:
    _, lengths = find_runs(column <= BlockState.CACHED)
    total = int(lengths.sum())
    largest = int(lengths.max(initial=0))
    return largest, None if total == 0 else 1.0 - largest / total
