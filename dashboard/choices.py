"""HTML of which parts can be chosen: cards and rows of a table that stay where they are while the page refreshes.

Streamlit's own tables name a chosen row by its number, which is another request's after the next refresh.
"""

from __future__ import annotations

import gzip
from importlib import resources
from urllib.parse import quote, unquote

import streamlit as st

_mount = st.components.v2.component(
    "kvatlas.choices",
    html='<div class="kvatlas-choices"></div>',
    js=resources.files("dashboard").joinpath("choices.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # it looks as the rest of the page does
)


def as_choice(name: str) -> str:
    """A name from outside as the value of `data-choice`: as HTML it would lose carriage returns and the like."""
    return quote(name, safe=" -_.~:", errors="surrogatepass")


def show_choices(html: str, *, key: str) -> str | None:
    """Draw `html`, whose parts from outside are escaped; the value of `data-choice` that was clicked just now, or None.

    What is chosen is an element with `data-choice`; make it, or one in it, an `a` or a `button`, which keys can reach.
    """
    result = _mount(key=key, data=gzip.compress(html.encode(), mtime=0), on_chosen_change=lambda: None)
    chosen: str | None = result.chosen
    return None if chosen is None else unquote(chosen, errors="surrogatepass")
