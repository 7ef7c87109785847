"""What an engine answers over the control socket about plans and runs, and the budgets it keeps a request to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine_shim.compaction.planning import MovePlan
from engine_shim.compaction.report import CompactionReport
from engine_shim.compaction.run import RunSettings
from engine_shim.control.messages import CompactRequest, Detail, RunReply


def limits(own: RunSettings, request: CompactRequest) -> RunSettings:
    """What was asked for, within the engine's own budgets."""
    return replace(
        own,
        target=request.target,
        max_moves=_tighter(own.max_moves, request.max_moves),
        max_chunk_moves=min(own.max_chunk_moves, request.max_chunk_moves or own.max_chunk_moves),
        max_chunk_bytes=min(own.max_chunk_bytes, request.max_chunk_bytes or own.max_chunk_bytes),
        max_step_seconds=min(own.max_step_seconds, request.max_step_seconds or own.max_step_seconds),
        max_seconds=request.max_seconds,
        verify=own.verify or request.verify,
    )


def report_reply(report: CompactionReport) -> RunReply:
    """A run's report as the socket says it; `decision` is its outcome."""
    return RunReply(
        decision=report.outcome.value,
        reason=report.reason,
        planned_moves=report.planned_moves,
        moved_blocks=report.moved_blocks,
        moved_bytes=report.moved_bytes,
        fragmentation_rate_before=report.before.fragmentation,
        fragmentation_rate_after=report.after.fragmentation,
        largest_allocatable_run_before=report.before.largest_run,
        largest_allocatable_run_after=report.after.largest_run,
        details=_details(report),
    )


def plan_reply(plan: MovePlan, *, keeps_cached: bool = False) -> RunReply:
    """A plan as the socket says it: nothing is moved, and what is `after` is predicted. `keeps_cached` as a Mover says
    it: whether prefixes in the way would be kept."""
    return RunReply(
        decision="planned",
        reason=plan.reason,
        planned_moves=len(plan.moves),
        moved_blocks=0,
        moved_bytes=0,
        fragmentation_rate_before=plan.fragmentation_before,
        fragmentation_rate_after=plan.fragmentation_after,
        largest_allocatable_run_before=plan.largest_run_before,
        largest_allocatable_run_after=plan.largest_run_after,
        details={
            "cached_lost": 0 if keeps_cached else plan.cached_lost,
            "reachable": plan.reachable,
            "limited": plan.limited,
            "sequence_runs_before": plan.runs_before,
            "sequence_runs_after": plan.runs_after,
        },
    )


_IN_REPLY = ("outcome", "reason", "planned_moves", "moved_blocks", "moved_bytes")


def _details(report: CompactionReport) -> Mapping[str, Detail]:
    """Everything in a report that the reply has no field of its own for."""
    return {key: value for key, value in report.to_json().items() if key not in _IN_REPLY}


def _tighter(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given, default=None)
