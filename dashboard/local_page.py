"""Is the page served to this machine alone, so that the agent's own rule for its machine holds for it too?

An agent without a token takes changes from its own machine. The dashboard's server is on that machine, whoever looks at
the page: so the page may use that only where the browser is there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import streamlit as st

from agent.client import AgentClient
from agent.wire import AgentStatus

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def is_local(server_address: str | None, headers: Mapping[str, str]) -> bool:
    """Does the server listen on loopback, and did the browser ask it there, with no proxy between?

    The name that the browser asked for must be loopback's: another name may lead here by a DNS that somebody else runs.
    An origin must be this page's: Streamlit lets in those of this machine's other ports too, whatever is served there.
    """
    given = {name.lower(): value for name, value in headers.items()}
    if server_address not in LOOPBACK or any(name in given for name in PROXIED):
        return False
    host, origin = given.get("host", ""), given.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False


def goes_without_token(agent: AgentStatus, client: AgentClient) -> bool:
    """May this page change something without a token? Only where the agent has none, and all three are one machine."""
    if not agent.writes_enabled or agent.writes_need_token:
        return False
    return urlsplit(client.url).hostname in LOOPBACK and is_local(
        st.get_option("server.address"), st.context.headers.to_dict()
    )
