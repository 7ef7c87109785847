"""Compaction into what goes over the wire: states, runs with predicted beside realised, plans, audit entries."""

from __future__ import annotations

from collections.abc import Mapping

from agent.compaction.audit import AuditEntry
from agent.compaction.record import PoolStanding
from agent.compaction.settings import DriverSettings
from agent.sampling.model import PoolSample
from agent.wire import compaction as wire_compaction
from engine_shim.compaction.planning import plan_moves
from engine_shim.control.messages import Detail, RunReply, Scalar


def plan_of(
    sample: PoolSample, target: float, max_moves: int | None, standing: PoolStanding
) -> wire_compaction.CompactionPlan:
    """What it would take to bring this sample down to `target`. Prefixes in the way are lost, unless the engine said
    that it keeps them."""
    status = standing.answer.status
    keeps_cached = status is not None and bool(status.details.get("keeps_cached"))
    snapshot = sample.snapshot
    plan = plan_moves(
        snapshot.states, target=target, owners=snapshot.owner, positions=snapshot.position, max_moves=max_moves
    )
    return wire_compaction.CompactionPlan(
        target=target,
        moves=len(plan.moves),
        bytes=len(plan.moves) * sample.identity.block_bytes,
        fragmentation_rate_before=plan.fragmentation_before,
        fragmentation_rate_after=plan.fragmentation_after,
        largest_allocatable_run_before=plan.largest_run_before,
        largest_allocatable_run_after=plan.largest_run_after,
        sequence_runs_before=plan.runs_before,
        sequence_runs_after=plan.runs_after,
        cached_blocks_lost=0 if keeps_cached else plan.cached_lost,
        reachable=plan.reachable,
        limited=plan.limited,
        reason=plan.reason,
    )


def describe_run(id: str, reply: RunReply) -> wire_compaction.CompactionRun:
    """A run's report, or a plan's."""
    details = reply.details
    planned = reply.decision == "planned"
    predicted = _part(details, "predicted")
    after = _part(details, "after")
    realised = wire_compaction.CompactionFigures(
        moves=reply.moved_blocks,
        fragmentation_rate=reply.fragmentation_rate_after,
        largest_allocatable_run=reply.largest_allocatable_run_after,
        sequence_runs=_integer(after.get("sequence_runs")),
        cached_blocks_lost=_integer(details.get("cached_lost")),
        given_back_bytes=_integer(details.get("given_back_bytes")),
    )
    expected = wire_compaction.CompactionFigures(
        moves=reply.planned_moves,
        fragmentation_rate=reply.fragmentation_rate_after if planned else _rate(predicted.get("fragmentation")),
        largest_allocatable_run=(
            reply.largest_allocatable_run_after if planned else _integer(predicted.get("largest_run"))
        ),
        sequence_runs=_integer(details.get("sequence_runs_after") if planned else predicted.get("sequence_runs")),
        cached_blocks_lost=_integer(details.get("cached_lost" if planned else "cached_lost_predicted")),
        given_back_bytes=_integer(details.get("given_back_bytes_predicted")),
    )
    nothing = wire_compaction.CompactionFigures(
        moves=0,
        fragmentation_rate=reply.fragmentation_rate_before,
        largest_allocatable_run=reply.largest_allocatable_run_before,
        sequence_runs=_integer(details.get("sequence_runs_before")),
        cached_blocks_lost=0,
        given_back_bytes=None,
    )
    return wire_compaction.CompactionRun(
        id=id,
        decision=reply.decision,
        reason=reply.reason,
        planned_moves=reply.planned_moves,
        moved_blocks=reply.moved_blocks,
        moved_bytes=reply.moved_bytes,
        fragmentation_rate_before=reply.fragmentation_rate_before,
        fragmentation_rate_after=reply.fragmentation_rate_after,
        largest_allocatable_run_before=reply.largest_allocatable_run_before,
        largest_allocatable_run_after=reply.largest_allocatable_run_after,
        predicted=expected,
        realised=nothing if planned else realised,
        details=dict(details),
    )


def describe_standing(
    sample: PoolSample, standing: PoolStanding, settings: DriverSettings, plan: wire_compaction.CompactionPlan | None
) -> wire_compaction.CompactionState:
    """The policy's state for one pool."""
    policy, state, status = settings.policy, standing.state, standing.answer.status
    last = standing.verdicts[-1] if standing.verdicts else None
    run = standing.last_run
    return wire_compaction.CompactionState(
        id=sample.id,
        automatic=not standing.why_not,
        automatic_reason=standing.why_not,
        target=settings.target,
        enter=policy.enter,
        exit=policy.exit,
        fragmentation_rate=sample.report.fragmentation_rate if sample.fragmentation_known else None,
        decision=last.decision.name.lower() if last else None,
        reason=last.reason if last else "nothing was decided yet",
        running=standing.running,
        undone_runs=state.undone,
        settled=state.undone >= policy.settled_after,
        budget=wire_compaction.CompactionBudget(
            moved_bytes=standing.spent_bytes,
            reserved_bytes=state.reserved_bytes,
            allowance_bytes=state.allowance_bytes,
            left_bytes=standing.budget_bytes,
            written_share=policy.written_share,
            relocation_copies_per_block=policy.relocation_copies_per_block,
        ),
        engine=wire_compaction.EngineMoving(
            asked=status is not None,
            moving=status.moving if status else None,
            relocation=status.relocation if status else None,
            running=status.running if status else None,
            policy=status.policy if status else sample.identity.policy,
            reason=status.reason if status else standing.answer.error,
        ),
        verdicts=[
            wire_compaction.CompactionVerdict(
                since_unix=one.since_unix,
                decision=one.decision.name.lower(),
                acts=one.decision.acts,
                reason=one.reason,
            )
            for one in reversed(standing.verdicts)
        ],
        last_run=wire_compaction.LastCompaction(
            ended_unix=run.ended_unix, asked_by=run.route, run=describe_run(sample.id, run.report)
        )
        if run
        else None,
        plan=plan,
        undone_reason=state.undone_reason,
        next_run_seconds=standing.hold_seconds,
        consumers=list(standing.consumers),
        require_consumer=policy.require_consumer,
        relocation_held=standing.relocation_held,
    )


def audit_record(entry: AuditEntry) -> wire_compaction.AuditRecord:
    """An entry, without the numbers of processes."""
    value = entry.to_json()
    return wire_compaction.AuditRecord(
        time_unix=entry.time_unix,
        route=entry.asker.route,
        access=entry.asker.access,
        address=entry.asker.address,
        action=entry.action,
        engine=entry.engine,
        parameters=value["parameters"],
        outcome=entry.outcome,
        reason=entry.reason,
        seconds=entry.seconds,
        result=value["result"],
    )


def _part(details: Mapping[str, Detail], name: str) -> Mapping[str, Scalar]:
    part = details.get(name)
    return part if isinstance(part, Mapping) else {}


def _integer(value: Detail) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _rate(value: Detail) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
