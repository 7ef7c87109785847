"""All pools side by side, the one most in need first."""

from __future__ import annotations

import streamlit as st

from dashboard import address, exports, widgets
from dashboard.choices import show_choices
from dashboard.conditions import Condition
from dashboard.context import Context, show_condition
from dashboard.fleet import Fleet, PoolCard, card_rows, chosen_of, fleet_html
from dashboard.header import open_pool
from dashboard.source import SLOW_REFRESH_SECONDS, fleet_reader, timed
from dashboard.wording import count, counted, noun

_FILTER = "pools_filter"


def show(context: Context) -> None:
    """The cards, refreshed."""
    st.fragment(_cards, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _cards(context: Context) -> None:
    with timed("fleet"):
        fleet = fleet_reader().read()
        with st.container(key="fleet_head", horizontal=True, vertical_alignment="center"):
            st.html(widgets.heading_html("Fleet", summary_text(fleet)), width="stretch")
            wanted = _filter()
            shown = [card for card in fleet.cards if wanted.lower() in _text(card)]
            exports.offer("fleet", lambda: card_rows(shown))
        if fleet.troubles:
            show_condition(silent(fleet))
        if shown:
            chosen = show_choices(fleet_html(shown, context.theme), key="fleet_cards")
            if chosen:
                open_pool(*chosen_of(chosen))
        elif fleet.cards:
            st.html(
                widgets.note_html(f"None of {counted(len(fleet.cards), 'pool')} has {wanted!r} in its name or model.")
            )
        elif not fleet.troubles:
            st.html(widgets.note_html("No pool yet. Start an engine with the shim installed beside an agent."))


def summary_text(fleet: Fleet) -> str:
    """How many pools there are, how many of them need somebody, and who answers."""
    in_need = sum(card.in_need for card in fleet.cards)
    needy = f"{count(in_need)} in need · " if in_need else "none in need · "
    answering = fleet.sources - len(fleet.troubles)
    answered = f" · {answering} of {fleet.sources} sources {noun(answering, 'answers', 'answer')}"
    told = answered if fleet.sources > 1 else ""
    return f"{counted(len(fleet.cards), 'pool')} · {needy}the one most in need first{told}"


def _filter() -> str:
    kept = address.get(address.POOLS) or ""
    if st.session_state.get(_FILTER) != kept:
        st.session_state[_FILTER] = kept
    st.text_input(
        "Filter", key=_FILTER, on_change=_filtered, placeholder="Filter", label_visibility="collapsed", width=180
    )
    return kept


def _filtered() -> None:
    address.put(address.POOLS, st.session_state[_FILTER])


def _text(card: PoolCard) -> str:
    return f"{card.id} {card.model} {card.kind} {card.where} {card.state}{' replay' if card.replay else ''}".lower()


def silent(fleet: Fleet) -> Condition:
    """Who did not answer. There are some."""
    silent = len(fleet.troubles)
    told = "; ".join(fleet.troubles[:3])
    more = f"; and {silent - 3} more" if silent > 3 else ""
    who = f"{silent} of {fleet.sources} sources {noun(silent, 'does', 'do')} not answer"
    return Condition(
        "warning",
        f"{'The agent does not answer' if fleet.sources == 1 else who}: {told}{more}",
        "Its pools are not shown. See that it runs, and that the dashboard may reach it."
        if silent == 1
        else "Their pools are not shown. See that they run, and that the dashboard may reach them.",
    )
