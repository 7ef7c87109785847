"""Above every view: links to the views, the pool picker, the pause switch, and the banners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import EngineList, EngineSummary, UnmappedEngine
from dashboard import address, conditions, engine_metrics
from dashboard.context import show_condition
from dashboard.source import client, source, timed

# Each is a module of dashboard.views.
VIEWS = ("fleet", "pool", "time", "requests", "compaction", "memory", "alerts")
DEFAULT_VIEW = "pool"
WITHOUT_POOL = ("fleet", "memory", "alerts")  # these have something to show where no pool is chosen
# While this stands, page.css hides the view below, which is drawn apart: no old number outlives a banner.
NOTHING_BELOW = '<span class="kv-nothing-below"></span>'
_PAUSED = "paused"
_PICKER = "pool_picker"
_VIEW_PICKER = "view_picker"
_WHOLE_RUN = "in_whole_run"
_SHOWN = "shown"  # view and pool of the last run of the whole page


def show_header() -> None:
    """One refresh of what stands above the view. Meant to run as a fragment."""
    with timed("header"):
        listing, trouble = _engines()
        with st.container(key="head", horizontal=True, vertical_alignment="center"):
            st.html('<div class="kv-title">KVAtlas</div>', width="content")
            view = _pick_view()
            chosen = _pick(listing.engines if listing else [], listing.unmapped if listing else [])
            _pause_switch()
        if (view, chosen) != st.session_state.get(_SHOWN) and not st.session_state.get(_WHOLE_RUN):
            st.rerun()  # the view below follows at once
        engine = next((e for e in listing.engines if e.id == chosen), None) if listing else None
        unmapped = next((e for e in listing.unmapped if e.id == chosen), None) if listing else None
        with st.container(key="banners"):
            # Before the banner: a browser may draw between the two.
            if listing is None or (view not in WITHOUT_POOL and engine is None and unmapped is None):
                st.html(NOTHING_BELOW)
            if paused():
                st.info("**Paused.** The page shows everything as it was when it was paused. Switch off to go on.")
            for condition in trouble or _conditions(listing, engine or unmapped, chosen):
                show_condition(condition)


@contextmanager
def whole_run() -> Iterator[None]:
    """Around the header in a run of the whole page: a choice made in it is followed by that same run."""
    st.session_state[_WHOLE_RUN] = True
    try:
        yield
    finally:
        st.session_state[_WHOLE_RUN] = False
        st.session_state[_SHOWN] = (chosen_view(), address.get(address.POOL))


def chosen_view() -> str:
    """The view that the address names; the default one where it names none that there is."""
    named = address.get(address.VIEW)
    return named if named in VIEWS else DEFAULT_VIEW


def open_view(view: str, pool: str | None = None) -> None:
    """Go to a view, and to a pool where one is named; ends this run."""
    _name_view(view)
    if pool is not None:
        address.put(address.POOL, pool)
    st.rerun()


def paused() -> bool:
    return bool(st.session_state.get(_PAUSED))


def _engines() -> tuple[EngineList | None, list[conditions.Condition]]:
    try:
        return client().engines(), []
    except AgentUnavailable as error:
        return None, [conditions.unreachable(source().reason(error))]
    except AgentRefused as error:
        return None, [conditions.refused(error)]


def _pick_view() -> str:
    view = chosen_view()
    st.session_state[_VIEW_PICKER] = view  # it may have been opened elsewhere on the page
    st.segmented_control(
        "View",
        VIEWS,
        key=_VIEW_PICKER,
        format_func=str.capitalize,
        required=True,
        on_change=_view_picked,
        label_visibility="collapsed",
    )
    return view


def _view_picked() -> None:
    _name_view(st.session_state[_VIEW_PICKER])


def _name_view(view: str) -> None:
    address.put(address.VIEW, None if view == DEFAULT_VIEW else view)


def _pause_switch() -> None:
    before = paused()
    if st.toggle("Pause", key="pause_switch", help="Stop refreshing, to look at one instant") != before:
        st.session_state[_PAUSED] = not before
        st.rerun()  # the whole page: how often a fragment runs is decided where it is called


def _pick(engines: Sequence[EngineSummary], unmapped: Sequence[UnmappedEngine]) -> str | None:
    """The pool chosen before stays chosen, listed or not: an operator's choice is not ours to change."""
    known = [*(engine.id for engine in engines), *(engine.id for engine in unmapped)]
    chosen = address.get(address.POOL)
    if chosen is None and known:
        worst = conditions.most_in_need(engines)
        chosen = worst.id if worst else known[0]
        address.put(address.POOL, chosen)
    if chosen is None:
        return None
    st.session_state[_PICKER] = chosen  # it may have been chosen elsewhere on the page
    st.selectbox(
        "Pool", sorted({*known, chosen}), key=_PICKER, on_change=_picked, label_visibility="collapsed", width="stretch"
    )
    return chosen


def _picked() -> None:
    address.put(address.POOL, st.session_state[_PICKER])


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
