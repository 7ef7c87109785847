"""Samples into what goes over the wire: summaries, blocks and requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent import wire
from agent.sampling.model import NANOSECONDS, PoolSample, ages_seconds
from engine_shim.layout import OWNER_SLOT_BITS, BlockState
from engine_shim.snapshot import MapSnapshot

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
        forecast=wire.Forecast(
            exhaustion_seconds=sample.forecast.seconds,
            reason=sample.forecast.reason,
            known=sample.forecast.known,
            headroom_seconds=sample.forecast.headroom_seconds,
            admission_blocked=sample.admission.blocked,
            admission_reason=sample.admission.reason,
            queue_grows=sample.queue_grows,
        ),
        counters=dict(snapshot.counters),
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
            owner=owner_name(owners[i], names) if owners else None,
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


def owner_name(owner: int, names: dict[int, str]) -> str | None:
    """The request of an owner. One whose row is gone has ended; its cached blocks still name it."""
    return None if owner == 0 else names.get(owner, wire.ENDED_OWNER)


def _cut(column: NDArray[np.unsignedinteger] | None, start: int, end: int) -> list[int] | None:
    return None if column is None else column[start:end].tolist()


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
        empty = np.maximum(snapshot.identity.block_tokens - snapshot.tokens.astype(np.int64), 0) * held
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
