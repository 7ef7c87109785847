"""Where the page gets its data: one agent, one kept-alive connection, an address that stays on the server."""

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

MAP_CELLS = 4096
HISTORY_POINTS = 600
REFRESH_SECONDS = 1.0
SLOW_REFRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Source:
    """Settings of the page, read once from the environment. The page only reads, so it carries no token."""

    agent_url: str
    timing: bool  # write one line for each refresh to standard error

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Source:
        """ValueError where the agent's address is none: said once at the start, not at each refresh."""
        return cls(
            agent_url=checked_address(environment.get("KVATLAS_AGENT_URL") or DEFAULT_URL),
            timing=environment.get("KVATLAS_DASHBOARD_TIMING") == "1",
        )

    def reason(self, error: Exception) -> str:
        """The text of an error, fit for the page: an address in it loses its user and password."""
        authority = re.split("[/?#]", self.agent_url.partition("//")[2], maxsplit=1)[0]
        credentials, at, _ = authority.rpartition("@")
        return str(error).replace(credentials + at, "") if at else str(error)


@st.cache_resource(show_spinner=False)
def source() -> Source:
    return Source.from_environment(os.environ)


@st.cache_resource(show_spinner=False, scope="session", on_release=AgentClient.close)
def client() -> AgentClient:
    """One for each browser session, which runs its fragments in one thread; closed with the session."""
    return AgentClient(source().agent_url)


@contextmanager
def timed(fragment: str) -> Iterator[None]:
    """With KVATLAS_DASHBOARD_TIMING=1, one JSON line on standard error for each run of a fragment."""
    start = time.perf_counter()
    yield
    if source().timing:
        milliseconds = round(1000 * (time.perf_counter() - start), 3)
        line = {"event": "fragment", "fragment": fragment, "milliseconds": milliseconds}
        print(json.dumps(line), file=sys.stderr, flush=True)
