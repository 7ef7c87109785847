"""What the control socket answers: to requests, to messages that are none, to too many, too slow and gone."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    MAX_LINE_BYTES,
    CompactRequest,
    ControlReply,
    ErrorReply,
    MovingRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
    encode_request,
    parse_reply,
)
from engine_shim.control.peer import Peer
from engine_shim.control.server import _ACCEPT_PAUSE_SECONDS, ControlLimits, ControlServer

if TYPE_CHECKING:
    from tests.engine_shim.control.conftest import Call, Caller, Mailbox, Serve

PATIENCE_SECONDS = 120.0
HASTY = ControlLimits(message_seconds=0.3)
# Long enough for what must still succeed, on a busy machine too.
QUICK = ControlLimits(message_seconds=5.0, take_seconds=3.0, answer_seconds=0.5)
STATUS = StatusReply(moving=True, relocation=None, running=False, policy="vllm", reason="")


def run_reply(decision: str = "reached", **details: Any) -> RunReply:
    return RunReply(
        decision=decision,
        reason="",
        planned_moves=1,
        moved_blocks=1,
        moved_bytes=4096,
        fragmentation_rate_before=0.5,
        fragmentation_rate_after=0.0,
        largest_allocatable_run_before=1,
        largest_allocatable_run_after=2,
        details=details,
    )


def reply_to(caller: Caller, mailbox: Mailbox, answer: Callable[[ControlTicket], ControlReply]) -> ControlReply:
    """What the caller is told, with the test as the engine of everybody's requests until then."""
    told = select.poll()
    told.register(caller.socket, select.POLLIN)
    while True:
        while (ticket := mailbox.take()) is not None:
            mailbox.answer(ticket, answer(ticket))
        if told.poll(20):
            return caller.reply()


# Requests and their answers


def test_an_answer_may_come_later_while_others_are_served(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    runner, other = call(server), call(server)
    runner.say(CompactRequest(target=0.2))
    run = mailbox.next()
    assert run.request == CompactRequest(target=0.2)
    assert run.asker.pid == os.getpid()
    for _ in range(3):
        other.say(StatusRequest())
        mailbox.answer(mailbox.next(), STATUS)
        assert other.reply() == STATUS
    mailbox.answer(run, run_reply(seconds=1.5))
    assert runner.reply() == run_reply(seconds=1.5)
    assert not mailbox.pending()
    assert mailbox.take() is None


def test_a_second_run_is_refused_until_the_first_has_ended(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    first, second = call(server).say(CompactRequest()), call(server)
    assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    assert second.say(CompactRequest()).error().error == "busy"  # the first is queued
    run = mailbox.take()
    assert run is not None
    assert second.say(CompactRequest()).error().error == "busy"  # the first runs
    mailbox.answer(run, run_reply())
    assert first.reply() == run_reply()
    second.say(CompactRequest())
    mailbox.answer(mailbox.next(), run_reply("best"))
    assert second.reply() == run_reply("best")


def test_the_kill_switch_overtakes_what_waits(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    callers = [call(server).say(request) for request in (CompactRequest(), StatusRequest())]
    for _ in callers:
        assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    switch = call(server).say(MovingRequest(on=False))
    first = mailbox.next()
    assert first.request == MovingRequest(on=False)
    mailbox.answer(first, SwitchReply(on=False))
    assert switch.reply() == SwitchReply(on=False)
    rest = [mailbox.take(), mailbox.take()]
    assert {ticket.request.op for ticket in rest if ticket} == {"compact", "status"}


def test_a_connection_serves_many_requests_in_order(serve: Serve, call: Call) -> None:
    """Sent all at once: each waits for the reply to the one before."""
    server, mailbox = serve()
    caller = call(server).say(b"".join(encode_request(MovingRequest(on=bool(i % 2))) for i in range(50)))
    for i in range(50):
        ticket = mailbox.next()
        assert ticket.request == MovingRequest(on=bool(i % 2))
        mailbox.answer(ticket, SwitchReply(on=bool(i % 2), reason=str(i)))
        assert caller.reply() == SwitchReply(on=bool(i % 2), reason=str(i))


def test_many_refusals_at_once_do_not_pile_up(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    call(server).say(CompactRequest())
    mailbox.next()
    line = encode_request(CompactRequest())
    count = 8 * MAX_LINE_BYTES // len(line)
    caller = call(server)
    sender = threading.Thread(target=caller.say, args=(line * count,))
    sender.start()
    assert {caller.error().error for _ in range(count)} == {"busy"}
    sender.join()


def test_a_half_closed_connection_still_gets_its_reply(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    caller = call(server).say(StatusRequest())
    caller.socket.shutdown(socket.SHUT_WR)
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS
    assert caller.is_closed()


def test_an_answer_that_cannot_be_said_is_a_failed_reply(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    caller = call(server)
    for wrong in (run_reply(seconds=float("nan")), run_reply(text="x" * MAX_LINE_BYTES), "no reply at all"):
        caller.say(StatusRequest())
        mailbox.answer(mailbox.next(), wrong)  # type: ignore[arg-type]
        assert caller.error().error == "failed"


def test_a_wake_that_raises_is_said_once_and_costs_nothing(
    map_path: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    queued = threading.Semaphore(0)

    def wake() -> None:
        queued.release()
        raise RuntimeError("no engine to wake")

    mailbox = ControlMailbox(wake)
    server = ControlServer.start(map_path, mailbox)
    try:
        for _ in range(3):
            caller = call(server).say(StatusRequest())
            assert queued.acquire(timeout=PATIENCE_SECONDS)
            ticket = mailbox.take()
            assert ticket is not None
            mailbox.answer(ticket, STATUS)
            assert caller.reply() == STATUS
    finally:
        server.close()
    assert caplog.text.count("could not be woken") == 1


# Messages that are none


@pytest.mark.parametrize(
    ("data", "error", "field"),
    [
        (b"hello\n", "bad_request", ""),
        (b'{"schema":"kvatlas.control/v9","op":"status"}\n', "unsupported", "schema"),
        (b'{"schema":"kvatlas.control/v1","op":"compact","target":"low"}\n', "bad_request", "target"),
        (b'{"schema":"kvatlas.control/v1","op":"compact","target":NaN}\n', "bad_request", ""),
        (b"\n" * 1000, "bad_request", ""),
        (b"[" * (MAX_LINE_BYTES - 1) + b"\n", "bad_request", ""),
        (b"x" * MAX_LINE_BYTES, "too_large", ""),
        (b"x" * (10 * MAX_LINE_BYTES), "too_large", ""),
    ],
)
def test_a_malformed_message_gets_its_error_and_the_end(
    serve: Serve, call: Call, data: bytes, error: str, field: str
) -> None:
    server, mailbox = serve()
    caller = call(server)
    with suppress(BrokenPipeError, ConnectionResetError):  # the end may come before all is sent
        caller.say(data)
    reply = caller.error()
    assert (reply.error, reply.field) == (error, field)
    assert reply.action
    assert caller.is_closed()
    assert mailbox.take() is None
    caller = call(server).say(StatusRequest())
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS


def test_a_message_in_small_pieces_is_a_message(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    caller = call(server)
    for byte in encode_request(StatusRequest()):
        caller.say(bytes([byte]))
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS


def test_a_half_sent_message_is_too_slow(serve: Serve, call: Call) -> None:
    server, _ = serve(HASTY)
    assert call(server).say(b'{"schema":').error().error == "too_slow"


def test_trickling_does_not_move_the_deadline(serve: Serve, call: Call) -> None:
    server, _ = serve(HASTY)
    caller = call(server)
    caller.socket.settimeout(0.05)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            with suppress(BrokenPipeError):  # the end may have come since the last look
                caller.say(b" ")
            assert caller.error().error == "too_slow"
            return
        except TimeoutError:
            continue
    pytest.fail("it was let go on")


def test_a_message_that_ends_halfway_is_told_so(serve: Serve, call: Call) -> None:
    server, _ = serve()
    caller = call(server).say(b'{"schema":')
    caller.socket.shutdown(socket.SHUT_WR)
    assert "without a newline" in caller.error().message
    assert caller.is_closed()


def test_a_silent_connection_is_closed(serve: Serve, call: Call) -> None:
    server, _ = serve(HASTY)
    assert call(server).is_closed()


def test_a_peer_that_does_not_fetch_its_reply_is_left(serve: Serve, call: Call) -> None:
    """Its buffer is full of replies; the next peer is served all the same."""
    server, mailbox = serve(ControlLimits(message_seconds=1.5))
    greedy = call(server)
    greedy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    greedy.socket.settimeout(0.01)
    big = run_reply(text="x" * 60_000)
    closed = False
    while not closed:
        try:
            greedy.say(StatusRequest())
        except TimeoutError:
            continue
        except OSError:
            closed = True
        while (ticket := mailbox.take()) is not None:
            mailbox.answer(ticket, big)
    caller = call(server).say(StatusRequest())
    while (ticket := mailbox.take()) is None:
        assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    mailbox.answer(ticket, STATUS)
    assert caller.reply() == STATUS


# Too many, too late, gone


def test_connections_beyond_the_limit_are_told_so(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    callers = [call(server).say(StatusRequest()) for _ in range(16)]
    tickets = [mailbox.next() for _ in callers]  # all sixteen wait for the engine
    turned_away = call(server)
    assert turned_away.error().error == "busy"
    assert turned_away.is_closed()
    for ticket in tickets:
        mailbox.answer(ticket, STATUS)
    assert [caller.reply() for caller in callers] == [STATUS] * 16
    latecomer = call(server).say(StatusRequest())
    mailbox.answer(mailbox.next(), STATUS)
    assert latecomer.reply() == STATUS


def idle_peer(server: ControlServer, call: Call) -> Caller:
    return call(server)


def trickling_peer(server: ControlServer, call: Call) -> Caller:
    return call(server).say(b'{"schema"')


@pytest.mark.parametrize("hold", [idle_peer, trickling_peer])
def test_peers_that_ask_nothing_do_not_keep_the_kill_switch_out(
    serve: Serve, call: Call, hold: Callable[[ControlServer, Call], Caller]
) -> None:
    """Nor do they cost their places those who ask, or who wait for the engine."""
    server, mailbox = serve()
    waiting = call(server).say(CompactRequest())
    run = mailbox.next()
    held = [hold(server, call) for _ in range(40)]
    switch = call(server).say(MovingRequest(on=False))
    mailbox.answer(mailbox.next(), SwitchReply(on=False))
    assert switch.reply() == SwitchReply(on=False)
    assert held[0].error().error == "busy"  # the one that has held its place for longest
    assert held[0].is_closed()
    mailbox.answer(run, run_reply())
    assert waiting.reply() == run_reply()
    held[-1].socket.close()


def test_a_peer_that_does_not_fetch_its_replies_makes_room(serve: Serve, call: Call) -> None:
    server, mailbox = serve(ControlLimits(connections=1, message_seconds=600.0))
    greedy = call(server)
    text, answered = "x" * 60_000, []
    more = greedy.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // len(text) + 10  # than its buffer takes
    greedy.say(encode_request(StatusRequest()) * more)

    def answer(ticket: ControlTicket) -> ControlReply:
        if isinstance(ticket.request, MovingRequest):
            return SwitchReply(on=False)
        answered.append(ticket)
        return run_reply(text=text)

    reply: ControlReply = ErrorReply(error="busy", message="", action="")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while isinstance(reply, ErrorReply):  # as long as the greedy one waits for the engine
        assert reply.error == "busy"
        assert time.monotonic() < deadline
        switch = call(server)
        with suppress(BrokenPipeError):
            switch.say(MovingRequest(on=False))
        reply = reply_to(switch, mailbox, answer)
        switch.socket.close()
    assert reply == SwitchReply(on=False)
    assert 0 < len(answered) < more


def test_a_flood_of_connections_passes(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    for _ in range(300):
        call(server).socket.close()
    reply: ControlReply = ErrorReply(error="busy", message="", action="")
    while isinstance(reply, ErrorReply):  # as long as the closed ones have not all been noticed
        caller = call(server)
        with suppress(BrokenPipeError):
            caller.say(StatusRequest())
        reply = reply_to(caller, mailbox, lambda _: STATUS)
    assert reply == STATUS


def test_the_queue_is_bounded(serve: Serve, call: Call) -> None:
    server, mailbox = serve(max_queued=2)
    waiting = [call(server).say(StatusRequest()) for _ in range(2)]
    for _ in waiting:
        assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    assert call(server).say(StatusRequest()).error().error == "busy"


def test_what_nobody_takes_is_unavailable_and_never_carried_out(serve: Serve, call: Call) -> None:
    server, mailbox = serve(QUICK)
    caller = call(server).say(CompactRequest())
    error = caller.error()
    assert error.error == "unavailable"
    assert "did not come" in error.message
    assert mailbox.take() is None
    assert not mailbox.pending()
    mailbox.awake.acquire()
    caller.say(CompactRequest())  # the slot for a run is free again
    mailbox.answer(mailbox.next(), run_reply())
    assert caller.reply() == run_reply()


def test_what_is_taken_and_not_answered_is_a_timeout_and_stays_busy(serve: Serve, call: Call) -> None:
    server, mailbox = serve(QUICK)
    caller = call(server).say(CompactRequest(max_seconds=0.1))
    run = mailbox.next()
    error = caller.error()
    assert error.error == "timeout"
    assert "status" in error.action
    second = call(server)
    assert second.say(CompactRequest()).error().error == "busy"  # for all we know it still runs
    mailbox.answer(run, run_reply())
    second = call(server).say(CompactRequest())
    mailbox.answer(mailbox.next(), run_reply("best"))
    assert second.reply() == run_reply("best")  # not the late one


def test_a_request_whose_asker_has_gone_is_withdrawn(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    gone, stays = call(server).say(CompactRequest()), call(server)
    assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    gone.socket.close()
    stays.say(CompactRequest())  # handled behind the close, so the slot is free again
    assert mailbox.next().asker.pid == os.getpid()
    assert mailbox.take() is None


def test_a_run_goes_on_when_its_asker_has_gone(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    gone, stays = call(server).say(CompactRequest()), call(server)
    run = mailbox.next()
    gone.socket.close()
    assert stays.say(CompactRequest()).error().error == "busy"
    mailbox.answer(run, run_reply())
    mailbox.answer(run, run_reply())  # twice does no harm
    stays.say(CompactRequest())
    assert mailbox.next() is not run


def test_the_server_outlasts_a_lack_of_file_descriptors(
    serve: Serve, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    server, mailbox = serve()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before, began = resource.getrlimit(resource.RLIMIT_NOFILE), time.monotonic()
    # A socket takes the lowest free number, so that none is left below this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno() + 1, before[1]))
    try:
        peer.settimeout(PATIENCE_SECONDS)
        peer.connect(str(server.path))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "could not be accepted" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    tries = (time.monotonic() - began) / _ACCEPT_PAUSE_SECONDS
    assert 1 <= caplog.text.count("could not be accepted") <= 1 + tries
    peer.sendall(encode_request(StatusRequest()))
    mailbox.answer(mailbox.next(), STATUS)
    assert parse_reply(peer.recv(65536)) == STATUS
    peer.close()


# The mailbox alone


def test_a_mailbox_without_a_server_is_empty_and_takes_any_answer() -> None:
    mailbox = ControlMailbox()
    assert not mailbox.pending()
    assert mailbox.take() is None
    ticket = ControlTicket(StatusRequest(), Peer(1, 1, 1))
    for _ in range(1000):
        mailbox.answer(ticket, STATUS)
    assert len(list(mailbox.answers())) <= 64


def test_taken_and_withdrawn_exclude_each_other() -> None:
    """Two threads race for each ticket; exactly one of them has it."""
    mailbox = ControlMailbox(max_queued=10_000)
    tickets = [ControlTicket(StatusRequest(), Peer(1, 1, 1)) for _ in range(10_000)]
    for ticket in tickets:
        assert mailbox.offer(ticket)
    withdrawn: list[ControlTicket] = []
    racer = threading.Thread(target=lambda: withdrawn.extend(one for one in reversed(tickets) if mailbox.withdraw(one)))
    racer.start()
    taken = []
    while (found := mailbox.take()) is not None:
        taken.append(found)
    racer.join()
    assert len(taken) + len(withdrawn) == len(tickets)
    assert not set(map(id, taken)) & set(map(id, withdrawn))
    assert mailbox.take() is None


def test_a_fault_of_the_server_costs_the_engine_nothing_else(
    serve: Serve, call: Call, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, mailbox = serve()
    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr("engine_shim.control.server.peer_of", lambda connection: 1 // 0)
        caller = call(server)
        assert caller.is_closed()
        server._thread.join(PATIENCE_SECONDS)
    assert "offers no control any more" in caplog.text
    assert not server.path.exists()
    assert not server.active
    assert mailbox.take() is None
