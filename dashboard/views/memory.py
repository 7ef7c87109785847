"""Devices, and who holds their memory."""

from __future__ import annotations

import streamlit as st

from dashboard.context import Context, ask, plain
from dashboard.source import SLOW_REFRESH_SECONDS, timed


def show(context: Context) -> None:
    """The table of devices, refreshed."""
    st.fragment(_devices, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _devices(context: Context) -> None:
    with timed("memory"):
        listing = ask(context.client.devices)
        if listing is not None:
            st.markdown(plain(f"NVML: {listing.nvml}. {listing.nvml_reason}"))
            rows = [
                {"gpu": each.gpu, "name": each.name, "state": each.state, "reason": each.reason}
                | (each.memory.model_dump() if each.memory else {})
                for each in listing.devices
            ]
            st.dataframe(rows, hide_index=True, key="devices_table")
