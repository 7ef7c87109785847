"""Stands in front of everything that reads a body: who may not change anything is refused by the head alone.

Every method but GET, HEAD and OPTIONS counts as a change, whatever the route, so that none can be forgotten. What
passed and what was refused is audited: who, what, when, with what result; never a token.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent import wire
from agent.compaction.audit import Access, Asker, AuditEntry, AuditLog
from agent.log import EventLog
from agent.web.audit_queue import AuditQueue
from agent.web.errors import json_response
from agent.web.security import WriteGuard, is_proxied

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ACTION = "request"  # of an audit entry; what came of a compaction has entries of its own
OUTCOMES = ("allowed", "unauthorized", "forbidden", "limited")
MAX_PATH_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How many requests of one peer are let in: `burst` at once, then `per_second`."""

    changes_burst: int = 256
    changes_per_second: float = 5.0
    refusals_burst: int = 10  # wrong tokens, and changes where there may be none
    refusals_per_second: float = 0.1
    peers: int = 1024  # that are kept apart; beyond these the one that asked least lately starts anew


class Buckets:
    """A token bucket for each peer. Not for several threads."""

    def __init__(self, burst: int, per_second: float, peers: int, clock: Callable[[], float]) -> None:
        self._burst, self._rate, self._peers, self._clock = burst, per_second, peers, clock
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when it was

    def wait_seconds(self, peer: str) -> float:
        """How long until `peer` has one left; 0.0 where it has."""
        left = self._left(peer)
        return 0.0 if left >= 1.0 else (1.0 - left) / self._rate

    def take(self, peer: str) -> None:
        """One less, down to none."""
        self._known[peer] = (max(0.0, self._left(peer) - 1.0), self._clock())
        self._known.move_to_end(peer)
        if len(self._known) > self._peers:
            self._known.popitem(last=False)

    def _left(self, peer: str) -> float:
        left, then = self._known.get(peer, (float(self._burst), self._clock()))
        return min(float(self._burst), left + (self._clock() - then) * self._rate)


class Gate:
    """Decides on requests that change something, counts and audits them. One for an application."""

    def __init__(
        self,
        guard: WriteGuard,
        audit: AuditLog | None = None,
        *,
        limits: GateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or GateLimits()
        self.guard = guard
        self._clock, self._wall = clock, wall
        self._audit = AuditQueue(audit) if audit is not None else None
        self._changes = Buckets(limits.changes_burst, limits.changes_per_second, limits.peers, clock)
        self._refusals = Buckets(limits.refusals_burst, limits.refusals_per_second, limits.peers, clock)
        self._log = EventLog(logging.getLogger("kvatlas.api"))
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def counts(self) -> Mapping[str, int]:
        """Requests by what became of them, of a closed set of words."""
        with self._lock:
            return {outcome: self._counts[outcome] for outcome in OUTCOMES}

    def refusal(
        self, headers: Mapping[str, str], address: str | None
    ) -> tuple[int, wire.ErrorBody, dict[str, str]] | None:
        """Status, body and headers for who is refused; None for who may go on. Counts against the peer's limits."""
        peer = peer_of(address)
        # A peer that has guessed too often is not told whether the next guess is right.
        wait = self._refusals.wait_seconds(peer) or self._changes.wait_seconds(peer)
        if wait > 0.0:
            return self._limited(wait)
        access = self.guard.check(
            headers.get("authorization"), address, headers.get("origin"), proxied=is_proxied(headers)
        )
        if access.allowed:
            self._changes.take(peer)
            return None
        self._refusals.take(peer)
        word, status = ("forbidden", 403) if self.guard.token is None else ("unauthorized", 401)
        more = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return status, wire.ErrorBody(error=word, message=access.message, action=access.action), more

    def _limited(self, wait: float) -> tuple[int, wire.ErrorBody, dict[str, str]]:
        seconds = max(1, round(wait + 0.5))
        body = wire.ErrorBody(
            error="limited",
            message="too many changes, or too many that were refused, from this address",
            action=f"ask again in {seconds} s",
        )
        return 429, body, {"Retry-After": str(seconds)}

    def note(self, outcome: str, entry: AuditEntry | None) -> None:
        """Count what became of a request, and keep the entry on the disk, off this thread."""
        with self._lock:
            self._counts[outcome] += 1
        if entry is not None and self._audit is not None and not self._audit.put(entry):
            # The disk hangs. The log is another way out.
            self._log.event(
                "audit entry not kept",
                level=logging.WARNING,
                route=entry.asker.route,
                address=entry.asker.address,
                outcome=entry.outcome,
            )

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until every entry is on the disk; False where that takes longer."""
        return self._audit is None or self._audit.wait_empty(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Keep what is still to be kept, and take no more."""
        if self._audit is not None:
            self._audit.close(timeout_seconds)

    def entry(self, scope: Scope, outcome: str, reason: str, seconds: float | None, access: Access) -> AuditEntry:
        """What is told of a request: its method and path, and whose it was."""
        path = str(scope.get("path", ""))[:MAX_PATH_CHARACTERS]
        who = Asker(route=f"{scope['method']} {path}", access=access, address=_address(scope))
        return AuditEntry(
            time_unix=self._wall(), asker=who, action=ACTION, engine="", outcome=outcome, reason=reason, seconds=seconds
        )

    def now(self) -> float:
        return self._clock()


class WriteGate:
    """The middleware; see the module."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        gate, began = self._gate, self._gate.now()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = gate.refusal(headers, _address(scope))
        if refused is not None:
            status, body, more = refused
            word = body.error
            # One that is limited was audited as often as the limit allows; the rest is counted.
            entry = None if word == "limited" else gate.entry(scope, word, body.message, None, "none")
            gate.note(word, entry)
            # With its body unread the connection is of no more use, and nobody should send megabytes into it.
            await json_response(body, status, {**more, "Connection": "close"})(scope, receive, send)
            return
        answered = 0

        async def watch(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            access: Access = "loopback" if gate.guard.token is None else "token"
            gate.note("allowed", gate.entry(scope, str(answered or "no answer"), "", gate.now() - began, access))


def gate_families(counts: Mapping[str, int], prefix: str) -> list[Metric]:
    """Requests that would change something, by what became of them."""
    family = CounterMetricFamily(
        f"{prefix}api_changes",
        "Requests that would change something, by what became of them: too many of one address are limited.",
        labels=["outcome"],
    )
    for outcome, count in counts.items():
        family.add_metric([outcome], count)
    return [family]


def peer_of(address: str | None) -> str:
    """By what a peer's requests are counted: its address, or of IPv6 the network that one host has to itself."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return "unknown"
    mapped = getattr(parsed, "ipv4_mapped", None)
    if mapped is not None or parsed.version == 4:
        return str(mapped or parsed)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _address(scope: Scope) -> str | None:
    client = scope.get("client")
    return str(client[0]) if client else None
