"""Alerts: what fires and what to do about it, what is over, who is told, and what is muted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import streamlit as st

from agent.wire.alerts import AlertList, MuteOrder, MuteRecord, SinkTrial, SinkTrialOrder
from dashboard import address, alert_cards, exports, widgets
from dashboard.conditions import Condition
from dashboard.context import Context, ask, plain, show_condition
from dashboard.firing import AGENT
from dashboard.local_page import goes_without_token
from dashboard.operator_token import ask_token, change
from dashboard.source import SLOW_REFRESH_SECONDS, timed

ANY = "any"
LASTING = {"15 min": 900, "1 h": 3600, "4 h": 14_400, "1 d": 86_400, "7 d": 604_800}
_SHOWN = "alerts_shown"  # by agent, a list of the answer on the page, for the files: these are made in another thread
_OUTCOME = "alerts_outcome"  # what became of the last click that changed mutes
_TRIAL = "alerts_trial"  # by a click: a message to be sent yet, and the address of the agent that is to send it
_RULE, _ENGINE, _LASTING, _AUTHOR, _COMMENT = "mute_rule", "mute_engine", "mute_for", "mute_author", "mute_comment"


@dataclass(slots=True)
class Outcome:
    """What a click came to: why nothing was changed, or the mute that was made; None: it was ended.

    It stands where it was clicked until the whole page runs again.
    """

    agent: str  # its address
    place: Literal["mutes", "form"]
    found: Condition | MuteRecord | None
    shown: bool = False


def show(context: Context) -> None:
    """What changes by itself is refreshed; what the operator fills in is not."""
    _drop_outcome()
    shown: list[AlertList] = st.session_state.setdefault(_SHOWN, {}).setdefault(context.client.url, [])
    st.fragment(_standing, run_every=context.every(SLOW_REFRESH_SECONDS))(context, shown)
    exports.offer("alerts", lambda: [row for found in shown for row in alert_cards.rows_of(found)])
    st.html(widgets.heading_html("Mutes"))
    engines = ask(context.client.engines)
    if engines is None:
        return
    needs_token = not goes_without_token(engines.agent, context.client)
    may_change = ask_token(context, "alerts") if needs_token else True
    st.fragment(_mutes, run_every=context.every(SLOW_REFRESH_SECONDS))(context, may_change, needs_token)
    found = ask(context.client.alerts) if may_change else None
    if found is not None:
        names = sorted({*(one.engine_id for one in engines.engines), *(one.engine_id for one in engines.unmapped)})
        left, right = st.columns([2, 1], gap="medium")
        with left:
            _mute_form(context, found.rules, names, needs_token)
        with right:
            _trials(context, [one.name for one in found.sinks], needs_token)


def _standing(context: Context, shown: list[AlertList]) -> None:
    with timed("alerts"):
        found = ask(context.client.alerts)
        listing = ask(context.client.engines) if found is not None else None
        if found is None or listing is None:
            return
        shown[:] = [found]
        told = [one for one in found.open if one.state != "pending"]
        pending = [one for one in found.open if one.state == "pending"]
        st.html(
            widgets.tiles_html(alert_cards.tiles_of(found, replay=listing.agent.replay is not None))
            + widgets.heading_html("Firing", "the worst first")
            + alert_cards.cards_html(told, found.now_unix, "No alert fires.")
        )
        st.html(alert_cards.links_html(told, address.get(AGENT)) or "<span></span>")
        st.html(
            widgets.heading_html("Pending", "beyond their threshold, not for long enough yet")
            + alert_cards.cards_html(pending, found.now_unix, "None is pending.")
            + widgets.heading_html("Over", "since the agent started, newest first")
            + alert_cards.history_html(found.recent)
            + widgets.heading_html("Receivers", "who is told")
            + alert_cards.sinks_html(found.sinks)
        )


def _mutes(context: Context, may_change: bool, needs_token: bool) -> None:
    """Each mute, with a button to end it where the operator may."""
    with timed("mutes"):
        found = ask(context.client.alerts)
        if found is None:
            return
        if not found.mutes:
            st.html(widgets.note_html("Nothing is muted."))
        for one in found.mutes:
            with st.container(horizontal=True, vertical_alignment="center", key=f"mute_{one.id}"):
                st.markdown(plain(alert_cards.mute_text(one, found.now_unix)), width="content")
                if may_change:
                    st.button("End it", key=f"end_mute_{one.id}", on_click=_end, args=(context, one.id, needs_token))
        _show_outcome(context, "mutes")


def _end(context: Context, id: str, needs_token: bool) -> None:
    """Called by the click, once, whichever part of the page runs next."""
    ended = change(context.client, lambda writer: writer.unmute(id), needs_token=needs_token)
    found = ended if isinstance(ended, Condition) else None
    st.session_state[_OUTCOME] = Outcome(context.client.url, "mutes", found)


def _mute_form(context: Context, rules: Sequence[str], engines: Sequence[str], needs_token: bool) -> None:
    with st.form("mute_form"):
        st.html(widgets.heading_html("Mute", "what fires still when it ends is told then"))
        first, second, third = st.columns(3)
        first.selectbox("Rule", [ANY, *rules], key=_RULE)
        second.selectbox("Engine", [ANY, *engines], key=_ENGINE)
        third.selectbox("For", list(LASTING), index=1, key=_LASTING)
        first.text_input("Your name", key=_AUTHOR)
        second.text_input("Why", key=_COMMENT)
        st.form_submit_button("Mute", on_click=_mute, args=(context, needs_token))
    _show_outcome(context, "form")


def _mute(context: Context, needs_token: bool) -> None:
    """Called by the click, once. The texts stay where the agent refuses them: they are to be mended, not typed anew."""
    filled = st.session_state
    order = MuteOrder(
        rule=None if filled[_RULE] == ANY else filled[_RULE],
        engine=None if filled[_ENGINE] == ANY else filled[_ENGINE],
        seconds=LASTING[filled[_LASTING] or "1 h"],
        author=filled[_AUTHOR],
        comment=filled[_COMMENT],
    )
    made = change(context.client, lambda writer: writer.mute(order), needs_token=needs_token)
    if isinstance(made, MuteRecord):
        st.session_state[_AUTHOR] = st.session_state[_COMMENT] = ""
    st.session_state[_OUTCOME] = Outcome(context.client.url, "form", made)


def _drop_outcome() -> None:
    """Once in each run of the whole page: what was shown before that is of an earlier click."""
    outcome: Outcome | None = st.session_state.get(_OUTCOME)
    if outcome is not None and outcome.shown:
        del st.session_state[_OUTCOME]


def _show_outcome(context: Context, place: Literal["mutes", "form"]) -> None:
    outcome: Outcome | None = st.session_state.get(_OUTCOME)
    if outcome is None or (outcome.agent, outcome.place) != (context.client.url, place):
        return
    outcome.shown = True
    if isinstance(outcome.found, Condition):
        show_condition(outcome.found)
    elif outcome.found is not None:
        st.success(plain(f"Muted: {alert_cards.mute_text(outcome.found, outcome.found.created_unix)}"))


def _trials(context: Context, sinks: Sequence[str], needs_token: bool) -> None:
    with st.form("trial_form"):
        st.html(widgets.heading_html("Test a receiver", "one message that says that it is a test"))
        if not sinks:
            st.html(widgets.note_html("No receiver is set up."))
        st.selectbox("Receiver", sinks, key="trial_sink")
        st.form_submit_button("Send it", disabled=not sinks, on_click=_ask_trial, args=(context,))
    # A receiver may take its time: not in the click itself, which the whole session waits for.
    agent, sink = st.session_state.pop(_TRIAL, None) or ("", None)
    if sink is None or agent != context.client.url:
        return
    order = SinkTrialOrder(sink=sink, author="the dashboard")
    with st.spinner("Waiting for the receiver"):
        made = change(context.client, lambda writer: writer.test_sink(order), needs_token=needs_token)
    if isinstance(made, Condition):
        show_condition(made)
    else:
        (st.success if made.sent else st.error)(plain(_told(made)))


def _ask_trial(context: Context) -> None:
    st.session_state[_TRIAL] = context.client.url, st.session_state["trial_sink"]


def _told(made: SinkTrial) -> str:
    if made.sent:
        return f"{made.sink} took the message in {made.seconds:.2f} s."
    status = f", HTTP {made.status}" if made.status is not None else ""
    return f"{made.sink} did not take the message ({made.reason}{status}); {made.then}."
