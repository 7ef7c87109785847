"""The operator's token: typed in, kept by the server for one session alone, and sent to one agent alone, with what
changes something there.

It is never in an address, in a setting of the page, or in what the server sends to the browser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from dashboard.conditions import Condition, refused
from dashboard.context import Context, plain, show_condition
from dashboard.source import source

# Of the session state, which the server keeps; no widget has these keys.
_KEPT = "operator_tokens"  # by the agent's address: what was typed in for one must not be shown to another
_UNFIT = "operator_token_unfit"  # key of the field in which something else was typed in last
NO_TOKEN = Condition("error", "Nothing was changed: the page holds no token.", "Type it in first.")
UNFIT = Condition(
    "error",
    "That cannot be a token: it has spaces, or characters that no HTTP header holds.",
    "Type it in as the agent has it.",
)
Answer = TypeVar("Answer")


def token(client: AgentClient) -> str | None:
    """What was typed in for the agent; None: the page only reads it."""
    kept: dict[str, str] = st.session_state.get(_KEPT, {})
    return kept.get(client.url)


def forget(agent: str) -> None:
    """The agent of that address does not know it, or the operator is done."""
    _keep(agent, None)


def _keep(agent: str, typed: str | None) -> None:
    others = {url: kept for url, kept in st.session_state.get(_KEPT, {}).items() if url != agent}
    st.session_state[_KEPT] = others | ({agent: typed} if typed is not None else {})


def ask_token(context: Context, where: str) -> bool:
    """The field for the agent's token, or that there is one, with a button to forget it. True where there is one.

    `where` tells the fields of several views apart. Call it outside of a fragment that refreshes itself.
    """
    agent = context.client.url
    name = plain(source().agent_name(context.agent))  # "" where there is one agent alone
    if token(context.client) is not None:
        with st.container(horizontal=True, vertical_alignment="center", key=f"token_{where}"):
            what = f"A token of {name}" if name else "A token"
            st.markdown(f"{what} is held for this session, on the dashboard's server alone.", width="content")
            st.button("Forget it", key=f"forget_token_{where}", on_click=forget, args=(agent,))
        return True
    # In a form what is typed in is sent by the button alone. It is not the form that empties the field: a refresh that
    # is asked for in the same moment would bring the empty text and the click together.
    field = f"token_field_{where}_{context.agent}"
    with (
        st.form(f"token_form_{where}_{context.agent}", border=False),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        st.text_input(
            f"The token of {name}, to change something" if name else "The agent's token, to change something",
            type="password",
            autocomplete="off",
            key=field,
            help="Without it the page only reads. It is KVATLAS_TOKEN, or in KVATLAS_TOKEN_FILE, of the agent.",
        )
        st.form_submit_button("Use it", on_click=_use, args=(agent, field))
    if st.session_state.get(_UNFIT) == field:
        show_condition(UNFIT)
    return False


def _use(agent: str, field: str) -> None:
    """Called by the click, once. The field is emptied: the page keeps nothing of it."""
    typed = str(st.session_state[field]).strip()
    st.session_state[field] = ""
    fits = is_token(typed)
    if typed and fits:
        _keep(agent, typed)
    st.session_state[_UNFIT] = None if fits else field


def is_token(text: str) -> bool:
    """Can a header carry it? Else the client could not even ask."""
    return text.isascii() and text.isprintable() and " " not in text


def change(
    client: AgentClient, call: Callable[[AgentClient], Answer], *, needs_token: bool = True
) -> Answer | Condition:
    """Have the agent change something, with its token; where it does not, why.

    A token that the agent does not know is forgotten. `needs_token` false: see local_page.
    """
    held = token(client)
    if held is None and needs_token:
        return NO_TOKEN
    with client.with_token(held or "") as writer:
        try:
            return call(writer)
        except AgentUnavailable as error:
            what = f"Whether that was done is not known: {source().reason(error)}"
            return Condition("error", what, "Look, then try again.")
        except AgentRefused as error:
            if error.status == 401:
                forget(client.url)
            return refused(error)
