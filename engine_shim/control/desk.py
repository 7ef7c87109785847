"""What every engine's control desk does alike: takes what was asked, has it carried out, and answers in any case."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine_shim.compaction.compactor import Compactor
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import CompactRequest, ControlReply, ErrorReply, PlanRequest
from engine_shim.control.replies import limits, plan_reply, report_reply
from engine_shim.errors import ControlRefused


class Desk(ABC):
    """`serve` is for the engine's thread; it answers everything it takes, a run when that has ended."""

    def __init__(self, mailbox: ControlMailbox) -> None:
        self.mailbox = mailbox

    def serve(self) -> None:
        """Carry out what has been asked for since the last call."""
        while self.mailbox.pending():
            ticket = self.mailbox.take()
            if ticket is None:
                return
            reply = self._answer(ticket)
            if reply is not None:
                self.mailbox.answer(ticket, reply)

    @abstractmethod
    def carry_out(self, ticket: ControlTicket) -> ControlReply | None:
        """The reply; None where it comes later. May raise: ControlRefused is told as it is, all else as a fault."""

    def _answer(self, ticket: ControlTicket) -> ControlReply | None:
        try:
            return self.carry_out(ticket)
        except ControlRefused as error:
            return ErrorReply(error=error.error, message=str(error), action="wait for the run to end")
        except Exception as error:  # noqa: BLE001 - a fault in answering must not reach the engine's step
            return _fault(error)

    def compact(self, compactor: Compactor, ticket: ControlTicket, request: CompactRequest | PlanRequest) -> None:
        """Start a run, or say what one would move; the answer comes when it is known."""
        answer = self.mailbox.answer
        if isinstance(request, CompactRequest):
            compactor.start(
                limits(compactor.defaults, request), done=lambda report: answer(ticket, report_reply(report))
            )
        else:
            kept = compactor.mover.keeps_cached
            compactor.dry_run(
                lambda plan: answer(ticket, plan_reply(plan, keeps_cached=kept)),
                target=request.target,
                max_moves=request.max_moves,
                failed=lambda error: answer(ticket, _fault(error)),
            )


def _fault(error: Exception) -> ErrorReply:
    return ErrorReply(error="failed", message=f"{type(error).__name__}: {error}", action="see the engine's log")
