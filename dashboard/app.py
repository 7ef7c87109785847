"""The page itself: run it with `python -P -m dashboard`, which starts Streamlit with the right settings."""

from __future__ import annotations

from importlib import resources

import streamlit as st

from dashboard.palette import theme_named
from dashboard.source import REFRESH_SECONDS, SLOW_REFRESH_SECONDS
from dashboard.views.pool import PAUSE_KEY, show_pool
from dashboard.views.trends import show_trends

st.set_page_config(page_title="KVAtlas", layout="wide")
st.html(f"<style>{resources.files('dashboard').joinpath('page.css').read_text(encoding='utf-8')}</style>")

theme = theme_named(st.context.theme.type)
paused = bool(st.session_state.get(PAUSE_KEY))

# Fragments end with each refresh, so nothing piles up; a loop here would keep every message it ever sent.
st.fragment(show_pool, run_every=None if paused else REFRESH_SECONDS)(theme)
st.fragment(show_trends, run_every=None if paused else SLOW_REFRESH_SECONDS)(theme)
