"""HTTP connections that are bounded: idle ones make room, and one that asks for nothing is closed."""

from __future__ import annotations

import asyncio
import socket
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_REQUEST_SECONDS = 10.0
# In one round of the event loop. Those that are too many are closed some rounds later, and each has a file till then.
ACCEPTED_AT_ONCE = 4
BACKLOG = 128  # that wait in the kernel


class BoundedServer(uvicorn.Server):
    """A server whose event loop accepts few connections at once; give it ACCEPTED_AT_ONCE as its `backlog`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)  # the event loop has made that one number both, and a burst must not be turned away


def bounded_protocol(most: int, first_request_seconds: float = FIRST_REQUEST_SECONDS) -> type[H11Protocol]:
    """A protocol class for one server, which holds at most `most` connections.

    The server itself bounds only requests, and times out only connections that have had an answer: those that never
    ask would pile up until no file can be opened any more, theirs or ours.
    """

    class Bounded(BoundedProtocol):
        limit = most
        patience_seconds = first_request_seconds

    return Bounded


class BoundedProtocol(H11Protocol):
    """One connection; see `bounded_protocol`."""

    limit: ClassVar[int]
    patience_seconds: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._asked = self.loop.time()
        self._waiting = self.loop.call_later(self.patience_seconds, self._close_unless_asked)
        if len(self.connections) > self.limit:
            idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_idle]
            # Itself where all others are being answered; else who asked for something longest ago.
            min(idle, key=lambda one: one._asked).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._asked = self.loop.time()
            self._waiting.cancel()

    @property
    def is_idle(self) -> bool:
        """Is nothing being answered?"""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def _close_unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.close()
