"""Alerts: what fires and what to do about it, what is over, who is told, and what is muted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import streamlit as st

from agent.client import AgentClient
from agent.wire.alerts import AlertList, MuteOrder, SinkTrial, SinkTrialOrder
from dashboard import address, alert_cards, exports, widgets
from dashboard.context import Context, ask, plain
from dashboard.firing import AGENT
from dashboard.local_page import goes_without_token
from dashboard.operator_token import ask_token, change
from dashboard.source import SLOW_REFRESH_SECONDS, timed

ANY = "any"
LASTING = {"15 min": 900, "1 h": 3600, "4 h": 14_400, "1 d": 86_400, "7 d": 604_800}
_SHOWN = "alerts_shown"  # a list of the answer that is on the page, for the files: these are made in another thread


def show(context: Context) -> None:
    """What changes by itself is refreshed; what the operator fills in is not."""
    shown: list[AlertList] = st.session_state.setdefault(_SHOWN, [])
    st.fragment(_standing, run_every=context.every(SLOW_REFRESH_SECONDS))(context, shown)
    exports.offer("alerts", lambda: [row for found in shown for row in alert_cards.rows_of(found)])
    st.html(widgets.heading_html("Mutes"))
    engines = ask(context.client.engines)
    if engines is None:
        return
    needs_token = not goes_without_token(engines.agent, context.client)
    may_change = ask_token("alerts") if needs_token else True
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
                ended = may_change and st.button("End it", key=f"end_mute_{one.id}")
            end = partial(AgentClient.unmute, id=one.id)
            if ended and change(context.client, end, needs_token=needs_token) is not None:
                st.rerun()


def _mute_form(context: Context, rules: Sequence[str], engines: Sequence[str], needs_token: bool) -> None:
    with st.form("mute_form", clear_on_submit=True):
        st.html(widgets.heading_html("Mute", "what fires still when it ends is told then"))
        first, second, third = st.columns(3)
        rule = first.selectbox("Rule", [ANY, *rules], key="mute_rule")
        engine = second.selectbox("Engine", [ANY, *engines], key="mute_engine")
        lasting = third.selectbox("For", list(LASTING), index=1, key="mute_for")
        author = first.text_input("Your name", key="mute_author")
        comment = second.text_input("Why", key="mute_comment")
        sent = st.form_submit_button("Mute")
    if not sent:
        return
    order = MuteOrder(
        rule=None if rule == ANY else rule,
        engine=None if engine == ANY else engine,
        seconds=LASTING[lasting or "1 h"],
        author=author,
        comment=comment,
    )
    made = change(context.client, lambda writer: writer.mute(order), needs_token=needs_token)
    if made is not None:
        st.success(plain(f"Muted: {alert_cards.mute_text(made, made.created_unix)}"))


def _trials(context: Context, sinks: Sequence[str], needs_token: bool) -> None:
    with st.form("trial_form"):
        st.html(widgets.heading_html("Test a receiver", "one message that says that it is a test"))
        if not sinks:
            st.html(widgets.note_html("No receiver is set up."))
        sink = st.selectbox("Receiver", sinks, key="trial_sink")
        sent = st.form_submit_button("Send it", disabled=not sinks)
    if not sent or sink is None:
        return
    order = SinkTrialOrder(sink=sink, author="the dashboard")
    with st.spinner("Waiting for the receiver"):
        made = change(context.client, lambda writer: writer.test_sink(order), needs_token=needs_token)
    if made is not None:
        (st.success if made.sent else st.error)(plain(_told(made)))


def _told(made: SinkTrial) -> str:
    if made.sent:
        return f"{made.sink} took the message in {made.seconds:.2f} s."
    status = f", HTTP {made.status}" if made.status is not None else ""
    return f"{made.sink} did not take the message ({made.reason}{status}); {made.then}."
