"""What a vLLM engine core without compaction says of itself, and what an agent makes of that."""

from __future__ import annotations

from typing import Any

from agent.compaction.record import Answer, PoolRecord
from engine_shim.adapters.vllm.control_desk import ControlDesk
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import StatusReply, StatusRequest
from engine_shim.control.peer import Peer


def status_without_compaction() -> StatusReply:
    mailbox = ControlMailbox()
    wanted: Any = dict.fromkeys(("relocate", "turn_off"), lambda _: None)
    desk = ControlDesk(
        mailbox, relocator=None, no_relocation="none", compactor=None, no_compaction="not started with it", **wanted
    )
    assert mailbox.offer(ControlTicket(StatusRequest(), Peer(pid=1, uid=0, gid=0)))
    desk.serve()
    ((_, reply),) = mailbox.answers()
    assert isinstance(reply, StatusReply)
    return reply


def test_moves_that_were_off_from_the_start_are_nobody_s_kill_switch() -> None:
    """Else the agent would leave relocation alone, too, where vLLM was started for it."""
    status = status_without_compaction()
    assert (status.moving, status.reason) == (False, "not started with it")
    record = PoolRecord("engine", 1)
    record.take_answer(Answer(0.0, status))
    assert record.stopped == ""
