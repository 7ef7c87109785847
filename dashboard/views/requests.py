"""Who holds the chosen pool's memory."""

from __future__ import annotations

import streamlit as st

from dashboard.context import Context, ask
from dashboard.source import SLOW_REFRESH_SECONDS, timed


def show(context: Context) -> None:
    """The table of live sequences, refreshed."""
    st.fragment(_table, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _table(context: Context) -> None:
    with timed("requests"):
        pool = context.pool
        page = ask(lambda: context.client.requests(pool)) if pool else None
        if page is not None:
            rows = [request.model_dump() for request in page.requests]
            st.dataframe(rows, hide_index=True, key="requests_table", placeholder="-")
