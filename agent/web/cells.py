"""The heatmap: a pool cut into cells of consecutive blocks, and what each cell says about its blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent import wire
from agent.sampling.model import PoolSample, elapsed_ms
from agent.web.presenter import owner_name
from engine_shim.layout import BlockState
from engine_shim.snapshot import MapSnapshot

UNKNOWN_STATE = 255
_COUNTED_STATES = len(wire.STATE_NAMES)


def map_cells(sample: PoolSample, cells: int, now_unix: float, request: str | None = None) -> wire.MapCells:
    """Cut the pool into at most `cells` (at least 1) equal cells of consecutive blocks.

    With a `request`, also how many blocks of each cell it was the first to hold.
    """
    snapshot = sample.snapshot
    total = snapshot.states.size
    per_cell, count = cut(total, cells)
    state, named = states_by_cell(snapshot.states, per_cell, count)
    owner, owners = _owners_by_cell(snapshot, per_cell, count)
    return wire.MapCells(
        id=sample.id,
        sequence=snapshot.sequence,
        snapshot_age_seconds=sample.snapshot_age_seconds(now_unix),
        total_blocks=total,
        blocks_per_cell=per_cell,
        cells=count,
        state=state,
        counts=named,
        references=None
        if snapshot.references is None
        else _rows(snapshot.references, per_cell, count, 0).max(axis=1, initial=0).tolist(),
        age_seconds=_ages_by_cell(snapshot, per_cell, count, now_unix),
        owner=owner,
        owners=owners,
        requested=None if request is None else _requested_by_cell(snapshot, request, per_cell, count),
    )


def cut(total: int, cells: int) -> tuple[int, int]:
    """Blocks in a cell, and cells, for at most `cells` (at least 1) cells of `total` blocks."""
    per_cell = max(1, -(-total // max(1, cells)))
    return per_cell, -(-total // per_cell)


def states_by_cell(
    states: NDArray[np.uint8], per_cell: int, count: int
) -> tuple[list[int], dict[wire.BlockStateName, list[int]]]:
    """The most frequent state of each cell, and how many blocks it has in each state that occurs at all."""
    counts = counts_by_cell(states, per_cell, count)
    # Ties go to the higher value: argmax over the reversed rows takes the last of equals.
    winners = _COUNTED_STATES - np.argmax(counts[::-1], axis=0)
    state = np.where(winners == _COUNTED_STATES, UNKNOWN_STATE, winners)
    named: dict[wire.BlockStateName, list[int]] = {}
    for row, name in enumerate((*wire.STATE_NAMES, "unknown")):
        if counts[row].any():
            named[name] = counts[row].tolist()
    return state.tolist(), named


def _rows(column: NDArray[np.generic], per_cell: int, count: int, filler: int) -> NDArray[np.generic]:
    """One row a cell; the last one is filled up."""
    missing = per_cell * count - column.size
    if missing:
        column = np.concatenate((column, np.full(missing, filler, column.dtype)))
    return column.reshape(count, per_cell)


def counts_by_cell(states: NDArray[np.uint8], per_cell: int, count: int) -> NDArray[np.int64]:
    """Blocks by state (rows; the last one unknown) and cell (columns)."""
    starts = np.arange(count, dtype=np.int64) * per_cell
    sizes = np.diff(starts, append=states.size)
    counts = np.zeros((_COUNTED_STATES + 1, count), np.int64)
    counts[-1] = sizes
    if states.size == 0:
        return counts
    for state in range(_COUNTED_STATES):
        mask = (states == state).view(np.uint8)
        if mask.any():
            counts[state] = np.add.reduceat(mask, starts, dtype=np.int64)
            counts[-1] -= counts[state]
    return counts


def _ages_by_cell(snapshot: MapSnapshot, per_cell: int, count: int, now_unix: float) -> list[float] | None:
    """Since the most recent touch in each cell, in whole tenths of a second."""
    if snapshot.touched_ms is None:
        return None
    elapsed = elapsed_ms(snapshot.touched_ms, snapshot, now_unix)
    if per_cell > 1:
        elapsed = _rows(elapsed, per_cell, count, 0xFFFFFFFF).min(axis=1)
    rounded: list[float] = np.round(elapsed / 1000.0, 1).tolist()
    return rounded


def _owners_by_cell(snapshot: MapSnapshot, per_cell: int, count: int) -> tuple[list[int] | None, list[str]]:
    """Index of the owner of most blocks of each cell in the list of names; -1 where nobody owns more than others do."""
    if snapshot.owner is None:
        return None, []
    rows = np.sort(_rows(snapshot.owner, per_cell, count, 0), axis=1)
    winners = _row_modes(rows)
    present, indices = np.unique(winners, return_inverse=True)
    names = {entry.owner: entry.request_id for entry in snapshot.owners}
    owned = [int(owner) for owner in present if owner != 0]
    offset = 1 if present.size and present[0] == 0 else 0
    return (indices - offset).tolist(), [owner_name(owner, names) or "" for owner in owned]


def _requested_by_cell(snapshot: MapSnapshot, request: str, per_cell: int, count: int) -> list[int] | None:
    """Blocks of a live request; None where there is no such request, or the map has no owners."""
    owned_by = [entry.owner for entry in snapshot.owners if entry.request_id == request]
    if snapshot.owner is None or not owned_by:
        return None
    held = np.isin(snapshot.owner, np.asarray(owned_by, np.uint32)) & (snapshot.states != BlockState.FREE)
    blocks: list[int] = _rows(held, per_cell, count, 0).sum(axis=1).tolist()
    return blocks


def _row_modes(rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Most frequent owner of each sorted row; 0 (nobody) counts only where it fills the row."""
    count, width = rows.shape
    if width == 1 or count == 0:
        return rows[:, 0] if width else np.zeros(count, np.uint32)
    flat = rows.ravel()
    starts_run = np.empty(flat.size, np.bool_)
    starts_run[0] = True
    np.not_equal(flat[1:], flat[:-1], out=starts_run[1:])
    starts_run[::width] = True
    starts = np.flatnonzero(starts_run)
    lengths = np.diff(starts, append=flat.size)
    owners = flat[starts]
    lengths[owners == 0] = 0
    first_run_of_row = np.searchsorted(starts, np.arange(count) * width)
    # The longest run of a row, the later one of equals, as the largest of a combined key.
    keys = lengths * (starts.size + 1) + np.arange(starts.size)
    best = np.maximum.reduceat(keys, first_run_of_row) % (starts.size + 1)
    winners: NDArray[np.uint32] = owners[best]
    return winners
