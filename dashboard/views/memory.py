"""Memory: devices and who holds theirs, host and control groups, torch's allocators; and what would fit."""

from __future__ import annotations

import streamlit as st

from agent.wire.devices import DeviceList
from dashboard import exports, memory_tables
from dashboard.context import Context, ask
from dashboard.source import SLOW_REFRESH_SECONDS, timed
from dashboard.views.planner import show_planner

_SHOWN = "memory_shown"  # by agent, a list of the answer on the page, for the files: these are made in another thread


def show(context: Context) -> None:
    """What is read, refreshed; and the planner, which answers to its own form."""
    shown: list[DeviceList] = st.session_state.setdefault(_SHOWN, {}).setdefault(context.client.url, [])
    st.fragment(_devices, run_every=context.every(SLOW_REFRESH_SECONDS))(context, shown)
    exports.offer("memory", lambda: [row for found in shown for row in memory_tables.rows_of(found)])
    show_planner(context)


def _devices(context: Context, shown: list[DeviceList]) -> None:
    with timed("memory"):
        found = ask(context.client.devices)
        if found is None:
            return
        shown[:] = [found]
        st.html(
            memory_tables.devices_html(found, context.theme)
            + memory_tables.host_html(found)
            + memory_tables.allocators_html(found.allocators, recorded=found.nvml == memory_tables.A_RECORDING)
        )
