"""What the compaction policy does with the chosen pool, and why."""

from __future__ import annotations

import streamlit as st

from dashboard.context import Context, ask, plain
from dashboard.source import SLOW_REFRESH_SECONDS, timed


def show(context: Context) -> None:
    """The policy's state and its last decisions, refreshed."""
    st.fragment(_state, run_every=context.every(SLOW_REFRESH_SECONDS))(context)


def _state(context: Context) -> None:
    with timed("compaction"):
        pool = context.pool
        state = ask(lambda: context.client.compaction(pool)) if pool else None
        if state is not None:
            st.markdown(f"**{plain(state.decision or 'no decision yet')}** {plain(state.reason)}")
            st.dataframe([verdict.model_dump() for verdict in state.verdicts], hide_index=True, key="verdicts_table")
