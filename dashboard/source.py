"""Where the page gets its data: agents, and perhaps a Prometheus, whose addresses stay on the server."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import streamlit as st

from agent.client import DEFAULT_URL, AgentClient, checked_address
from dashboard import address
from dashboard.fleet_reader import FleetReader
from dashboard.prometheus import Prometheus

MAP_CELLS = 4096
HISTORY_POINTS = 600
REFRESH_SECONDS = 1.0
SLOW_REFRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Source:
    """Settings of the page, read once from the environment. The page only reads, so it carries no token."""

    agent_urls: tuple[str, ...]
    timing: bool  # write one line for each refresh to standard error
    prometheus_url: str = ""  # "": none is asked

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Source:
        """ValueError where an address is none: said once at the start, not at each refresh."""
        prometheus = environment.get("KVATLAS_PROMETHEUS_URL") or ""
        return cls(
            agent_urls=split_addresses(environment.get("KVATLAS_AGENT_URL") or DEFAULT_URL),
            timing=environment.get("KVATLAS_DASHBOARD_TIMING") == "1",
            prometheus_url=checked_address(prometheus, "KVATLAS_PROMETHEUS_URL") if prometheus else "",
        )

    def reason(self, error: Exception) -> str:
        """The text of an error, fit for the page: an address in it loses its user and password."""
        text = str(error)
        for url in (*self.agent_urls, self.prometheus_url):
            authority = _authority(url)
            credentials, at, _ = authority.rpartition("@")
            text = text.replace(credentials + at, "") if at else text
        return text

    def agent_name(self, number: int) -> str:
        """How the page calls an agent, from 1: where it listens, which tells several apart; "" of the only one."""
        return "" if len(self.agent_urls) == 1 else _authority(self.agent_urls[number - 1]).rpartition("@")[2]


def split_addresses(urls: str) -> tuple[str, ...]:
    """Addresses of agents with commas between them; ValueError where one of them is none."""
    return tuple(checked_address(url) for each in urls.split(",") if (url := each.strip())) or (DEFAULT_URL,)


def _authority(url: str) -> str:
    return re.split("[/?#]", url.partition("//")[2], maxsplit=1)[0]


@st.cache_resource(show_spinner=False)
def source() -> Source:
    return Source.from_environment(os.environ)


def chosen_agent() -> int:
    """Number of the agent that the address names, from 1; the first where it names none that there is, which
    `unknown_agent` tells."""
    return 1 if unknown_agent() is not None else int(address.get(address.AGENT) or 1)


def unknown_agent() -> str | None:
    """What the address names as an agent, where there is none of that number."""
    named = address.get(address.AGENT)
    if named is None or (named.isascii() and named.isdecimal() and len(named) < 7):
        return None if named is None or 1 <= int(named) <= len(source().agent_urls) else named
    return named


def client() -> AgentClient:
    """Of the agent that knows the chosen pool."""
    return _client(chosen_agent())


@st.cache_resource(show_spinner=False, scope="session", on_release=AgentClient.close)
def _client(number: int) -> AgentClient:
    """One for each browser session, which runs its fragments in one thread; closed with the session."""
    return AgentClient(source().agent_urls[number - 1])


@st.cache_resource(show_spinner=False, on_release=FleetReader.close)
def fleet_reader() -> FleetReader:
    """One for all sessions: what one tab read, the others need not read again."""
    known = source()
    agents = [(known.agent_name(number), AgentClient(url)) for number, url in enumerate(known.agent_urls, start=1)]
    prometheus = Prometheus(known.prometheus_url) if known.prometheus_url else None
    return FleetReader(agents, prometheus, reason=known.reason)


@contextmanager
def timed(fragment: str) -> Iterator[None]:
    """With KVATLAS_DASHBOARD_TIMING=1, one JSON line on standard error for each run of a fragment."""
    start = time.perf_counter()
    yield
    if source().timing:
        milliseconds = round(1000 * (time.perf_counter() - start), 3)
        line = {"event": "fragment", "fragment": fragment, "milliseconds": milliseconds}
        print(json.dumps(line), file=sys.stderr, flush=True)
