"""What changes slowly: fragmentation over the last minutes, who holds the memory, and how blocks live."""

from __future__ import annotations

import streamlit as st

from agent.wire import AgentStatus, EngineSummary
from dashboard import address, figures, widgets
from dashboard.choices import show_choices
from dashboard.context import Context, ask
from dashboard.figure_component import show_figure
from dashboard.lifetimes import durations_html, pages_html
from dashboard.source import HISTORY_POINTS, SLOW_REFRESH_SECONDS, timed

HISTORY_HEIGHT = 196
HISTORY_SECONDS = {"5 min": 300, "15 min": 900, "1 h": 3600}
DEFAULT_SPAN = "5 min"
WHY_F_MATTERS = (
    "Paged attention needs no contiguity: a high F never makes an allocation fail, and by itself it is no fault. "
    "F matters to what moves or gives back KV memory in runs: KV transfer between engines, offload to the host, "
    "elastic memory given back in pages, and shrinking the pool. A pool without such a consumer can leave F high."
)


def show_trends(context: Context) -> None:
    """One refresh of the lower page. What to do about an agent without an answer is said above the view."""
    with timed("trends"):
        listing = ask(context.client.engines)
        engine = next((each for each in listing.engines if each.id == context.pool), None) if listing else None
        if listing is not None and engine is not None:
            with st.container(key="lower"):
                _trends(engine, listing.agent, context)


def _trends(engine: EngineSummary, agent: AgentStatus, context: Context) -> None:
    left, right = st.columns([2.35, 1], gap="medium")
    with left.container(key="history_box"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(widgets.heading_html("Fragmentation over time", "mean and range of each bucket, UTC"))
            span = st.segmented_control(
                "Span",
                list(HISTORY_SECONDS),
                default=DEFAULT_SPAN,
                key="span",
                label_visibility="collapsed",
                required=True,
                width="content",
            )
        _history(engine, agent, HISTORY_SECONDS[span or DEFAULT_SPAN], context)
        st.html(widgets.note_html(WHY_F_MATTERS))
    with right:
        st.html(widgets.heading_html("Who holds it"))
        _holders(engine, context)


def _history(engine: EngineSummary, agent: AgentStatus, seconds: float, context: Context) -> None:
    # Two samples a bucket at least: with one, the jitter of sampling would leave gaps that mean nothing.
    points = min(HISTORY_POINTS, max(2, int(seconds / (2 * agent.interval_seconds))))
    lines = ask(
        lambda: [
            context.client.history(engine.id, metric, seconds, points=points)
            for metric in ("fragmentation", "strict_fragmentation")
        ]
    )
    if lines is None:
        return
    rate, strict = lines
    show_figure(
        figures.fragmentation_history(rate, strict, threshold=agent.threshold, theme=context.theme),
        key="history",
        label="Fragmentation over time",
        height=HISTORY_HEIGHT,
        expires_ms=None if engine.state == "gone" else context.expires_ms(SLOW_REFRESH_SECONDS),
    )


def _holders(engine: EngineSummary, context: Context) -> None:
    page = None if engine.state == "gone" else ask(lambda: context.client.requests(engine.id))
    if page is None:
        return
    lit = address.get(address.REQUEST)
    chosen = show_choices(widgets.holders_html(page, engine.block_bytes, lit), key="holders")
    if chosen is not None and (chosen or None) != lit:
        address.put(address.REQUEST, chosen)
        st.rerun()  # the map follows at once


def show_lives(context: Context) -> None:
    """One refresh of how long blocks live and how full pages are."""
    with timed("lives"):
        pool = context.pool
        listing = ask(context.client.engines) if pool else None
        engine = next((each for each in listing.engines if each.id == pool), None) if listing else None
        profile = ask(lambda: context.client.profile(engine.id)) if engine and engine.state != "gone" else None
        if profile is None:
            return
        parts = (
            durations_html("Residency", "From allocation until free or cached.", profile.lifetime),
            durations_html("Idle before eviction", "Of cached blocks that were evicted.", profile.idle_before_evict),
            durations_html("Reuse gap", "Of cached blocks that a prefix hit took into use.", profile.reuse_gap),
            pages_html(profile.pages),
        )
        with st.container(key="lives"):
            for column, part in zip(st.columns(len(parts), gap="medium"), parts, strict=True):
                column.html(f'<div class="kv-lives">{part}</div>')
