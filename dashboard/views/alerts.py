"""Alerts that are open, and those that are over."""

from __future__ import annotations

import streamlit as st

from dashboard.context import Context, ask
from dashboard.source import SLOW_REFRESH_SECONDS, timed


def show(context: Context) -> None:
    """The two tables, refreshed."""
    st.fragment(_tables, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _tables(context: Context) -> None:
    with timed("alerts"):
        listing = ask(context.client.alerts)
        if listing is not None:
            for name, records in (("Open", listing.open), ("Over", listing.recent)):
                st.subheader(name)
                rows = [record.model_dump(exclude={"labels"}) for record in records]
                st.dataframe(rows, hide_index=True, key=f"alerts_{name.lower()}")
