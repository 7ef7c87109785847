"""What the control socket asks is carried out at step boundaries, within the engine's budgets, and answered once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_shim.compaction.planning import MovePlan
from engine_shim.compaction.run import RunSettings
from engine_shim.control.mailbox import ControlTicket
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    ControlRequest,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
    encode_reply,
)
from engine_shim.control.peer import Peer
from engine_shim.reference.engine import Engine
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]


class Asker:
    """Puts requests into an engine's mailbox, as the server of the socket does."""

    def __init__(self, engine: Engine) -> None:
        self.mailbox = engine.desk.mailbox
        self.answered = threading.Event()
        self.mailbox.connect(self.answered.set)

    def ask(self, request: ControlRequest) -> ControlTicket:
        ticket = ControlTicket(request, Peer(os.getpid(), 0, 0))
        assert self.mailbox.offer(ticket)
        return ticket

    def answers(self) -> list[tuple[ControlTicket, ControlReply]]:
        return list(self.mailbox.answers())


@pytest.fixture
def engine(make_engine: EngineMaker) -> Engine:
    engine = make_engine(blocks=128)
    for index in range(24):
        request = TraceRequest(index, 0.0, 60 + 16 * (index % 3), 120 if index % 2 else 6, (5000 + index,))
        assert engine.submit(sequence_of(request, 16))
    for _ in range(8):
        engine.step()
    return engine


def only(answers: list[tuple[ControlTicket, ControlReply]]) -> Any:
    ((_, reply),) = answers
    encode_reply(reply)  # what is answered can be said over the socket
    return reply


def test_a_run_is_answered_when_it_has_ended(engine: Engine) -> None:
    asker = Asker(engine)
    first = asker.ask(CompactRequest(target=0.0, max_chunk_moves=1, max_step_seconds=1e-9))
    engine.step()
    assert asker.answers() == []
    second = asker.ask(CompactRequest())
    asker.ask(StatusRequest())
    engine.step()
    answers = {ticket.request.op: reply for ticket, reply in asker.answers()}
    assert isinstance(answers["compact"], ErrorReply)
    assert answers["compact"].error == "busy"
    assert isinstance(answers["status"], StatusReply)
    assert answers["status"].running
    for _ in range(300):
        engine.step()
        if replies := asker.answers():
            break
    ((ticket, reply),) = replies
    assert ticket is first
    assert ticket is not second
    assert isinstance(reply, RunReply)
    assert reply.moved_blocks > 0
    assert reply.details["chunks"] == reply.moved_blocks
    encode_reply(reply)


def test_the_kill_switch_ends_a_run_that_was_asked_for(engine: Engine) -> None:
    asker = Asker(engine)
    asker.ask(CompactRequest(target=0.0, max_chunk_moves=1, max_step_seconds=1e-9))
    while not engine.cache.copied_blocks:
        engine.step()
    asker.ask(MovingRequest(on=False))
    engine.step()
    replies = [reply for _, reply in asker.answers()]
    assert replies[0] == SwitchReply(on=False, reason="moving is switched off")
    assert isinstance(replies[1], RunReply)
    assert (replies[1].decision, replies[1].reason) == ("aborted", "moving is switched off")


def test_the_status_tells_how_moving_came_to_be_off(engine: Engine) -> None:
    asker = Asker(engine)

    def off_by() -> tuple[object, object]:
        asker.ask(StatusRequest())
        engine.desk.serve()
        details = only(asker.answers()).details
        return details["moving_off_by"], details["moving_failed"]

    assert off_by() == ("", False)
    engine.compaction.set_moving(False, "started so", at_start=True)
    assert off_by() == ("start", False)
    asker.ask(MovingRequest(on=False))
    engine.desk.serve()
    asker.answers()
    assert off_by() == ("switch", False)
    assert engine.compaction.set_moving(True)
    assert off_by() == ("", False)
    engine.compaction.switch.off("contents differ", failed=True)
    assert off_by() == ("check", True)
    assert not engine.compaction.set_moving(False, "again")
    assert off_by() == ("check", True)  # what came first, and is worse, is told


def test_the_engines_own_budgets_are_not_exceeded(engine: Engine) -> None:
    engine.compaction.defaults = RunSettings(max_moves=3, max_chunk_moves=2, max_step_seconds=1.0, verify=True)
    asker = Asker(engine)
    asker.ask(CompactRequest(target=0.0, max_moves=50, max_chunk_moves=500))
    while not (answers := asker.answers()):
        engine.step()
    reply = only(answers)
    assert reply.moved_blocks == reply.details["verified_blocks"] <= 3


@pytest.mark.parametrize("plan_here", [0, 50_000], ids=["on another thread", "at once"])
def test_a_plan_changes_nothing(plan_here: int, engine: Engine) -> None:
    engine.compaction.defaults = RunSettings(plan_here_blocks=plan_here)
    before = engine.pool.states().tolist()
    asker = Asker(engine)
    asker.ask(PlanRequest(target=0.0))
    engine.desk.serve()
    assert asker.answered.wait(120)
    reply = only(asker.answers())
    assert reply.decision == "planned"
    assert reply.planned_moves > 0
    assert reply.fragmentation_rate_after < reply.fragmentation_rate_before
    assert engine.pool.states().tolist() == before


def test_what_is_kept_is_not_counted_as_lost(engine: Engine) -> None:
    """Neither in a plan nor in a run; the plan alone, which knows no engine, counts what is in the way."""
    for index in range(60):  # until everything that is not in use holds a prefix
        assert engine.submit(sequence_of(TraceRequest(100 + index, 0.0, 70, 20, (9000 + index,)), 16))
    while engine.pool.num_free:
        engine.step()
    plans: list[MovePlan] = []
    engine.compaction.dry_run(plans.append, target=0.0)
    assert plans[0].cached_lost > 0
    asker = Asker(engine)
    cached = engine.pool.num_cached
    for request in (StatusRequest(), PlanRequest(target=0.0), CompactRequest(target=0.0)):
        asker.ask(request)
        engine.desk.serve()
        while not (answers := asker.answers()):
            engine.compaction.step()
        reply = only(answers)
        if isinstance(request, StatusRequest):
            assert reply.details["keeps_cached"] is True
        else:
            assert reply.details["cached_lost"] == 0
    assert reply.moved_blocks > 0
    assert reply.details["cached_lost_predicted"] == 0
    assert engine.pool.num_cached == cached


def test_a_fault_in_answering_is_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("the planner fell over")

    monkeypatch.setattr(engine.compaction, "dry_run", fail)
    asker = Asker(engine)
    asker.ask(PlanRequest())
    assert engine.step()
    reply = only(asker.answers())
    assert isinstance(reply, ErrorReply)
    assert (reply.error, reply.message) == ("failed", "RuntimeError: the planner fell over")
