"""The chosen pool as it is now: picker, banners, numbers, block map."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import EngineList, EngineSummary, UnmappedEngine
from dashboard import conditions, engine_metrics, figures, widgets
from dashboard.figure_component import show_figure
from dashboard.palette import Theme
from dashboard.source import MAP_CELLS, REFRESH_SECONDS, client, source, timed

MAP_HEIGHT = 456
POOL_KEY = "pool"  # the chosen pool, in the session and in the page's address
PAUSE_KEY = "paused"
# The lower page refreshes more slowly; while this stands, page.css hides it, so that no old number outlives a banner.
NOTHING_BELOW = '<span class="kv-nothing-below"></span>'
EXPIRES_MS = round(8 * REFRESH_SECONDS * 1000)


def show_pool(theme: Theme) -> None:
    """One refresh of the whole upper page. Meant to run as a fragment."""
    with timed("pool"):
        listing, trouble = _engines()
        title, picker, pause = st.columns([1, 5, 1.1], vertical_alignment="center")
        title.html('<div class="kv-title">KVAtlas</div>')
        with pause:
            _pause_switch()
        with picker:
            chosen = _pick(listing.engines if listing else [], listing.unmapped if listing else [])
        engine = next((e for e in listing.engines if e.id == chosen), None) if listing else None
        unmapped = next((e for e in listing.unmapped if e.id == chosen), None) if listing else None
        with st.container(key="banners"):
            if engine is None:  # before the banner: a browser may draw between the two
                st.html(NOTHING_BELOW)
            if st.session_state.get(PAUSE_KEY):
                st.info("**Paused.** The page shows the pool as it was when it was paused. Switch off to go on.")
            for condition in trouble or _conditions(listing, engine or unmapped, chosen):
                show_condition(condition)
        if listing is not None and engine is not None:
            _engine(engine, listing.agent.threshold, theme)
        elif unmapped is not None:
            st.html(engine_metrics.unmapped_html(unmapped))
            st.html(widgets.tiles_html(engine_metrics.unmapped_tiles(unmapped)))


def show_condition(condition: conditions.Condition) -> None:
    draw = {"error": st.error, "warning": st.warning, "info": st.info}[condition.severity]
    draw(f"{_plain(condition.what)}  \n{_plain(condition.action)}")


def _engines() -> tuple[EngineList | None, list[conditions.Condition]]:
    try:
        return client().engines(), []
    except AgentUnavailable as error:
        return None, [conditions.unreachable(source().reason(error))]
    except AgentRefused as error:
        return None, [conditions.refused(error)]


def _pause_switch() -> None:
    before = st.session_state.get(PAUSE_KEY, False)
    if st.toggle("Pause", key="pause_switch", help="Stop refreshing, to look at one instant") != before:
        st.session_state[PAUSE_KEY] = not before
        st.rerun()  # the whole page: how often a fragment runs is decided where it is called


def _pick(engines: Sequence[EngineSummary], unmapped: Sequence[UnmappedEngine]) -> str | None:
    """The pool chosen before stays chosen, listed or not: an operator's choice is not ours to change."""
    known = [*(engine.id for engine in engines), *(engine.id for engine in unmapped)]
    chosen = st.session_state.get(POOL_KEY) or st.query_params.get(POOL_KEY)
    if chosen is None and known:
        worst = conditions.most_in_need(engines)
        chosen = worst.id if worst else known[0]
    options = sorted({*known, chosen} if chosen else known)
    if not options:
        return None
    picked: str = st.selectbox(
        "Pool", options, index=options.index(chosen) if chosen else 0, key="pool_picker", label_visibility="collapsed"
    )
    if st.query_params.get(POOL_KEY) != picked:
        st.query_params[POOL_KEY] = picked
    if picked != st.session_state.get(POOL_KEY):
        changed = st.session_state.get(POOL_KEY) is not None
        st.session_state[POOL_KEY] = picked
        if changed:
            st.rerun()  # the other parts of the page follow at once
    return picked


def _conditions(
    listing: EngineList | None, engine: EngineSummary | UnmappedEngine | None, chosen: str | None
) -> list[conditions.Condition]:
    if listing is None:
        return []
    found = [conditions.unreadable_maps(listing.agent.unreadable)] if listing.agent.unreadable else []
    if isinstance(engine, UnmappedEngine):
        return engine_metrics.unmapped_conditions(engine) + found
    if engine is not None:
        return conditions.conditions_of(engine) + engine_metrics.disagreement(engine) + found
    return [conditions.not_listed(chosen) if chosen else conditions.no_engine(listing.agent), *found]


def _engine(engine: EngineSummary, threshold: float, theme: Theme) -> None:
    st.html(widgets.identity_html(engine) + engine_metrics.line_html(engine))
    if not conditions.map_is_meaningful(engine):
        return
    st.html(widgets.tiles_html(widgets.tiles_of(engine, threshold)))
    left, right = st.columns([2.35, 1], gap="medium")
    with right:
        st.html(
            widgets.heading_html("Blocks by state")
            + widgets.states_html(engine, theme)
            + widgets.heading_html(
                "Allocatable runs", f"{engine.fragmentation.allocatable_runs:,}, by length in blocks"
            )
            + widgets.runs_html(engine.fragmentation.run_length_histogram)
        )
    with left.container(key="map_box"):
        _block_map(engine, theme)


def _block_map(engine: EngineSummary, theme: Theme) -> None:
    try:
        cells = client().map(engine.id, cells=MAP_CELLS)
    except AgentUnavailable as error:
        st.html(NOTHING_BELOW)
        show_condition(conditions.unreachable(source().reason(error)))
        return
    except AgentRefused as error:
        show_condition(conditions.refused(error))
        return
    doubt = engine.state if engine.state != "live" else "degraded" if engine.degraded else ""
    how_old = f"{doubt}, not the present · " if doubt else ""
    note = how_old + widgets.map_note(cells.blocks_per_cell)
    st.html(widgets.heading_html("Block map", note))
    paused = bool(st.session_state.get(PAUSE_KEY))
    show_figure(
        figures.block_map(cells, theme, incarnation=engine.incarnation),
        key="block_map",
        label=f"Block map of {engine.id}",
        height=MAP_HEIGHT,
        expires_ms=None if paused else EXPIRES_MS,
    )


def _plain(text: str) -> str:
    """Text as it is: what comes from outside must not be read as Markdown."""
    return "".join(f"\\{character}" if character in "\\`*_{}[]()<>#+-!|~$:" else character for character in text)
