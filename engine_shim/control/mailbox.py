"""Between the thread that serves the control socket and the engine's own: requests in, answers out, nobody waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine_shim.control.messages import ControlReply, ControlRequest, MovingRequest, TurnOffRequest
from engine_shim.control.peer import Peer

MAX_QUEUED = 16

_log = logging.getLogger("kvatlas.control")


@dataclass(eq=False, slots=True)
class ControlTicket:
    """One request on its way: the engine that takes it answers it once, at any later time."""

    request: ControlRequest
    asker: Peer
    # Taken by whoever comes first, the engine or the server that withdraws the request: acquiring without waiting is
    # atomic, so that nothing is carried out after its asker was told that it will not be.
    _claim: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def claim(self) -> bool:
        """True for the first who asks."""
        return self._claim.acquire(blocking=False)


class ControlMailbox:
    """Where the engine finds what it was asked for. All calls return at once, none raises, and nothing in it grows.

    The engine calls `pending` wherever it likes (two truth tests), and at a step boundary `take` and, then or steps
    later, `answer`. `wake` is called on another thread whenever there is something to take: it should rouse an idle
    engine, and do no more. The queues are deques, whose ends are safe to use from two threads without a lock.
    """

    def __init__(self, wake: Callable[[], None] | None = None, *, max_queued: int = MAX_QUEUED) -> None:
        self._wake = wake
        self._max_queued = max_queued
        self._urgent: deque[ControlTicket] = deque()
        self._waiting: deque[ControlTicket] = deque()
        self._answers: deque[tuple[ControlTicket, ControlReply]] = deque(maxlen=4 * max_queued)
        self._ring: Callable[[], None] | None = None
        self._wake_failed = False

    def pending(self) -> bool:
        """Is there something to take? False positives are possible, misses are not."""
        return bool(self._urgent) or bool(self._waiting)

    def take(self) -> ControlTicket | None:
        """The next request, now the caller's to answer: the kill switches first, all others in order."""
        for queue in (self._urgent, self._waiting):
            while queue:
                try:
                    ticket = queue.popleft()
                except IndexError:  # the server withdrew the last one in between
                    break
                if ticket.claim():
                    return ticket
        return None

    def answer(self, ticket: ControlTicket, reply: ControlReply) -> None:
        """Say what came of it. Dropped where the asker has gone, was answered, or waited too long."""
        self._answers.append((ticket, reply))
        ring = self._ring
        if ring is not None:
            ring()

    # What follows is the server's side.

    def connect(self, ring: Callable[[], None] | None) -> None:
        """`ring` is called after each answer; None turns the mailbox off and empties it."""
        self._ring = ring
        if ring is None:
            for queue in (self._urgent, self._waiting, self._answers):
                queue.clear()

    def offer(self, ticket: ControlTicket) -> bool:
        """Queue a request and wake the engine; False where too many wait already."""
        if len(self._urgent) + len(self._waiting) >= self._max_queued:
            return False
        urgent = isinstance(ticket.request, MovingRequest | TurnOffRequest)
        (self._urgent if urgent else self._waiting).append(ticket)
        if self._wake is not None:
            try:
                self._wake()
            except Exception as error:  # noqa: BLE001 - the engine's own function; it still finds the request when it looks
                if not self._wake_failed:
                    _log.warning("the engine could not be woken for a control request: %r", error)
                self._wake_failed = True
        return True

    def withdraw(self, ticket: ControlTicket) -> bool:
        """Take a request back; False where the engine has it already."""
        if not ticket.claim():
            return False
        for queue in (self._urgent, self._waiting):
            try:
                queue.remove(ticket)
            except (ValueError, IndexError):  # not in this one, or the engine takes from it just now and will skip it
                continue
        return True

    def answers(self) -> Iterator[tuple[ControlTicket, ControlReply]]:
        """What was answered since the last call."""
        while self._answers:
            yield self._answers.popleft()
