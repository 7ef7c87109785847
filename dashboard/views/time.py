"""How the chosen pool went over time."""

from __future__ import annotations

import streamlit as st

from dashboard.context import Context
from dashboard.source import SLOW_REFRESH_SECONDS
from dashboard.views.trends import show_trends


def show(context: Context) -> None:
    """Fragmentation over a span that ends now."""
    st.fragment(show_trends, run_every=context.every(SLOW_REFRESH_SECONDS))(context)
