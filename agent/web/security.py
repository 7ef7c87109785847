"""Who may change things: the bearer token, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Access:
    """`allowed`, or the reason and what to do about it."""

    allowed: bool
    message: str = ""
    action: str = ""


PROXIED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
SHORT_TOKEN = 16  # characters; fewer can be guessed, whatever is limited


@dataclass(frozen=True, slots=True)
class WriteGuard:
    """Decides on requests that change something. Reading is open: it is what Prometheus and the dashboard do."""

    token: str | None = field(repr=False)
    listens_on_loopback: bool

    @property
    def enabled(self) -> bool:
        """Can any request that changes something be allowed?"""
        return self.token is not None or self.listens_on_loopback

    def check(
        self, authorization: str | None, peer: str | None, origin: str | None = None, *, proxied: bool = False
    ) -> Access:
        """`authorization` and `origin` are those headers, `peer` the address at the other end; None where absent.

        `proxied`: a proxy says that it stands between, so that the peer is not who asks.
        """
        if self.token is None:
            if origin is not None:
                # Any page that a browser on this machine shows can reach loopback; none of them knows a token.
                return Access(
                    False, f"a web page ({origin}) may not change things without a token", "set KVATLAS_TOKEN"
                )
            if proxied:
                # Whoever it lets in would be this machine; one that adds no header cannot be told.
                what = "what comes through a proxy may not change things without a token"
                return Access(False, what, "set KVATLAS_TOKEN")
            if self.listens_on_loopback and peer is not None and is_loopback(peer):
                return Access(True)
            return Access(
                False,
                "changes are off: the agent listens beyond loopback and has no token",
                "start the agent with KVATLAS_TOKEN or KVATLAS_TOKEN_FILE, and send the token",
            )
        scheme, _, given = (authorization or "").partition(" ")
        # Of digests, so that not even the length of the token can be told from the time that this takes.
        same = hmac.compare_digest(_digest(given.strip()), _digest(self.token))
        if scheme.lower() == "bearer" and same:
            return Access(True)
        return Access(False, "the bearer token is missing or wrong", "send the header 'Authorization: Bearer TOKEN'")


def is_proxied(headers: Iterable[str]) -> bool:
    """Is one of these names of headers one that proxies add?"""
    return any(name.lower() in PROXIED for name in headers)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def is_loopback(host: str) -> bool:
    """Is this name or address of the machine itself? A name other than localhost is not looked up."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
