"""Answers what the control socket asks of the reference engine, at its step boundaries."""

from __future__ import annotations

from collections.abc import Callable

from engine_shim.compaction.compactor import Compactor
from engine_shim.control.desk import Desk
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    Detail,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    StatusReply,
    SwitchReply,
    TurnOffRequest,
)
from engine_shim.control.replies import report_reply
from engine_shim.errors import SettingsError
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import SWITCHABLE
from engine_shim.pool.relocation import RelocatingPolicy


class ControlDesk(Desk):
    """One engine's."""

    def __init__(
        self,
        mailbox: ControlMailbox,
        pool: BlockPool,
        compactor: Compactor,
        *,
        set_policy: Callable[[str], None],
    ) -> None:
        """`set_policy` lets the engine go on under another allocation policy; it may raise SettingsError."""
        super().__init__(mailbox)
        self._pool, self._compactor, self._set_policy = pool, compactor, set_policy

    def carry_out(self, ticket: ControlTicket) -> ControlReply | None:
        request = ticket.request
        if isinstance(request, CompactRequest | PlanRequest):
            self.compact(self._compactor, ticket, request)
            return None
        if isinstance(request, MovingRequest):
            on = self._compactor.set_moving(request.on)
            return SwitchReply(on=on, reason=self._compactor.switch.reason)
        if isinstance(request, RelocationRequest):
            return self._relocate(request.on)
        if isinstance(request, TurnOffRequest):
            message = "the map is a part of this engine"
            return ErrorReply(error="refused", message=message, action="end the engine itself")
        return self._status()

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
        details: dict[str, Detail] = {
            "moving_failed": switch.failed,
            "moving_off_by": switch.off_by or "",
            "keeps_cached": self._compactor.mover.keeps_cached,
        }
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
