"""What the compaction policy does with the chosen pool and why; what a run would bring, and what runs brought; and the
switches, for who has the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from agent.client import AgentClient, AgentRefused
from agent.wire import compaction as wire_compaction
from dashboard import compaction_table, conditions, exports, jobs, operator_token, widgets
from dashboard.context import Context, ask, show_condition
from dashboard.local_page import goes_without_token
from dashboard.source import REFRESH_SECONDS, SLOW_REFRESH_SECONDS, source, timed
from dashboard.wording import counted, duration

ENTRIES = 300
RUN_SECONDS = 60.0
PoolKey = tuple[str, str]
_JOBS, _PLANS = "compaction_jobs", "compaction_plans"  # the last one of each pool, by Context.pool_key
_STARTED, _ASKED = "compaction_started", "compaction_asked"  # by a click: what it did, or a plan, is to be shown yet
_TARGET, _MOST, _VERIFY, _SURE = "compaction_target", "compaction_most", "compaction_verify", "compaction_sure"
WITHOUT = "This agent has no token and takes changes from its own machine, which this page is on."
READ_ONLY = "The agent takes no changes: it listens beyond its own machine and has no token. Set KVATLAS_TOKEN there."


def show(context: Context) -> None:
    """The state, refreshed; the actions, which keep what is typed in; and what was done, refreshed."""
    if context.pool is None:
        return
    # What was asked for is followed to its end, paused or not.
    followed = any(not job.taken_in for job in _jobs().values())
    seconds = REFRESH_SECONDS if followed else context.every(SLOW_REFRESH_SECONDS)
    st.fragment(_state, run_every=seconds)(context, context.pool)
    st.fragment(_actions)(context, context.pool)
    st.fragment(_past, run_every=context.every(SLOW_REFRESH_SECONDS))(context, context.pool)


def _state(context: Context, pool: str) -> None:
    if st.session_state.pop(_STARTED, False) or _take_in():
        # The whole page: whichever part of it runs first after a click, and at the end of what was asked for, after
        # which the actions, that do not refresh by themselves, may be used again.
        st.rerun()
    with timed("compaction"), st.container(key="compaction_state"):
        state = ask(lambda: context.client.compaction(pool))
        if state is None:
            return
        st.html(compaction_table.verdict_html(state) + widgets.tiles_html(compaction_table.tiles_of(state)))
        for note in compaction_table.notes_of(state):
            st.html(widgets.note_html(note))
        _job(context)
        st.html(
            widgets.heading_html("Decisions", "one row for each change of the reason, newest first")
            + compaction_table.verdicts_html(state)
        )


def _past(context: Context, pool: str) -> None:
    with timed("compactions"), st.container(key="compaction_past"):
        listing = ask(lambda: context.client.compactions(pool, limit=ENTRIES))
        if listing is None:
            return
        runs = compaction_table.runs_of(listing.entries)
        st.html(
            widgets.heading_html("Runs", "predicted → realised, newest first")
            + compaction_table.runs_html(runs)
            + widgets.heading_html("Done and asked for", f"of the last {ENTRIES} entries of the audit log")
            + compaction_table.asked_html(listing.entries)
        )
        if listing.unwritten:
            unwritten = counted(listing.unwritten, "entry is", "entries are")
            st.html(widgets.note_html(f"{unwritten} in memory alone: see the agent's log."))
        exports.offer("compactions", lambda: compaction_table.rows_of(runs), id=pool)


# ---- what was asked for from this page ------------------------------------------------------------------------------


def _jobs() -> dict[PoolKey, jobs.Job[Any]]:
    found: dict[PoolKey, jobs.Job[Any]] = st.session_state.setdefault(_JOBS, {})
    return found


def _take_in() -> bool:
    """Has any job ended since this was asked last, of whichever pool? A token that its agent does not know is gone."""
    ended = [job for job in _jobs().values() if job.done.is_set() and not job.taken_in]
    for job in ended:
        job.taken_in = True
        if isinstance(job.error, AgentRefused) and job.error.status == 401:
            operator_token.forget(job.agent)
    return bool(ended)


def _job(context: Context) -> None:
    job = _jobs().get(context.pool_key)
    if job is None:
        return
    if not job.done.is_set():
        st.info(f"{job.what}: asked for {duration(job.seconds)} ago, and under way.")
    elif job.error is not None:
        show_condition(hindrance(job.error))
    elif isinstance(job.answer, wire_compaction.CompactionRun):
        st.html(widgets.heading_html(job.what) + compaction_table.run_html(job.answer))
    elif isinstance(job.answer, wire_compaction.CompactionSwitch):
        st.success(f"Moves of live blocks are {'on' if job.answer.moving else 'off'} in the engine.")
    elif isinstance(job.answer, wire_compaction.RelocationSwitch):
        st.success(f"Relocating allocation is {'on' if job.answer.relocation else 'off'} in the engine.")


def hindrance(error: Exception) -> conditions.Condition:
    """What a job that did not come to its answer leaves to be said."""
    if isinstance(error, AgentRefused):
        return conditions.refused(error)
    if isinstance(error, jobs.NotAsked):
        what, action = "Nothing was changed: the dashboard's server can start no thread", "Close other pages of it"
        return conditions.Condition("error", f"{what} ({error}).", f"{action}, or raise its limit of processes.")
    what = f"Whether that was done is not known: {source().reason(error)}"
    return conditions.Condition("error", what, "Look at the state before you ask again.")


def _busy(context: Context) -> bool:
    job = _jobs().get(context.pool_key)
    return job is not None and not job.done.is_set()


def _start(context: Context, what: str, call: Callable[[AgentClient], Any], *, waits: bool = True) -> None:
    """Called by a click, once, even where the part of the page that it belongs to is not the one that runs next. All
    but the kill switch wait for what is under way in the same pool."""
    _take_in()  # a token that was refused meanwhile is not tried again
    if _busy(context) and waits:
        return
    writer = context.client.with_token(operator_token.token(context.client) or "")
    _jobs()[context.pool_key] = jobs.start(what, writer, call)
    st.session_state[_STARTED] = True


def _order(*, dry_run: bool = False) -> wire_compaction.CompactionOrder:
    """As the form says."""
    return wire_compaction.CompactionOrder(
        target=st.session_state[_TARGET],
        max_moves=int(st.session_state[_MOST]) or None,
        max_seconds=RUN_SECONDS,
        verify=bool(st.session_state.get(_VERIFY)),
        dry_run=dry_run,
    )


def _run(context: Context, pool: str) -> None:
    order = _order()
    _start(context, "Run", lambda writer: writer.compact(pool, order))


def _dry_run(context: Context, pool: str) -> None:
    order = _order(dry_run=True)
    _start(context, "What the engine would do", lambda writer: writer.compact(pool, order))


def _switch_relocation(context: Context, pool: str, words: str, on: bool) -> None:
    _start(context, words, lambda writer: writer.switch_relocation(pool, on))


def _kill(context: Context, pool: str) -> None:
    _start(context, "Kill switch", lambda writer: writer.switch_moving_off(pool), waits=False)


def _ask_plan(context: Context) -> None:
    st.session_state[_ASKED] = context.pool_key
    st.session_state[_STARTED] = True


# ---- actions --------------------------------------------------------------------------------------------------------


def _actions(context: Context, pool: str) -> None:
    if st.session_state.pop(_STARTED, False):
        st.rerun()
    with st.container(key="compaction_actions", border=True):
        _preview(context, pool)
        listing = ask(context.client.engines)
        if listing is None:
            return
        if not listing.agent.writes_enabled:
            st.html(widgets.note_html(READ_ONLY))
        elif goes_without_token(listing.agent, context.client):
            st.html(widgets.note_html(WITHOUT))
            _switches(context, pool)
        elif operator_token.ask_token(context, "compaction"):
            _switches(context, pool)


def _preview(context: Context, pool: str) -> None:
    """A plan costs the engine nothing, so that it needs no token."""
    with st.container(key="compaction_preview", horizontal=True, vertical_alignment="bottom"):
        st.number_input("Bring F down to", 0.0, 1.0, 0.10, 0.05, key=_TARGET, width=170)
        st.number_input("Moves at most, 0: no limit", 0, 1_000_000_000, 0, 100, key=_MOST, width=230)
        st.button("Preview the plan", key="compaction_plan_button", on_click=_ask_plan, args=(context,))
    plans: dict[PoolKey, wire_compaction.CompactionPlan | None] = st.session_state.setdefault(_PLANS, {})
    if st.session_state.pop(_ASKED, None) == context.pool_key:
        most = int(st.session_state[_MOST]) or None
        state = ask(
            lambda: context.client.compaction(pool, plan=True, target=st.session_state[_TARGET], max_moves=most)
        )
        plans[context.pool_key] = state.plan if state is not None else None
    plan = plans.get(context.pool_key)
    if plan is not None:
        st.html(
            widgets.heading_html("Plan", "by the agent, of its last sample; a run plans anew")
            + compaction_table.plan_html(plan)
        )


def _switches(context: Context, pool: str) -> None:
    busy = _busy(context)
    engine = ask(lambda: context.client.compaction(pool))
    if engine is None:
        return
    with st.container(key="compaction_run", horizontal=True, vertical_alignment="center"):
        st.button(
            "Run it now",
            key="compaction_run_button",
            type="primary",
            disabled=busy,
            on_click=_run,
            args=(context, pool),
        )
        st.button(
            "Ask the engine for its plan",
            key="compaction_dry_button",
            disabled=busy,
            on_click=_dry_run,
            args=(context, pool),
        )
        st.checkbox("Compare contents before each commit", key=_VERIFY)
    with st.container(key="compaction_switches", horizontal=True, vertical_alignment="center"):
        if engine.engine.relocation is None:
            st.html(widgets.note_html("This engine does not offer relocating allocation."), width="content")
        else:
            on = engine.engine.relocation
            words = "Switch relocation off" if on else "Switch relocation on"
            st.button(
                words,
                key="compaction_relocation_button",
                disabled=busy,
                on_click=_switch_relocation,
                args=(context, pool, words, not on),
            )
        # Of this pool alone: what is meant for one must not arm the switch of the next that is looked at.
        sure = st.checkbox("I mean it:", key=f"{_SURE}_{context.agent}_{pool}")
        st.button(
            "Switch all moves off",
            key="compaction_kill_button",
            disabled=not sure,
            on_click=_kill,
            args=(context, pool),
        )
        st.html(
            widgets.note_html("Ends a run under way. Only kvatlas compact --on allows moves again."), width="content"
        )
