"""Gets one answer of an engine over HTTP, within a time and a size."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent.engine_metrics.exposition import NotMetrics, parse_exposition, parse_ollama
from agent.engine_metrics.model import Answer
from agent.engine_metrics.sources import MetricsSource
from engine_shim.errors import KvatlasError

FETCH_SECONDS = 3.0
MAX_BYTES = 8 << 20
ACCEPT = "text/plain;version=0.0.4;q=1,application/json;q=0.5,*/*;q=0.1"

Fetch = Callable[[MetricsSource], Answer]


class NoAnswer(KvatlasError):
    """The address gave no usable answer now. Ask again later. The text holds no user and no password."""


def fetch(source: MetricsSource, *, seconds: float = FETCH_SECONDS, max_bytes: int = MAX_BYTES) -> Answer:
    """Ask once. Raises NoAnswer or NotMetrics.

    An engine is a neighbour, so no proxy stands between, and what it says is final: redirects are not followed.
    Compression is not accepted: a small answer could otherwise become a large one.
    """
    import httpx  # here: 10 MB that an agent which asks no engine need not have

    deadline = time.monotonic() + seconds
    body = bytearray()
    try:
        with (
            httpx.Client(trust_env=False, timeout=seconds, follow_redirects=False) as client,
            client.stream("GET", source.url, headers={"accept": ACCEPT, "accept-encoding": "identity"}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise NoAnswer(f"HTTP {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise NoAnswer(f"the answer is {response.headers['content-encoding']}, which was not asked for")
            for piece in response.iter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise NoAnswer(f"the answer is longer than {max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise NoAnswer(f"the answer was not complete within {seconds:g} s")
    except httpx.TimeoutException as error:
        raise NoAnswer(f"no answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(_describe(error)) from error
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise NotMetrics("the answer is not UTF-8") from error
    return parse_ollama(text) if source.is_ollama else parse_exposition(text)


def _describe(error: Exception) -> str:
    """The kind of fault: the library's own texts may repeat the address, with a password in it."""
    import httpx

    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, httpx.RemoteProtocolError):
        return "the answer broke off, or is not HTTP"
    return type(error).__name__
