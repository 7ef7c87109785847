"""Answers what the control socket asks of the reference engine, at its step boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine_shim.compaction.planning import MovePlan
from engine_shim.compaction.report import CompactionReport
from engine_shim.compaction.run import RunSettings
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    Detail,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    SwitchReply,
)
from engine_shim.errors import ControlRefused, SettingsError
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import SWITCHABLE
from engine_shim.pool.relocation import RelocatingPolicy
from engine_shim.reference.compactor import Compactor


class ControlDesk:
    """One engine's. `serve` is for the engine's thread; it answers everything it takes, a run when that has ended."""

    def __init__(
        self,
        mailbox: ControlMailbox,
        pool: BlockPool,
        compactor: Compactor,
        *,
        set_policy: Callable[[str], None],
    ) -> None:
        """`set_policy` lets the engine go on under another allocation policy; it may raise SettingsError."""
        self.mailbox = mailbox
        self._pool, self._compactor, self._set_policy = pool, compactor, set_policy

    def serve(self) -> None:
        """Carry out what has been asked for since the last call."""
        mailbox = self.mailbox
        while mailbox.pending():
            ticket = mailbox.take()
            if ticket is None:
                return
            reply = self._carry_out(ticket)
            if reply is not None:
                mailbox.answer(ticket, reply)

    def _carry_out(self, ticket: ControlTicket) -> ControlReply | None:
        request = ticket.request
        try:
            if isinstance(request, CompactRequest):
                self._compactor.start(
                    self._limits(request),
                    done=lambda report: self.mailbox.answer(ticket, report_reply(report)),
                )
                return None
            if isinstance(request, PlanRequest):
                self._compactor.dry_run(
                    lambda plan: self.mailbox.answer(ticket, plan_reply(plan)),
                    target=request.target,
                    max_moves=request.max_moves,
                )
                return None
            if isinstance(request, MovingRequest):
                on = self._compactor.set_moving(request.on)
                return SwitchReply(on=on, reason=self._compactor.switch.reason)
            if isinstance(request, RelocationRequest):
                return self._relocate(request.on)
            return self._status()
        except ControlRefused as error:
            return ErrorReply(error=error.error, message=str(error), action="wait for the run to end")
        except Exception as error:  # noqa: BLE001 - a fault in answering must not reach the engine's step
            return ErrorReply(error="failed", message=f"{type(error).__name__}: {error}", action="see the engine's log")

    def _limits(self, request: CompactRequest) -> RunSettings:
        """What was asked for, within the engine's own budgets."""
        own = self._compactor.defaults
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

    def _relocate(self, on: bool) -> ControlReply:
        relocating = RelocatingPolicy.name
        other = next(name for name in SWITCHABLE if name != relocating)
        try:
            self._set_policy(relocating if on else other)
        except SettingsError as error:
            return SwitchReply(on=self._pool.policy == relocating, reason=str(error))
        return SwitchReply(on=self._pool.policy == relocating)

    def _status(self) -> StatusReply:
        switch, report = self._compactor.switch, self._compactor.last_report
        switchable = self._pool.policy in SWITCHABLE
        details: dict[str, Detail] = {"moving_failed": switch.failed, "moving_off_by": switch.off_by or ""}
        if self._compactor.consumer is not None:
            details["consumer"] = type(self._compactor.consumer).__name__
        return StatusReply(
            moving=not switch.reason,
            relocation=self._pool.policy == RelocatingPolicy.name if switchable else None,
            running=self._compactor.active,
            policy=self._pool.policy,
            reason=switch.reason,
            last_report=None if report is None else report_reply(report),
            details=details,
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


def plan_reply(plan: MovePlan) -> RunReply:
    """A plan as the socket says it: nothing is moved, and what is `after` is predicted."""
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
            "cached_lost": plan.cached_lost,
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
