"""What the page's address says: view, pool, time, filter and the like. A link to it shows the same.

All of it is in the query. For a view with a path of its own, Streamlit would look for its server below that path first,
which leaves errors on the browser's console; and a query works behind any base path.
"""

from __future__ import annotations

import streamlit as st

VIEW = "view"  # absent: the default one
POOL = "pool"  # id of the chosen pool
AGENT = "agent"  # number of the agent that knows it, where there are several; absent: the first
TIME = "at"  # an instant, Unix seconds
SPAN = "span"  # how much of the past is shown, one of the view's own words
BOX = "box"  # name of a black box
FILTER = "filter"  # text that rows must contain
SORT = "sort"  # what rows are sorted by
POOLS = "pools"  # text that the names of a fleet's pools must contain
COLOUR = "colour"  # what the colours of the block map tell; absent: states
REQUEST = "request"  # whose blocks the block map lights
_KEPT = "address"


def keep() -> None:
    """Once in each run of the whole page, before all else: what a link left out is put back from the session."""
    given = st.query_params.to_dict()
    wanted = dict(st.session_state.get(_KEPT, {})) | given
    if wanted != given:
        st.query_params.from_dict(wanted)
    st.session_state[_KEPT] = wanted


def get(name: str) -> str | None:
    """A parameter of the address; None where there is none."""
    value: str | None = st.session_state.get(_KEPT, {}).get(name)
    return value or None


def put(name: str, value: str | None) -> None:
    """Set a parameter of the address, or take it out: in any run, that of a fragment too."""
    wanted = {key: text for key, text in st.session_state.get(_KEPT, {}).items() if key != name}
    if value:
        wanted[name] = value
    st.session_state[_KEPT] = wanted
    if value and st.query_params.get(name) != value:
        st.query_params[name] = value
    elif not value and name in st.query_params:
        del st.query_params[name]


def set_anew(key: str) -> None:
    """Once in each run of the whole page, for a control that is set from the address only where it differs.

    After another view was open the browser draws it anew, with its default, and sends that as the operator's choice.
    """
    st.session_state.pop(key, None)
