"""Who holds the chosen pool's memory: live sequences, sorted and filtered by the agent, and by LoRA and cache salt."""

from __future__ import annotations

import streamlit as st

from agent.wire import RequestPage
from dashboard import address, exports, requests_table, widgets
from dashboard.context import Context, ask
from dashboard.source import SLOW_REFRESH_SECONDS, timed

ROWS = (25, 50, 100, 200)
DEFAULT_ROWS = 50
_FILTER, _ORDER, _UP, _ROWS = "requests_filter", "requests_order", "requests_ascending", "requests_rows"


def show(context: Context) -> None:
    """The controls and the table, refreshed."""
    if context.pool is not None:
        st.fragment(_requests, run_every=context.every(SLOW_REFRESH_SECONDS))(context, context.pool)


def _requests(context: Context, pool: str) -> None:
    with timed("requests"):
        _controls()
        engine = ask(lambda: context.client.engine(pool))
        if engine is None:
            return
        order = requests_table.ORDERS[_order()]
        page = ask(
            lambda: context.client.requests(
                pool,
                st.session_state.get(_ROWS) or DEFAULT_ROWS,
                sort=order,
                ascending=bool(st.session_state.get(_UP)),
                contains=address.get(address.FILTER) or "",
            )
        )
        if page is None:
            return
        if engine.state != "live":
            st.html(widgets.note_html(f"The engine is {engine.state}: this is as it was last seen."))
        st.html(widgets.tiles_html(requests_table.tiles_of(page, engine.block_bytes)))
        _groups(page, engine.block_bytes)
        st.html(
            widgets.heading_html("Sequences", requests_table.rest_text(page))
            + requests_table.table_html(page, engine.block_bytes, order)
        )
        exports.offer("requests", lambda: requests_table.rows_of(page), id=pool, matching=page.matching, sort=order)


def _controls() -> None:
    st.session_state[_FILTER] = address.get(address.FILTER) or ""
    st.session_state[_ORDER] = _order()
    with st.container(key="requests_controls", horizontal=True, vertical_alignment="bottom"):
        st.text_input(
            "Filter",
            key=_FILTER,
            on_change=_filtered,
            placeholder="part of a request id, LoRA adapter or cache salt",
            max_chars=200,
        )
        st.selectbox("Sort by", list(requests_table.ORDERS), key=_ORDER, on_change=_ordered, width=230)
        st.selectbox("Rows", ROWS, index=ROWS.index(DEFAULT_ROWS), key=_ROWS, width=110)
        st.toggle("Smallest first", key=_UP)


def _filtered() -> None:
    address.put(address.FILTER, st.session_state[_FILTER].strip() or None)


def _ordered() -> None:
    chosen = st.session_state[_ORDER]
    address.put(address.SORT, None if requests_table.ORDERS[chosen] == "blocks" else requests_table.ORDERS[chosen])


def _order() -> str:
    """The words of the order that the address names; blocks where it names none that there is."""
    named = address.get(address.SORT)
    return next((words for words, order in requests_table.ORDERS.items() if order == named), "blocks")


def _groups(page: RequestPage, block_bytes: int) -> None:
    left, right = st.columns(2, gap="medium")
    left.html(
        widgets.heading_html("By LoRA adapter")
        + requests_table.groups_html("adapter", page.by_lora, page.lora_groups, block_bytes)
    )
    right.html(
        widgets.heading_html("By cache salt")
        + requests_table.groups_html("salt", page.by_cache_salt, page.cache_salt_groups, block_bytes)
    )
