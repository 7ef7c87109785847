"""One connection of the control socket, and what is said over it where the engine itself says nothing."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from engine_shim.control.mailbox import ControlTicket
from engine_shim.control.messages import MAX_LINE_BYTES, ControlReply, ErrorReply, encode_reply
from engine_shim.control.peer import Peer


@dataclass(eq=False, slots=True)
class Connection:
    """One peer. It is sending a request (no ticket, no reply), waiting (ticket), or fetching (reply)."""

    socket: socket.socket
    peer: Peer
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    reply: bytes = b""
    ticket: ControlTicket | None = None
    asked_at: float = 0.0
    taken: bool = False  # the engine has the ticket
    last: bool = False  # close after this reply

    def ready(self) -> bool:
        """Is there a line to act on, or one that will never be acceptable? The next one waits for this one's reply."""
        whole = len(self.received) >= MAX_LINE_BYTES or b"\n" in self.received
        return whole and not self.reply and self.ticket is None

    def resting(self) -> bool:
        """Does it neither ask nor wait, or not fetch its reply? What has arrived and was not read yet counts."""
        if self.ticket is not None or self.ready():
            return False
        if self.reply:
            return True
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # nothing is there, or the peer has gone
            return True

    def interest(self) -> int:
        """What poll should report; a peer that hung up it always does."""
        if self.reply:
            return select.POLLOUT
        return 0 if self.ticket is not None else select.POLLIN


def busy(message: str, action: str) -> ErrorReply:
    return ErrorReply(error="busy", message=message, action=action)


def too_late(taken: bool, waited_seconds: float) -> ErrorReply:
    """The engine was waited for long enough, to take the request or to answer what it took."""
    if not taken:
        message = f"the engine did not come to take the request within {waited_seconds:.1f} s"
        return ErrorReply(error="unavailable", message=message, action="see whether the engine is stalled")
    message = f"the engine took the request and did not answer it within {waited_seconds:.1f} s"
    action = "it may still be carried out: ask for the status, and see whether the engine is stalled"
    return ErrorReply(error="timeout", message=message, action=action)


def ended(*, taken: bool) -> ErrorReply:
    """The engine ends with the request open."""
    if not taken:
        return ErrorReply(error="unavailable", message="the engine is ending", action="ask again when it has started")
    message = "the engine ended with the request in its hands"
    return ErrorReply(error="timeout", message=message, action="it may have been carried out in part")


def encode_or_explain(reply: ControlReply) -> bytes:
    """The reply as a line; where it cannot be one, a `failed` that says why."""
    try:
        return encode_reply(reply)
    except Exception as error:  # noqa: BLE001 - the reply is the engine's, and may be anything
        message = f"the engine's answer cannot be sent: {str(error)[:1000]}"
        return encode_reply(ErrorReply(error="failed", message=message, action="ask for the status", field=""))


def turn_away(connection: socket.socket, reply: ErrorReply) -> None:
    """One message, as far as the peer's buffer takes it, and goodbye."""
    with suppress(OSError):
        connection.send(encode_or_explain(reply), socket.MSG_NOSIGNAL)
    connection.close()
