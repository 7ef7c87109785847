"""All pools side by side, the one most in need first."""

from __future__ import annotations

import streamlit as st

from dashboard import conditions
from dashboard.context import Context, ask
from dashboard.source import SLOW_REFRESH_SECONDS, timed


def show(context: Context) -> None:
    """The table of pools, refreshed."""
    st.fragment(_pools, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _pools(context: Context) -> None:
    with timed("fleet"):
        listing = ask(context.client.engines)
        if listing is not None:
            rows = [
                {"pool": each.id, "state": each.state, "fragmentation": each.fragmentation.rate} | dict(each.blocks)
                for each in conditions.worst_first(listing.engines)
            ]
            st.dataframe(rows, hide_index=True, key="fleet_table")
