"""One POST to one receiver: through its own proxy or none, within a time, following nobody, and saying no address.

httpx's transport is used without its client, which would log every URL.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from alerts.backoff import parse_retry_after
from alerts.errors import AlertsConfigError, AlertsError
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink
from alerts.sinks.secret_url import SecretUrl

TIMEOUT_SECONDS: Final = 10.0
MOST_REPLY_BYTES: Final = 65_536
Proxy = Literal["environment", "none"] | SecretUrl
_KNOWN_FAILURES: Final[tuple[tuple[type[Exception], Reason], ...]] = (
    (httpx.TimeoutException, Reason.TIMEOUT),
    (httpx.ProxyError, Reason.PROXY),
    (httpx.ConnectError, Reason.UNREACHABLE),
    (httpx.TransportError, Reason.BROKEN),
)


class Unanswered(AlertsError):
    """No reply. `reason` says why, and nothing else does: texts of libraries may hold the URL."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reply:
    """What a receiver answered; of a long body, the beginning."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def asked_seconds(self, now_unix: float) -> float | None:
        """How long the receiver wants to be left alone."""
        return parse_retry_after(self.headers.get("retry-after"), now_unix)


class Poster:
    """Posts to one URL, on a new connection each time: one that was kept open may break just as it is used, and then
    nobody knows whether a message arrived."""

    def __init__(
        self,
        url: SecretUrl,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        proxy: Proxy = "environment",
        what: str = "the receiver",
    ) -> None:
        """`timeout_seconds` is for all of it, except that a look-up of the name ends when the system says so.

        Raises AlertsConfigError.
        """
        self.url = url
        self._timeout_seconds = timeout_seconds
        # At DEBUG it writes the headers of answers, and a redirect's holds the URL.
        logging.getLogger("httpcore").setLevel(logging.INFO)
        self._authorization = _authorization(url)
        try:
            _ = httpx.URL(url.reveal()).host  # which httpx decodes for each request
            url.host.encode("idna")  # as the look-up of the name will have it
        except (httpx.InvalidURL, ValueError):
            raise AlertsConfigError(
                f"the address of {what} holds a host that cannot be; give https://HOST/PATH"
            ) from None
        try:
            self._proxy = _proxy_for(url, proxy)
            self._context = httpx.create_ssl_context()
            self._transport().close()
        except (ValueError, ImportError):  # ImportError: a SOCKS proxy needs a package that is not ours
            raise AlertsConfigError(
                f"the proxy for {what} is of no kind that can be used; give http://HOST:PORT"
            ) from None
        except OSError as error:
            raise AlertsConfigError(
                f"certificates for {what} cannot be read: {error.strerror}; see SSL_CERT_FILE"
            ) from None

    def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Raises Unanswered."""
        transport = self._transport()
        deadline = _Deadline(self._timeout_seconds)
        request = httpx.Request(
            "POST",
            self.url.reveal(),
            content=body,
            headers={**self._authorization, **headers, "Connection": "close", "Accept-Encoding": "identity"},
            extensions={"timeout": httpx.Timeout(self._timeout_seconds).as_dict(), "trace": deadline.trace},
        )
        try:
            with deadline:
                response = transport.handle_request(request)
                try:
                    return Reply(response.status_code, _headers(response), _body(response))
                finally:
                    response.close()
        except httpx.TransportError as error:
            reason = next(reason for kind, reason in _KNOWN_FAILURES if isinstance(error, kind))
            raise Unanswered(Reason.TIMEOUT if deadline.expired else reason) from None
        except (httpx.StreamError, httpx.InvalidURL, OSError, ValueError):
            raise Unanswered(Reason.TIMEOUT if deadline.expired else Reason.BROKEN) from None
        finally:
            with suppress(Exception):  # a connection that will not close is of no more use anyway
                transport.close()

    def _transport(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(verify=self._context, trust_env=False, proxy=self._proxy, retries=0)


class _Deadline:
    """Cuts the connection when the time is up: timeouts of a library start anew with each byte that drips in."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore calls it with each step of the exchange."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.expired:
                self._cut()

    def _cut(self) -> None:
        self.expired = True
        if self._socket is not None:
            with suppress(OSError):  # it ended by itself
                # Not closed: another thread reads from it, and its number would soon be another connection's.
                self._socket.shutdown(socket.SHUT_RDWR)


def is_page(reply: Reply) -> bool:
    """Whether it is markup, as the login page is that some proxy puts in the place of a receiver's answer."""
    return reply.text.lstrip("\ufeff \t\r\n").startswith("<")


def classify(reply: Reply, wall: Callable[[], float] = time.time) -> Outcome:
    """What an HTTP status means for a notice, the same for every receiver (RFC 9110)."""
    status = reply.status
    if 200 <= status < 300:
        return Sent()
    if status == 429:
        return Retry(Reason.RATE_LIMITED, reply.asked_seconds(wall()), status)
    if status >= 500 or status in (408, 425):
        return Retry(Reason.SERVER_ERROR, reply.asked_seconds(wall()), status)
    if 300 <= status < 400:
        return Retry(Reason.REDIRECTED, None, status)  # a proxy's login page, most of the time
    if status in (400, 413, 422):
        return Shrink(Reason.INVALID_MESSAGE, status)
    if status in (401, 403):
        return Permanent(Reason.FORBIDDEN, status)
    if status in (404, 410):
        return Permanent(Reason.GONE, status)
    if status == 407:
        return Retry(Reason.PROXY, None, status)
    return Permanent(Reason.REJECTED, status)


def _proxy_for(url: SecretUrl, proxy: Proxy) -> httpx.Proxy | None:
    if proxy == "none":
        return None
    if isinstance(proxy, SecretUrl):
        return httpx.Proxy(proxy.reveal())
    # As urllib reads the environment, with NO_PROXY.
    named = None if proxy_bypass(url.host) else getproxies().get(url.scheme)
    if not named:
        return None
    return httpx.Proxy(named if "://" in named else f"http://{named}")


def _authorization(url: SecretUrl) -> dict[str, str]:
    """Of https://USER:PASSWORD@HOST/."""
    parts = urlsplit(url.reveal())
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _headers(response: httpx.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) >= MOST_REPLY_BYTES:
            break
    return bytes(body[:MOST_REPLY_BYTES])
