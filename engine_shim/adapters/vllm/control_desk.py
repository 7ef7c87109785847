"""Answers what the control socket asks of one vLLM engine core, on the core's own thread, between two steps."""

from __future__ import annotations

from collections.abc import Callable

from engine_shim.adapters.vllm.compaction import action_for
from engine_shim.adapters.vllm.relocator import Relocator
from engine_shim.compaction.compactor import Compactor
from engine_shim.compaction.mover import OffBy
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


class ControlDesk(Desk):
    """One engine core's. Without a relocator or a compactor, what needs one is refused with the reason given."""

    def __init__(
        self,
        mailbox: ControlMailbox,
        *,
        relocator: Relocator | None,
        no_relocation: str,
        compactor: Compactor | None,
        no_compaction: str,
        relocate: Callable[[bool], None],
        turn_off: Callable[[str], None],
    ) -> None:
        super().__init__(mailbox)
        self._relocator, self._no_relocation, self._relocate = relocator, no_relocation, relocate
        self._compactor, self._no_compaction = compactor, no_compaction
        self._turn_off = turn_off

    def carry_out(self, ticket: ControlTicket) -> ControlReply | None:
        request = ticket.request
        if isinstance(request, RelocationRequest):
            return self._switch_relocation(request.on)
        if isinstance(request, MovingRequest):
            return self._switch_moving(request.on)
        if isinstance(request, TurnOffRequest):
            reason = request.reason or "asked for over the control socket"
            self._turn_off(reason)
            return SwitchReply(on=False, reason=reason)
        if isinstance(request, CompactRequest | PlanRequest):
            if self._compactor is None:
                return ErrorReply(error="refused", message=self._no_compaction, action=action_for(self._no_compaction))
            self.compact(self._compactor, ticket, request)
            return None
        return self._status()

    def _switch_moving(self, on: bool) -> SwitchReply:
        if self._compactor is None:
            return SwitchReply(on=False, reason=self._no_compaction)
        return SwitchReply(on=self._compactor.set_moving(on), reason=self._compactor.switch.reason)

    def _switch_relocation(self, on: bool) -> SwitchReply:
        if self._relocator is None:
            return SwitchReply(on=False, reason=self._no_relocation)
        self._relocate(on)
        return SwitchReply(on=self._relocator.on, reason=self._relocator.reason)

    def _status(self) -> StatusReply:
        relocator, compactor = self._relocator, self._compactor
        relocates = relocator is not None and relocator.on
        # Moves are off since the start, by nobody's switch: an agent may let blocks relocate all the same.
        details: dict[str, Detail] = {"moving_off_by": OffBy.START.value}
        moving, reason = False, self._no_compaction
        if compactor is not None:
            switch = compactor.switch
            reason = switch.reason or compactor.mover.refusal()
            moving = not reason
            details = {
                "moving_failed": switch.failed,
                "moving_off_by": switch.off_by or "",
                "keeps_cached": compactor.mover.keeps_cached,
            }
        if relocator is None or relocator.reason:
            details["relocation_reason"] = self._no_relocation if relocator is None else relocator.reason
        return StatusReply(
            moving=moving,
            relocation=None if relocator is None or relocator.reason else relocates,
            running=compactor is not None and compactor.active,
            policy="relocating" if relocates else "vllm",
            reason=reason,
            last_report=None
            if compactor is None or compactor.last_report is None
            else report_reply(compactor.last_report),
            details=details,
        )
