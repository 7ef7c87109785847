"""Above every view: the choice of view and pool, the pause switch, and the banners."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import EngineList, EngineSummary, UnmappedEngine
from dashboard import address, conditions, engine_metrics
from dashboard.context import show_condition
from dashboard.firing import show_firing
from dashboard.source import REFRESH_SECONDS, client, source, timed

# Each is a module of dashboard.views.
VIEWS = ("fleet", "pool", "time", "requests", "compaction", "memory", "alerts")
DEFAULT_VIEW = "pool"
WITHOUT_POOL = ("fleet", "time", "memory", "alerts")  # these have something to show where the pool is not there
# While this stands, page.css hides the view below, which is drawn apart: no old number outlives a banner.
NOTHING_BELOW = '<span class="kv-nothing-below"></span>'
_PAUSE_SWITCH = "pause_switch"
_POOL_PICKER = "pool_picker"
_VIEW_PICKER = "view_picker"


def show_header() -> None:
    """The choices, drawn when the whole page runs, as each of them has it do; and the banners, refreshed."""
    listing, _ = _engines()
    known = _known(listing)
    with st.container(key="head", horizontal=True, vertical_alignment="center"):
        st.html('<div class="kv-title">KVAtlas</div>', width="content")
        _pick_view()
        _pick_pool(known, listing.engines if listing else [])
        st.toggle("Pause", key=_PAUSE_SWITCH, help="Stop refreshing, to look at one instant")
    st.fragment(_banners, run_every=None if paused() else REFRESH_SECONDS)(known)


def chosen_view() -> str:
    """The view that the address names; the default one where it names none that there is."""
    named = address.get(address.VIEW)
    return named if named in VIEWS else DEFAULT_VIEW


def open_view(view: str, pool: str | None = None) -> None:
    """Go to a view, and to a pool where one is named; ends this run."""
    address.put(address.VIEW, None if view == DEFAULT_VIEW else view)
    if pool is not None:
        address.put(address.POOL, pool)
    st.rerun()


def paused() -> bool:
    return bool(st.session_state.get(_PAUSE_SWITCH))


def _banners(known: frozenset[str]) -> None:
    """One refresh. `known` are the pools that the picker offers: others run the whole page again."""
    with timed("banners"):
        listing, trouble = _engines()
        if listing is not None and _known(listing) != known:
            st.rerun()
        chosen = address.get(address.POOL)
        with st.container(key="banners"):
            # Before the banner: a browser may draw between the two.
            if listing is None or (chosen_view() not in WITHOUT_POOL and chosen not in known):
                st.html(NOTHING_BELOW)
            if paused():
                st.info("**Paused.** The page shows everything as it was when it was paused. Switch off to go on.")
            for condition in trouble if listing is None else _conditions(listing, chosen):
                show_condition(condition)
            if listing is not None:
                show_firing(client(), chosen_view(), chosen)


def _engines() -> tuple[EngineList | None, list[conditions.Condition]]:
    try:
        return client().engines(), []
    except AgentUnavailable as error:
        return None, [conditions.unreachable(source().reason(error))]
    except AgentRefused as error:
        return None, [conditions.refused(error)]


def _known(listing: EngineList | None) -> frozenset[str]:
    if listing is None:
        return frozenset()
    return frozenset(each.id for each in listing.engines) | {each.id for each in listing.unmapped}


def _pick_view() -> None:
    _follow(_VIEW_PICKER, chosen_view())
    st.segmented_control(
        "View",
        VIEWS,
        key=_VIEW_PICKER,
        format_func=str.capitalize,
        required=True,
        on_change=_view_picked,
        label_visibility="collapsed",
    )


def _view_picked() -> None:
    view = st.session_state[_VIEW_PICKER]
    address.put(address.VIEW, None if view == DEFAULT_VIEW else view)


def _pick_pool(known: Iterable[str], engines: Iterable[EngineSummary]) -> None:
    """The pool chosen before stays chosen, listed or not: an operator's choice is not ours to change."""
    chosen = address.get(address.POOL)
    if chosen is None:
        worst = conditions.most_in_need(list(engines))
        chosen = worst.id if worst else min(known, default=None)
        if chosen is None:
            return
        address.put(address.POOL, chosen)
    _follow(_POOL_PICKER, chosen)
    st.selectbox(
        "Pool", sorted({*known, chosen}), key=_POOL_PICKER, on_change=_pool_picked, label_visibility="collapsed"
    )


def _pool_picked() -> None:
    address.put(address.POOL, st.session_state[_POOL_PICKER])


def _follow(picker: str, chosen: str) -> None:
    """Another part of the page may have chosen. Set where it differs alone, so that no click is overtaken."""
    if st.session_state.get(picker) != chosen:
        st.session_state[picker] = chosen


def _conditions(listing: EngineList, chosen: str | None) -> list[conditions.Condition]:
    found = [conditions.replayed(listing.agent.replay)] if listing.agent.replay is not None else []
    found += [conditions.unreadable_maps(listing.agent.unreadable)] if listing.agent.unreadable else []
    everything: list[EngineSummary | UnmappedEngine] = [*listing.engines, *listing.unmapped]
    engine = next((each for each in everything if each.id == chosen), None)
    if isinstance(engine, UnmappedEngine):
        return engine_metrics.unmapped_conditions(engine) + found
    if engine is not None:
        return conditions.conditions_of(engine) + engine_metrics.disagreement(engine) + found
    return [conditions.not_listed(chosen) if chosen else conditions.no_engine(listing.agent), *found]
