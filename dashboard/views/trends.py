"""What changes slowly: fragmentation over the last quarter of an hour, and who holds the memory."""

from __future__ import annotations

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import AgentStatus, EngineSummary
from dashboard import figures, widgets
from dashboard.figure_component import show_figure
from dashboard.palette import Theme
from dashboard.source import HISTORY_POINTS, SLOW_REFRESH_SECONDS, client, source, timed
from dashboard.views.pool import PAUSE_KEY, POOL_KEY

HISTORY_HEIGHT = 196
HISTORY_SECONDS = {"5 min": 300, "15 min": 900, "1 h": 3600}
DEFAULT_SPAN = "5 min"
WHY_F_MATTERS = (
    "Paged attention needs no contiguity: a high F never makes an allocation fail, and by itself it is no fault. "
    "F matters to what moves or gives back KV memory in runs: KV transfer between engines, offload to the host, "
    "elastic memory given back in pages, and shrinking the pool. A pool without such a consumer can leave F high."
)


def show_trends(theme: Theme) -> None:
    """One refresh of the lower page. What to do about an agent without an answer is said in the upper one."""
    with timed("trends"):
        pool = st.session_state.get(POOL_KEY)
        if pool is None:
            return
        try:
            listing = client().engines()
            engine = next((engine for engine in listing.engines if engine.id == pool), None)
            if engine is not None:
                with st.container(key="lower"):
                    _trends(engine, listing.agent, theme)
        except (AgentUnavailable, AgentRefused) as error:
            st.html(widgets.note_html(f"No trends: {source().reason(error)}"))


def _trends(engine: EngineSummary, agent: AgentStatus, theme: Theme) -> None:
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
        seconds = HISTORY_SECONDS[span or DEFAULT_SPAN]
        # Two samples a bucket at least: with one, the jitter of sampling would leave gaps that mean nothing.
        points = min(HISTORY_POINTS, max(2, int(seconds / (2 * agent.interval_seconds))))
        rate, strict = (
            client().history(engine.id, metric, seconds, points=points)
            for metric in ("fragmentation", "strict_fragmentation")
        )
        paused = bool(st.session_state.get(PAUSE_KEY)) or engine.state == "gone"
        show_figure(
            figures.fragmentation_history(rate, strict, threshold=agent.threshold, theme=theme),
            key="history",
            label="Fragmentation over time",
            height=HISTORY_HEIGHT,
            expires_ms=None if paused else round(6 * SLOW_REFRESH_SECONDS * 1000),
        )
        st.html(widgets.note_html(WHY_F_MATTERS))
    with right:
        st.html(widgets.heading_html("Who holds it"))
        if engine.state != "gone":
            st.html(widgets.holders_html(client().requests(engine.id), engine.block_bytes))
