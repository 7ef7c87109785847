"""The chosen pool as it is now: its numbers, its block map, how fragmentation went, who holds the memory."""

from __future__ import annotations

import streamlit as st

from agent.wire import EngineSummary
from dashboard import address, conditions, engine_metrics, widgets
from dashboard.context import Context, ask
from dashboard.source import REFRESH_SECONDS, SLOW_REFRESH_SECONDS, timed
from dashboard.views.block_map import PICKER, show_block_map
from dashboard.views.trends import show_lives, show_trends

LIVES_REFRESH_SECONDS = 9.0  # counts since the engine's start: nothing in them hurries


def show(context: Context) -> None:
    """The upper part, refreshed often, and those below, which change ever more slowly."""
    address.set_anew(PICKER)
    st.fragment(_now, run_every=context.every(REFRESH_SECONDS))(context)
    st.fragment(show_trends, run_every=context.every(SLOW_REFRESH_SECONDS))(context)
    st.fragment(show_lives, run_every=context.every(LIVES_REFRESH_SECONDS))(context)


def _now(context: Context) -> None:
    with timed("pool"):
        listing = ask(context.client.engines)
        if listing is None:
            return
        engine = next((each for each in listing.engines if each.id == context.pool), None)
        unmapped = next((each for each in listing.unmapped if each.id == context.pool), None)
        if engine is not None:
            _engine(engine, listing.agent.threshold, context)
        elif unmapped is not None:
            st.html(engine_metrics.unmapped_html(unmapped))
            st.html(widgets.tiles_html(engine_metrics.unmapped_tiles(unmapped)))


def _engine(engine: EngineSummary, threshold: float, context: Context) -> None:
    st.html(widgets.identity_html(engine) + engine_metrics.line_html(engine))
    if not conditions.map_is_meaningful(engine):
        return
    st.html(widgets.tiles_html(widgets.tiles_of(engine, threshold)))
    left, right = st.columns([2.35, 1], gap="medium")
    with right:
        st.html(
            widgets.heading_html("Blocks by state")
            + widgets.states_html(engine, context.theme)
            + widgets.heading_html(
                "Allocatable runs", f"{engine.fragmentation.allocatable_runs:,}, by length in blocks"
            )
            + widgets.runs_html(engine.fragmentation.run_length_histogram)
        )
    with left.container(key="map_box"):
        show_block_map(engine, context)
