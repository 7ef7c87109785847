"""Serves the control socket beside an allocation map: takes requests, hands them to the engine's thread, replies.

The engine owns a ControlMailbox and looks into it at its step boundaries; everything else happens on one daemon thread
that never waits for the engine and that the engine never waits for. Up to `connections` peers are served, each with one
request at a time and against a deadline. Requests queue in order, the kill switch ahead of all; a second `compact` is
answered `busy` while one is queued or runs. A peer beyond the limit takes the place of one that asks nothing. A run
goes on when its asker has gone, since it is bounded by itself; a request that the engine has not taken yet is then
withdrawn.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine_shim.control.allocator import AllocatorDesk
from engine_shim.control.connection import Connection, busy, encode_or_explain, ended, too_late, turn_away
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    MAX_LINE_BYTES,
    AllocatorRequest,
    CompactRequest,
    ControlReply,
    ErrorReply,
    parse_request,
)
from engine_shim.control.peer import Listener, listen, peer_of, refusal, socket_path
from engine_shim.errors import ControlMalformed, KvatlasError

_READ_BYTES = 16 * 1024
_ACCEPT_PAUSE_SECONDS = 1.0
_MOST_UIDS_LOGGED = 64

_log = logging.getLogger("kvatlas.control")
_servers: weakref.WeakSet[ControlServer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """How much the server takes, and how long it waits."""

    connections: int = 16
    message_seconds: float = 5.0  # for a whole request to arrive, and for a reply to be fetched
    take_seconds: float = 5.0  # for the engine to come to a step boundary
    answer_seconds: float = 5.0  # then for its answer; a run has its own `max_seconds` besides

    def wait_seconds(self, request: object) -> float:
        """How long after it was asked a request has its reply, whatever the engine does."""
        run_seconds = request.max_seconds if isinstance(request, CompactRequest) else 0.0
        return self.take_seconds + self.answer_seconds + run_seconds


class ControlServer:
    """One control socket, from `start` to `close`. In a forked child it is off and its files are closed."""

    def __init__(
        self,
        listener: Listener,
        mailbox: ControlMailbox,
        limits: ControlLimits,
        clock: Callable[[], float],
        allocator: AllocatorDesk,
    ) -> None:
        self.path = listener.path
        self.active = True
        self._listener = listener
        self._mailbox = mailbox
        self._limits = limits
        self._clock = clock
        self._allocator = allocator
        self._connections: list[Connection] = []
        self._compacting: ControlTicket | None = None  # queued, or in the engine's hands until it answers
        self._accept_at = 0.0
        self._refused_uids: set[int] = set()
        self._stop = False
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvatlas-control", daemon=True)

    @classmethod
    def start(
        cls,
        map_path: Path,
        mailbox: ControlMailbox,
        *,
        limits: ControlLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ControlServer:
        """Serve the control socket of this map.

        Raises:
            MapBusy: a live engine listens there.
            ControlUnavailable: no socket can be made in that folder.
        """
        limits = limits or ControlLimits()
        allocator = AllocatorDesk(map_path, mailbox.answer)
        server = cls(listen(socket_path(map_path), limits.connections), mailbox, limits, clock, allocator)
        mailbox.connect(server._ring)
        _servers.add(server)
        server._thread.start()
        return server

    @classmethod
    def offer(cls, map_path: Path, mailbox: ControlMailbox) -> ControlServer | None:
        """As `start`, for engines: where that fails it logs one line and returns None; the engine goes on without."""
        try:
            return cls.start(map_path, mailbox)
        except Exception as error:  # noqa: BLE001 - an engine must start whatever befalls its control socket
            text = str(error) if isinstance(error, KvatlasError) else repr(error)
            _log.warning("this engine offers no control: %s", text)
            return None

    def close(self) -> None:
        """Answer what is open with `unavailable`, and remove the socket. Idempotent; nothing in a forked child."""
        if not self.active:
            return
        self.active = False
        self._stop = True
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)  # it never waits, so this is for a machine that hardly moves

    def _ring(self) -> None:
        with suppress(OSError):  # full: it will be heard anyway; closed: nobody is there to hear
            self._button.send(b"!")

    # The thread

    def _run(self) -> None:
        try:
            while not self._stop:
                self._serve_once()
        except Exception:  # noqa: BLE001 - a fault of ours costs the engine its control socket and nothing else
            _log.exception("the control socket failed; this engine offers no control any more")
        finally:
            self._end()

    def _serve_once(self) -> None:
        now = self._clock()
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if now >= self._accept_at:
            poll.register(self._listener.socket, select.POLLIN)
        by_file = {connection.socket.fileno(): connection for connection in self._connections}
        for file, connection in by_file.items():
            poll.register(file, connection.interest())
        due = [now if connection.ready() else connection.deadline for connection in self._connections]
        if now < self._accept_at:
            due.append(self._accept_at)
        wait = max(0.0, min(due) - now) * 1000 if due else None
        events = poll.poll(wait)
        now = self._clock()
        for file, event in events:
            if file == self._bell.fileno():
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
            elif file == self._listener.socket.fileno():
                self._accept(now)
            else:
                self._serve(by_file[file], event, now)
        for ticket, reply in self._mailbox.answers():
            self._deliver(ticket, reply, now)
        for connection in list(self._connections):
            if connection.ready():
                self._next_request(connection, now)
            elif now >= connection.deadline:
                self._expire(connection, now)

    def _accept(self, now: float) -> None:
        try:
            accepted, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of files, say: the socket stays readable, so that asking again would spin
            _log.warning("a control connection could not be accepted: %s", error.strerror)
            self._accept_at = now + _ACCEPT_PAUSE_SECONDS
            return
        try:
            accepted.setblocking(False)
            refused = self._admit(accepted, now)
        except BaseException:
            accepted.close()
            raise
        if refused is not None:
            turn_away(accepted, refused)

    def _admit(self, accepted: socket.socket, now: float) -> ErrorReply | None:
        """Take the connection on, or say why not."""
        try:
            peer = peer_of(accepted)
        except OSError as error:
            message = f"your credentials cannot be read ({error.strerror})"
            return ErrorReply(error="refused", message=message, action="ask again")
        reason = refusal(peer, own_uid=os.geteuid(), socket_gid=self._listener.current_gid())
        if reason:
            if peer.uid not in self._refused_uids and len(self._refused_uids) < _MOST_UIDS_LOGGED:
                self._refused_uids.add(peer.uid)
                _log.warning("control refused: %s (pid %d); said once for each uid", reason, peer.pid)
            action = "run the agent as the engine's user, as root, or in that group"
            return ErrorReply(error="refused", message=reason, action=action)
        if len(self._connections) >= self._limits.connections and not self._make_room():
            return busy(f"{len(self._connections)} control connections are open", "ask again later")
        self._connections.append(Connection(accepted, peer, now + self._limits.message_seconds))
        return None

    def _make_room(self) -> bool:
        """Give up the connection that has asked nothing for longest, else the one that has left a reply unfetched for
        longest: who connects and does no more must not keep the kill switch out. False where all wait for the engine.
        """
        resting = [one for one in self._connections if one.resting()]
        if not resting:
            return False
        longest = min(resting, key=lambda one: (bool(one.reply), one.deadline))
        self._connections.remove(longest)
        action = "send the request at once; ask again"
        turn_away(longest.socket, busy("others need the connection, and nothing was asked over it", action))
        return True

    def _serve(self, connection: Connection, event: int, now: float) -> None:
        try:
            if connection.reply:
                self._send(connection, now)
            elif connection.ticket is None:
                self._receive(connection, now)
            elif event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                self._drop(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the peer has gone, in whatever way
            self._drop(connection)

    def _receive(self, connection: Connection, now: float) -> None:
        data = connection.socket.recv(min(_READ_BYTES, MAX_LINE_BYTES - len(connection.received)))
        if not data:
            if not connection.received:
                self._drop(connection)
                return
            message = "the message ends without a newline"
            self._fail(connection, "bad_request", message, "send one JSON object a line", now)
            return
        connection.received += data

    def _next_request(self, connection: Connection, now: float) -> None:
        """Act on the first line that was received."""
        end = connection.received.find(b"\n")
        if end < 0:
            message = f"a message has at most {MAX_LINE_BYTES} bytes"
            self._fail(connection, "too_large", message, "ask for less at once", now)
            return
        line = bytes(connection.received[: end + 1])
        del connection.received[: end + 1]
        try:
            request = parse_request(line)
        except ControlMalformed as error:
            action = "run one version of KVAtlas on both sides" if error.error == "unsupported" else "mend the request"
            self._fail(connection, error.error, str(error), action, now, error.field)
            return
        ticket = ControlTicket(request, connection.peer)
        if isinstance(request, AllocatorRequest):
            if not self._allocator.take(ticket):
                self._reply(connection, busy("the allocator is being read", "ask again later"), now)
                return
            connection.ticket, connection.taken, connection.asked_at = ticket, True, now
            connection.deadline = now + self._limits.wait_seconds(request)
            return
        if isinstance(request, CompactRequest) and self._compacting is not None:
            action = "wait for it to end, or switch moving off"
            self._reply(connection, busy("a run is queued or in progress", action), now)
        elif not self._mailbox.offer(ticket):
            self._reply(connection, busy("too many requests wait for the engine", "ask again later"), now)
        else:
            if isinstance(request, CompactRequest):
                self._compacting = ticket
            connection.ticket, connection.taken, connection.asked_at = ticket, False, now
            connection.deadline = now + self._limits.take_seconds

    def _deliver(self, ticket: ControlTicket, reply: ControlReply, now: float) -> None:
        if ticket is self._compacting:
            self._compacting = None
        for connection in list(self._connections):
            if connection.ticket is ticket:
                connection.ticket = None
                self._reply(connection, reply, now)

    def _expire(self, connection: Connection, now: float) -> None:
        ticket = connection.ticket
        if ticket is None:
            if connection.received and not connection.reply:
                message = f"no whole message within {self._limits.message_seconds:g} s"
                self._fail(connection, "too_slow", message, "send the request at once", now)
            else:
                self._drop(connection)
        elif not connection.taken and not self._withdraw(ticket):
            connection.taken = True
            connection.deadline = connection.asked_at + self._limits.wait_seconds(ticket.request)
        else:
            connection.ticket = None
            self._reply(connection, too_late(connection.taken, now - connection.asked_at), now)

    def _withdraw(self, ticket: ControlTicket) -> bool:
        withdrawn = self._mailbox.withdraw(ticket)
        if withdrawn and ticket is self._compacting:
            self._compacting = None
        return withdrawn

    def _fail(
        self, connection: Connection, error: str, message: str, action: str, now: float, field_name: str = ""
    ) -> None:
        """Reply to what is no request; after that nothing else of this connection can be understood."""
        connection.last = True
        self._reply(connection, ErrorReply(error=error, message=message, action=action, field=field_name), now)

    def _reply(self, connection: Connection, reply: ControlReply, now: float) -> None:
        connection.reply = encode_or_explain(reply)
        connection.deadline = now + self._limits.message_seconds
        self._serve(connection, select.POLLOUT, now)

    def _send(self, connection: Connection, now: float) -> None:
        sent = connection.socket.send(connection.reply, socket.MSG_NOSIGNAL)
        connection.reply = connection.reply[sent:]
        if connection.reply:
            return
        if connection.last:
            self._drop(connection)
            return
        connection.deadline = now + self._limits.message_seconds

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        connection.socket.close()
        if connection.ticket is not None:
            self._withdraw(connection.ticket)

    def _end(self) -> None:
        self.active = False
        self._listener.remove()
        self._allocator.close()
        self._mailbox.connect(None)
        for connection in self._connections:
            if connection.ticket is None:
                connection.socket.close()
            else:
                turn_away(connection.socket, ended(taken=not connection.ticket.claim()))
        self._connections.clear()
        for end in (self._listener.socket, self._bell, self._button):
            end.close()

    def forget_in_child(self) -> None:
        """After a fork, in the child: the socket is the parent's. Held open here it would look alive after its end."""
        self.active = False
        self._mailbox.connect(None)
        for end in (self._listener.socket, self._bell, self._button, *(one.socket for one in self._connections)):
            end.close()


def _forget_in_child() -> None:
    for server in list(_servers):
        if server.active:
            server.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
