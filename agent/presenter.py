"""Samples into what goes over the wire: summaries, heatmap cells, blocks and requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent import wire
from agent.model import NANOSECONDS, PoolSample, ages_seconds, elapsed_ms
from engine_shim.layout import OWNER_SLOT_BITS, BlockState
from engine_shim.snapshot import MapSnapshot

UNKNOWN_STATE = 255
_SLOT_MASK = (1 << OWNER_SLOT_BITS) - 1
_COUNTED_STATES = len(wire.STATE_NAMES)


def summarize(sample: PoolSample, now_unix: float) -> wire.EngineSummary:
    """The numbers of one pool. Fragmentation of a sleeping engine is left undefined: its states mean nothing."""
    identity, snapshot, report = sample.identity, sample.snapshot, sample.report
    known = sample.fragmentation_known
    return wire.EngineSummary(
        id=sample.id,
        engine_id=identity.engine_id,
        incarnation=f"{identity.incarnation:016x}",
        kind=identity.kind,
        version=identity.version,
        model=identity.model,
        pool=identity.pool,
        policy=identity.policy,
        medium=identity.medium,
        gpu_uuids=list(identity.gpu_uuids),
        rank=sample.rank,
        pid=identity.pid,
        state=sample.state,
        reason=sample.reason,
        degraded=snapshot.flags.degraded,
        snapshot_age_seconds=sample.snapshot_age_seconds(now_unix),
        heartbeat_age_seconds=sample.heartbeat_age_seconds(now_unix),
        last_step_age_seconds=sample.last_step_age_seconds(now_unix),
        running_requests=snapshot.running_requests,
        waiting_requests=snapshot.waiting_requests,
        total_blocks=report.total_blocks,
        usable_blocks=report.usable_blocks,
        headroom_blocks=identity.headroom_blocks,
        block_tokens=identity.block_tokens,
        block_bytes=identity.block_bytes,
        blocks=wire.BlockCounts(
            free=report.free_blocks,
            cached=report.cached_blocks,
            used=report.used_blocks,
            pinned=report.pinned_blocks,
            reserved=report.reserved_blocks,
            unknown=report.unknown_blocks,
        ),
        fragmentation=wire.Fragmentation(
            rate=report.fragmentation_rate if known else None,
            strict_rate=report.strict_fragmentation_rate if known else None,
            largest_allocatable_run=report.largest_allocatable_run if known else 0,
            largest_free_run=report.largest_free_run if known else 0,
            allocatable_runs=report.allocatable_runs if known else 0,
            run_length_histogram=list(report.run_length_histogram) if known else [],
        ),
        tail_waste_tokens=sample.waste.tokens if sample.waste else None,
        tail_waste_bytes=sample.waste.bytes if sample.waste else None,
        oldest_pinned_seconds=sample.oldest_pinned_seconds,
        forecast=wire.Forecast(exhaustion_seconds=sample.forecast.seconds, reason=sample.forecast.reason),
        counters=dict(snapshot.counters),
    )


def map_cells(sample: PoolSample, cells: int, now_unix: float) -> wire.MapCells:
    """Cut the pool into at most `cells` (at least 1) equal cells of consecutive blocks."""
    snapshot = sample.snapshot
    total = snapshot.states.size
    per_cell = max(1, -(-total // max(1, cells)))
    count = -(-total // per_cell)
    counts = _counts_by_cell(snapshot.states, per_cell, count)
    # Ties go to the higher value: argmax over the reversed rows takes the last of equals.
    winners = _COUNTED_STATES - np.argmax(counts[::-1], axis=0)
    state = np.where(winners == _COUNTED_STATES, UNKNOWN_STATE, winners)
    named: dict[wire.BlockStateName, list[int]] = {}
    for row, name in enumerate((*wire.STATE_NAMES, "unknown")):
        if counts[row].any():
            named[name] = counts[row].tolist()
    owner, owners = _owners_by_cell(snapshot, per_cell, count)
    return wire.MapCells(
        id=sample.id,
        sequence=snapshot.sequence,
        snapshot_age_seconds=sample.snapshot_age_seconds(now_unix),
        total_blocks=total,
        blocks_per_cell=per_cell,
        cells=count,
        state=state.tolist(),
        counts=named,
        references=None
        if snapshot.references is None
        else _rows(snapshot.references, per_cell, count, 0).max(axis=1, initial=0).tolist(),
        age_seconds=_ages_by_cell(snapshot, per_cell, count, now_unix),
        owner=owner,
        owners=owners,
    )


def block_page(sample: PoolSample, start: int, count: int, now_unix: float) -> wire.BlockPage:
    """Blocks start up to start + count - 1, as far as the pool goes."""
    snapshot = sample.snapshot
    end = min(start + count, snapshot.states.size)
    names = {entry.owner: entry.request_id for entry in snapshot.owners}
    ages = None
    if snapshot.touched_ms is not None:
        ages = np.round(ages_seconds(snapshot.touched_ms[start:end], snapshot, now_unix), 1).tolist()
    states = snapshot.states[start:end].tolist()
    references = _cut(snapshot.references, start, end)
    tokens = _cut(snapshot.tokens, start, end)
    owners = _cut(snapshot.owner, start, end)
    positions = _cut(snapshot.position, start, end)
    groups = _cut(snapshot.group, start, end)
    blocks = [
        wire.Block(
            block=start + i,
            state=wire.STATE_NAMES[states[i]] if states[i] < _COUNTED_STATES else "unknown",
            references=references[i] if references else None,
            tokens=tokens[i] if tokens else None,
            owner=_owner_name(owners[i], names) if owners else None,
            position=positions[i] if positions and owners and owners[i] else None,
            age_seconds=ages[i] if ages else None,
            group=groups[i] if groups and groups[i] != 255 else None,
        )
        for i in range(end - start)
    ]
    return wire.BlockPage(id=sample.id, sequence=snapshot.sequence, start=start, blocks=blocks)


def request_page(sample: PoolSample, limit: int, now_unix: float) -> wire.RequestPage:
    """Live sequences, those with most blocks first."""
    snapshot = sample.snapshot
    entries = sorted(snapshot.owners, key=lambda entry: (-entry.blocks, entry.request_id))
    holdings = _holdings(snapshot)
    requests = []
    for entry in entries[:limit]:
        blocks, runs, waste = holdings.get(entry.owner, (0, 0, 0)) if holdings is not None else (None, None, None)
        requests.append(
            wire.Request(
                request_id=entry.request_id,
                lora=entry.lora,
                cache_salt=entry.cache_salt,
                tokens=entry.tokens,
                blocks=entry.blocks,
                exclusive_blocks=blocks,
                runs=runs,
                tail_waste_tokens=waste if snapshot.tokens is not None else None,
                age_seconds=max(0.0, now_unix - entry.first_seen_unix_ns / NANOSECONDS),
            )
        )
    return wire.RequestPage(id=sample.id, sequence=snapshot.sequence, total=len(entries), requests=requests)


def _owner_name(owner: int, names: dict[int, str]) -> str | None:
    """The request of an owner; one whose row is gone already is named by its number."""
    return None if owner == 0 else names.get(owner, f"owner {owner & _SLOT_MASK}")


def _cut(column: NDArray[np.unsignedinteger] | None, start: int, end: int) -> list[int] | None:
    return None if column is None else column[start:end].tolist()


def _rows(column: NDArray[np.generic], per_cell: int, count: int, filler: int) -> NDArray[np.generic]:
    """One row a cell; the last one is filled up."""
    missing = per_cell * count - column.size
    if missing:
        column = np.concatenate((column, np.full(missing, filler, column.dtype)))
    return column.reshape(count, per_cell)


def _counts_by_cell(states: NDArray[np.uint8], per_cell: int, count: int) -> NDArray[np.int64]:
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
    return (indices - offset).tolist(), [_owner_name(owner, names) or "" for owner in owned]


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


def _holdings(snapshot: MapSnapshot) -> dict[int, tuple[int, int, int]] | None:
    """By owner: blocks it is the first holder of and nobody else shares, runs of ids among its blocks, empty slots."""
    if snapshot.owner is None:
        return None
    entries = [entry.owner for entry in snapshot.owners]
    row = _owner_rows(snapshot.owner, entries)
    row[snapshot.states == BlockState.FREE] = 0
    size = len(entries) + 1
    starts = np.concatenate(([True], row[1:] != row[:-1]))
    runs = np.bincount(row[starts], minlength=size)
    exclusive = np.bincount(row if snapshot.references is None else row[snapshot.references == 1], minlength=size)
    waste: NDArray[Any] = np.zeros(size)
    if snapshot.tokens is not None:
        held = (snapshot.states == BlockState.USED) | (snapshot.states == BlockState.PINNED)
        empty = np.maximum(snapshot.identity.block_tokens - snapshot.tokens.astype(np.int32), 0) * held
        waste = np.bincount(row, weights=empty, minlength=size)
    return {
        owner: (int(exclusive[index]), int(runs[index]), int(waste[index]))
        for index, owner in enumerate(entries, start=1)
    }


def _owner_rows(column: NDArray[np.uint32], owners: list[int]) -> NDArray[np.int32]:
    """For each block the position of its owner in `owners`, from 1; 0 for nobody and for owners not listed."""
    slots = [owner & _SLOT_MASK for owner in owners]
    beyond = max(slots, default=0) + 1
    row_of_slot = np.zeros(beyond + 1, np.int32)
    row_of_slot[slots] = np.arange(1, len(owners) + 1)
    rows: NDArray[np.int32] = row_of_slot[np.minimum(column & np.uint32(_SLOT_MASK), np.uint32(beyond))]
    # A slot used anew has another generation; blocks of its former owner are not the new one's.
    rows[np.asarray([0, *owners], np.uint32)[rows] != column] = 0
    return rows
