"""What a sink is: it sends one notice once, and says what came of it. Trying again is the courier's business."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol
from urllib.parse import quote, urlsplit

from alerts.grouping import Cadence
from alerts.notice import Notice


class Reason(StrEnum):
    """Why a notice was not delivered: a closed set, fit for logs and labels. Never holds what a receiver said."""

    NONE = ""
    UNREACHABLE = "unreachable"  # no connection: name, route, refused, TLS
    TIMEOUT = "timeout"
    BROKEN = "connection_broken"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    PROXY = "proxy_error"
    REDIRECTED = "redirected"
    NOT_A_RECEIVER = "not_a_receiver"  # it said yes, but not as such a receiver does: a login page of a proxy
    INVALID_MESSAGE = "invalid_message"
    FORBIDDEN = "forbidden"
    GONE = "gone"  # no such webhook, channel or interface any more
    REJECTED = "rejected"
    FAULT = "fault"  # of our own


@dataclass(frozen=True, slots=True)
class Sent:
    """Delivered."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Another attempt may help, after `after_seconds` where the receiver named a time."""

    reason: Reason
    after_seconds: float | None = None
    status: int | None = None  # of HTTP


@dataclass(frozen=True, slots=True)
class Shrink:
    """Refused for its form; as short plain text it may pass."""

    reason: Reason
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Permanent:
    """No attempt can help until somebody changes something."""

    reason: Reason
    status: int | None = None


_BREAKING: Final = {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {0x0A}
_TURNING: Final = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_UNWANTED: Final = dict.fromkeys(_BREAKING, " ") | dict.fromkeys(_TURNING, "")

Outcome = Sent | Retry | Shrink | Permanent


class Sink(Protocol):
    """One receiver. `send` waits for it, so each sink has a thread of its own."""

    @property
    def name(self) -> str: ...

    @property
    def cadence(self) -> Cadence: ...

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        """Once. `plain` asks for the shortest and simplest form."""


def clean(text: str) -> str:
    """Without what JSON receivers choke on, lone surrogates and control characters other than the line feed, and
    without what makes a text read otherwise than it is written, which are marks of direction."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_UNWANTED)


def safe_url(url: str | None) -> str | None:
    """The URL, quoted where it needs to be; None where it is none that a browser should open."""
    if not url:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    return quote(clean(url), safe="%/:=&?~#+!$,;'@()*[]-._")
