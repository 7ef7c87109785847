"""Where engines' own metrics are to be had: addresses as the operator gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit, urlunsplit

MAX_SOURCES = 64
METRICS_PATH = "/metrics"
OLLAMA_PATH = "/api/ps"


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """One address. `name` is what the agent calls it: without user and password."""

    url: str
    name: str
    engine_id: str = ""  # given by the operator; else engines are told by model

    @classmethod
    def parse(cls, text: str) -> Self:
        """`URL` or `ENGINE_ID=URL`; without a path it is /metrics. Raises ValueError that says what would be right."""
        text = text.strip()
        engine_id, equals, url = text.partition("=")
        if not equals or "://" in engine_id:
            engine_id, url = "", text
        url = url.strip()
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname or ""
            host.encode("idna")
        except (ValueError, UnicodeError):
            parts, port, host = urlsplit(""), None, ""
        if "/" in engine_id:
            raise ValueError(f"an engine's id has no '/', as {engine_id!r} does")
        if parts.scheme not in ("http", "https") or not host or port == 0 or (equals and text.startswith("=")):
            raise ValueError("give http://HOST:PORT/metrics, or ENGINE_ID=URL")
        path = parts.path if parts.path not in ("", "/") else METRICS_PATH
        place = f"[{host}]" if ":" in host else host
        place = f"{place}:{port}" if port else place
        full = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        return cls(full, urlunsplit((parts.scheme, place, path, "", "")), engine_id.strip())

    @property
    def place(self) -> str:
        """Host and port, which name an engine that nobody named."""
        return urlsplit(self.name).netloc

    @property
    def is_ollama(self) -> bool:
        return urlsplit(self.name).path.rstrip("/").endswith(OLLAMA_PATH)

    @property
    def is_local(self) -> bool:
        """Does the address lead to this host, or this pod? Then its engine may be one whose map is seen here."""
        host = urlsplit(self.name).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False


def parse_sources(texts: Iterable[str]) -> tuple[MetricsSource, ...]:
    """Several addresses. Raises ValueError for one that is none, one given twice, and too many."""
    sources = tuple(MetricsSource.parse(one) for one in texts)
    if len(sources) > MAX_SOURCES:
        raise ValueError(f"{len(sources)} addresses; at most {MAX_SOURCES}: run another agent for the others")
    if len({one.name for one in sources}) < len(sources):
        raise ValueError("an address is given twice")
    return sources
