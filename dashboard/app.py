"""The page itself: run it with `python -P -m dashboard`, which starts Streamlit with the right settings."""

from __future__ import annotations

from importlib import import_module, resources

import streamlit as st

from dashboard import address
from dashboard.context import Context
from dashboard.header import chosen_view, paused, show_header
from dashboard.palette import theme_named
from dashboard.source import chosen_agent, client

st.set_page_config(page_title="KVAtlas", layout="wide")
st.html(f"<style>{resources.files('dashboard').joinpath('page.css').read_text(encoding='utf-8')}</style>")
address.keep()

# What goes on is in fragments, which end with each refresh; a loop would keep every message it ever sent.
show_header()
view = chosen_view()
context = Context(
    theme=theme_named(st.context.theme.type),
    paused=paused(),
    pool=address.get(address.POOL),
    client=client(),
    agent=chosen_agent(),
)
with st.container(key=f"view_{view}"):
    # Imported when it is opened: nobody waits for what another view needs.
    import_module(f"dashboard.views.{view}").show(context)
