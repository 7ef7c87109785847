"""What fires, in one line above every view."""

from __future__ import annotations

from urllib.parse import urlencode

import streamlit as st

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from agent.wire.alerts import AlertList
from dashboard import address
from dashboard.wording import counted, duration, escape

VIEW = "alerts"
AGENT = "agent"  # in the address, where there are several


def firing_html(found: AlertList) -> str:
    """How many alerts fire and the worst of them; "" where none does."""
    firing = [one for one in found.open if one.state == "firing"]
    if not firing:
        return ""
    worst = firing[0]
    since = duration(max(0.0, found.now_unix - worst.started_unix))
    number = counted(len(firing), "alert fires", "alerts fire")
    others = "" if len(firing) == 1 else f" · and {len(firing) - 1} more"
    return (
        f'<div class="kv-firing {escape(worst.severity)}" role="status"><b>{number}</b> · {escape(worst.severity)}: '
        f"{escape(worst.summary)}, for {since}{others}</div>"
    )


def link_html(pool: str | None, agent: str | None) -> str:
    """To the view that says what to do; `pool` and `agent` are those that are chosen.

    It stays as it is from refresh to refresh: what is drawn anew loses the keyboard's focus.
    """
    named = {"view": VIEW, "pool": pool, "agent": agent}
    link = escape(urlencode({name: text for name, text in named.items() if text}))
    return f'<a class="kv-firing-link" href="?{link}">what to do</a>'


def show_firing(client: AgentClient, view: str, pool: str | None) -> None:
    """The line, on any view but that of alerts; nothing where none fires, or where the agent does not tell."""
    if view == VIEW:
        return
    try:
        text = firing_html(client.alerts())
    except (AgentUnavailable, AgentRefused):
        return  # the banners say why there is no answer
    if text:
        with st.container(horizontal=True, vertical_alignment="center", key="firing"):
            st.html(text, width="content")
            st.html(link_html(pool, address.get(AGENT)), width="content")
