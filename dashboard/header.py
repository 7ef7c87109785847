"""Above every view: the choice of view and pool, the pause switch, and the banners."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import EngineList, EngineSummary, UnmappedEngine
from dashboard import address, conditions, engine_metrics
from dashboard.context import show_condition
from dashboard.firing import show_firing
from dashboard.source import REFRESH_SECONDS, chosen_agent, client, fleet_reader, source, timed, unknown_agent
from dashboard.wording import shortened

# Each is a module of dashboard.views.
VIEWS = ("fleet", "pool", "time", "requests", "compaction", "memory", "alerts")
DEFAULT_VIEW = "pool"
WITHOUT_POOL = ("fleet", "time", "memory", "alerts")  # these have something to show where the pool is not there
OF_ALL = ("fleet",)  # these are not about the chosen pool or its agent
# While this stands, page.css hides the view below, which is drawn apart: no old number outlives a banner.
NOTHING_BELOW = '<span class="kv-nothing-below"></span>'
_PAUSE_SWITCH = "pause_switch"
_POOL_PICKER = "pool_picker"
_VIEW_PICKER = "view_picker"

Pool = tuple[int, str]  # number of the agent that knows it, from 1, and its id


def show_header() -> None:
    """The choices, drawn when the whole page runs, as each of them has it do; and the banners, refreshed."""
    pools = _pools()
    with st.container(key="head", horizontal=True, vertical_alignment="center"):
        st.html('<div class="kv-title">KVAtlas</div>', width="content")
        _pick_view()
        _pick_pool(pools)
        st.toggle("Pause", key=_PAUSE_SWITCH, help="Stop refreshing, to look at one instant")
    st.fragment(_banners, run_every=None if paused() else REFRESH_SECONDS)(frozenset(pools))


def chosen_view() -> str:
    """The view that the address names; the default one where it names none that there is."""
    named = address.get(address.VIEW)
    return named if named in VIEWS else DEFAULT_VIEW


def open_view(view: str, pool: str | None = None) -> None:
    """Go to a view, and to a pool of the same agent where one is named; ends this run."""
    address.put(address.VIEW, None if view == DEFAULT_VIEW else view)
    if pool is not None:
        address.put(address.POOL, pool)
    st.rerun()


def open_pool(agent: int, id: str) -> None:
    """Go to a pool of any agent; ends this run."""
    _choose(agent, id)
    open_view("pool")


def paused() -> bool:
    return bool(st.session_state.get(_PAUSE_SWITCH))


def _banners(known: frozenset[Pool]) -> None:
    """One refresh. `known` are the pools that the picker offers: others run the whole page again."""
    with timed("banners"):
        listing, trouble = _engines()
        agent, chosen = chosen_agent(), address.get(address.POOL)
        if listing is not None and frozenset(_pools(listing)) != known:
            st.rerun()
        with st.container(key="banners"):
            # Before the banner: a browser may draw between the two.
            alone = chosen_view() not in OF_ALL  # about what this one agent tells
            unknown = unknown_agent()
            if alone and (
                unknown is not None
                or listing is None
                or (chosen_view() not in WITHOUT_POOL and (agent, chosen) not in known)
            ):
                st.html(NOTHING_BELOW)
            if paused():
                st.info("**Paused.** The page shows everything as it was when it was paused. Switch off to go on.")
            if unknown is not None:
                show_condition(conditions.no_such_agent(unknown, len(source().agent_urls)))
                return
            for condition in (trouble if alone else []) if listing is None else _conditions(listing, chosen):
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


def _pools(listing: EngineList | None = None) -> dict[Pool, float]:
    """Every pool that can be chosen, with how calm it is: the least calm is the one to open the page on.

    Of several agents the fleet's last reading tells. `listing` is what the only one just said; without it, it is asked.
    """
    if len(source().agent_urls) > 1:
        cards = [card for card in fleet_reader().read().cards if card.agent is not None]
        return {(card.agent or 1, card.id): float(place) for place, card in enumerate(cards)}
    listing = listing or _engines()[0]
    if listing is None:
        return {}
    worst = conditions.most_in_need(listing.engines)
    calm = {each.id: float(worst is None or each.id != worst.id) for each in listing.engines}
    return {(1, id): place for id, place in (calm | {each.id: 2.0 for each in listing.unmapped}).items()}


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


def _pick_pool(pools: Mapping[Pool, float]) -> None:
    """The pool chosen before stays chosen, listed or not: an operator's choice is not ours to change."""
    id, unknown = address.get(address.POOL), unknown_agent()
    if unknown is not None:
        pass  # a banner says so: which pool is meant is not ours to guess
    elif id is None:
        worst = min(pools, key=lambda pool: (pools[pool], pool[1]), default=None)
        if worst is None:
            return
        _choose(*worst)
    elif len(source().agent_urls) > 1 and address.get(address.AGENT) is None:
        _choose(min((agent for agent, known in pools if known == id), default=1), id)  # a link that names no agent
    chosen = (chosen_agent(), address.get(address.POOL) or "")
    offered = {*pools} if unknown is not None else {*pools, chosen}
    names = {_pool_name(pool): pool for pool in sorted(offered, key=lambda pool: (pool[1], pool[0]))}
    shown = _pool_name(chosen) if unknown is None else f"{chosen[1]} \N{MIDDLE DOT} agent {shortened(unknown, 20)}"
    names.setdefault(shown, chosen)
    _follow(_POOL_PICKER, shown)
    st.selectbox(
        "Pool", list(names), key=_POOL_PICKER, on_change=_pool_picked, args=(names,), label_visibility="collapsed"
    )


def _pool_name(pool: Pool) -> str:
    agent, id = pool
    return f"{id} \N{MIDDLE DOT} {name}" if (name := source().agent_name(agent)) else id


def _pool_picked(names: Mapping[str, Pool]) -> None:
    _choose(*names[st.session_state[_POOL_PICKER]])


def _choose(agent: int, id: str) -> None:
    address.put(address.AGENT, str(agent) if agent > 1 else None)
    address.put(address.POOL, id)


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
