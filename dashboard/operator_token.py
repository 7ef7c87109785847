"""The operator's token: typed in, kept by the server for one session alone, and sent only with what changes something.

It is never in an address, in a setting of the page, or in what the server sends to the browser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from dashboard.conditions import Condition, refused
from dashboard.context import show_condition
from dashboard.source import source

_KEPT = "operator_token"  # of the session state, which the server keeps; no widget has this key
Answer = TypeVar("Answer")


def token() -> str | None:
    """What was typed in; None: the page only reads."""
    kept: str | None = st.session_state.get(_KEPT)
    return kept or None


def forget() -> None:
    """The agent does not know it, or the operator is done."""
    st.session_state.pop(_KEPT, None)


def ask_token(where: str) -> bool:
    """The field for it, or that there is one, with a button to forget it. True where there is one.

    `where` tells the fields of several views apart. Call it outside of a fragment that refreshes itself.
    """
    if token() is not None:
        with st.container(horizontal=True, vertical_alignment="center", key=f"token_{where}"):
            st.markdown("A token is held for this session, on the dashboard's server alone.", width="content")
            if st.button("Forget it", key=f"forget_token_{where}"):
                del st.session_state[_KEPT]
                st.rerun()
        return True
    # A form, so that the field is emptied when it is sent: the page keeps nothing of it.
    with (
        st.form(f"token_form_{where}", clear_on_submit=True, border=False),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        typed = st.text_input(
            "The agent's token, to change something",
            type="password",
            autocomplete="off",
            key=f"token_field_{where}",
            help="Without it the page only reads. It is KVATLAS_TOKEN, or in KVATLAS_TOKEN_FILE, of the agent.",
        )
        sent = st.form_submit_button("Use it")
    if sent and (given := typed.strip()):
        if is_token(given):
            st.session_state[_KEPT] = given
            st.rerun()
        unfit = "That cannot be a token: it has spaces, or characters that no HTTP header holds."
        show_condition(Condition("error", unfit, "Type it in as the agent has it."))
    return False


def is_token(text: str) -> bool:
    """Can a header carry it? Else the client could not even ask."""
    return text.isascii() and text.isprintable() and " " not in text


def change(client: AgentClient, call: Callable[[AgentClient], Answer], *, needs_token: bool = True) -> Answer | None:
    """Have the agent change something, with the token; None, with the reason on the page, where it does not.

    A token that the agent does not know is forgotten. `needs_token` false: see local_page.
    """
    held = token()
    if held is None and needs_token:
        show_condition(Condition("error", "Nothing was changed: the page holds no token.", "Type it in first."))
        return None
    with client.with_token(held or "") as writer:
        try:
            return call(writer)
        except AgentUnavailable as error:
            show_condition(
                Condition(
                    "error", f"Whether that was done is not known: {source().reason(error)}", "Look, then try again."
                )
            )
        except AgentRefused as error:
            if error.status == 401:
                st.session_state.pop(_KEPT, None)
            show_condition(refused(error))
    return None
