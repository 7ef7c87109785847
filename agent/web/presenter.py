"""Samples into what goes over the wire: summaries and blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent import wire
from agent.fragmentation import FragmentationReport
from agent.sampling.model import PoolSample, ages_seconds

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
        blocks=block_counts(report),
        fragmentation=fragmentation(report, known=known),
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


def block_counts(report: FragmentationReport) -> wire.BlockCounts:
    return wire.BlockCounts(
        free=report.free_blocks,
        cached=report.cached_blocks,
        used=report.used_blocks,
        pinned=report.pinned_blocks,
        reserved=report.reserved_blocks,
        unknown=report.unknown_blocks,
    )


def fragmentation(report: FragmentationReport, *, known: bool = True) -> wire.Fragmentation:
    """Left undefined where it is not `known`: the states of a sleeping engine mean nothing."""
    return wire.Fragmentation(
        rate=report.fragmentation_rate if known else None,
        strict_rate=report.strict_fragmentation_rate if known else None,
        largest_allocatable_run=report.largest_allocatable_run if known else 0,
        largest_free_run=report.largest_free_run if known else 0,
        allocatable_runs=report.allocatable_runs if known else 0,
        run_length_histogram=list(report.run_length_histogram) if known else [],
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


def owner_name(owner: int, names: dict[int, str]) -> str | None:
    """The request of an owner. One whose row is gone has ended; its cached blocks still name it."""
    return None if owner == 0 else names.get(owner, wire.ENDED_OWNER)


def _cut(column: NDArray[np.unsignedinteger] | None, start: int, end: int) -> list[int] | None:
    return None if column is None else column[start:end].tolist()
