"""The chosen pool at any instant that is kept: a scrubber over its frames, metrics around it, what happened, and the
black boxes of engines that ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire.history import FrameCells, FrameTimes, Mark
from dashboard import address, exports, figures, past, timeline, widgets
from dashboard.conditions import refused
from dashboard.context import Answer, Context, ask, show_condition
from dashboard.figure_component import show_figure
from dashboard.source import MAP_CELLS, SLOW_REFRESH_SECONDS, client, source, timed
from dashboard.views.black_boxes import BOXES_SECONDS, show_boxes
from dashboard.wording import visible

MAP_HEIGHT = 380
POINTS = 300
INSTANTS = 600
PLAY_SECONDS = 1.0
STILL_SECONDS = 15.0  # what is past stays, but an agent that did not answer is asked again
SPANS = {
    "2 min": 120,
    "10 min": 600,
    "1 h": 3600,
    "6 h": 21_600,
    "1 day": 86_400,
    "7 days": 604_800,
    "30 days": 2_592_000,
}
DEFAULT_SPAN = "10 min"
MARKS_SHOWN = 200
NOW = math.inf  # the scrubber's last position
_END, _PLAYING, _SLIDER, _SPAN, _METRICS = "time_end", "time_playing", "time_slider", "time_span", "time_metrics"
_ROWS = "time_mark_rows"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The range that is shown. `at_unix` None: it ends now, and goes on."""

    span: str
    start_unix: float
    end_unix: float
    at_unix: float | None


def show(context: Context) -> None:
    """The scene, refreshed often while it is live or played; and the black boxes, which do not change."""
    if context.pool is None:
        return
    address.set_anew(_SLIDER)
    mode = _mode()
    seconds = {"live": SLOW_REFRESH_SECONDS, "playing": PLAY_SECONDS}.get(mode, STILL_SECONDS)
    st.fragment(_scene, run_every=context.every(seconds))(context, context.pool, mode)
    st.fragment(show_boxes, run_every=context.every(BOXES_SECONDS))(context)


def _mode() -> str:
    if _instant() is None:
        return "live"
    return "playing" if st.session_state.get(_PLAYING) else "still"


def _instant() -> float | None:
    """As the address names it; what is no number counts as none."""
    try:
        at = float(address.get(address.TIME) or "nan")
    except ValueError:
        return None
    return at if 0 < at < 1e11 else None


def _scene(context: Context, pool: str, mode: str) -> None:
    with timed("time"):
        if st.session_state.get(_PLAYING):
            _advance(context, pool)
        if _mode() != mode:
            st.rerun()  # how often this runs is decided where it is called
        with st.container(key="time_controls", horizontal=True, vertical_alignment="center"):
            _pick_span()
            stretch = _stretch()
            times = _times(context, pool, stretch)
            _buttons(times, stretch, mode)
        frame = _frame(context, pool, times, stretch) if times is not None else None
        if times is not None and times.times_unix:
            _scrubber(times, frame, stretch, mode)
        if frame is not None:
            _map(context, pool, frame)
        _metrics(context, pool, stretch, frame)


# ---- choosing an instant --------------------------------------------------------------------------------------------


def _pick_span() -> None:
    st.session_state[_SPAN] = _span()
    st.segmented_control(
        "Span", list(SPANS), key=_SPAN, on_change=_span_picked, label_visibility="collapsed", required=True
    )


def _span() -> str:
    named = address.get(address.SPAN)
    return named if named in SPANS else DEFAULT_SPAN


def _span_picked() -> None:
    picked = st.session_state[_SPAN]
    address.put(address.SPAN, None if picked == DEFAULT_SPAN else picked)
    if (at := _instant()) is not None:
        st.session_state[_END] = min(client().now_unix, at + SPANS[picked] / 2)


def _stretch() -> Stretch:
    """Live, it ends now, which in a replay is the place that it has come to. At an instant its end stays, so that the
    scrubber does not move under the hand."""
    span, at, now = _span(), _instant(), client().now_unix
    seconds = SPANS[span]
    if at is None:
        st.session_state[_END] = now
        return Stretch(span, now - seconds, now, None)
    end = st.session_state.get(_END)
    if end is None or not end - seconds <= at <= end:
        end = st.session_state[_END] = max(at, min(now, at + seconds / 2))
    return Stretch(span, end - seconds, end, at)


def _go(at: float | None) -> None:
    address.put(address.TIME, None if at is None else f"{at:.3f}")


def _stop_at(at: float | None) -> None:
    st.session_state[_PLAYING] = False
    _go(at)


def _buttons(times: FrameTimes | None, stretch: Stretch, mode: str) -> None:
    instants = times.times_unix if times is not None else []
    at = stretch.at_unix if stretch.at_unix is not None else stretch.end_unix
    earlier = past.before(instants, past.at_or_before(instants, at) or at)
    later = past.after(instants, at) if stretch.at_unix is not None else None
    start = stretch.at_unix if later is not None else instants[0] if instants else None  # from the end, all of it
    st.button("Earlier", key="time_earlier", disabled=earlier is None, on_click=_stop_at, args=(earlier,))
    if mode == "playing":
        st.button("Stop", key="time_play", on_click=_stop)
    else:
        st.button("Play", key="time_play", disabled=len(instants) < 2, on_click=_play, args=(start,))
    st.button("Later", key="time_later", disabled=later is None, on_click=_stop_at, args=(later,))
    st.button("Back to live", key="time_live", disabled=mode == "live", on_click=_stop_at, args=(None,))


def _play(start: float) -> None:
    st.session_state[_PLAYING] = True
    _go(start)


def _stop() -> None:
    st.session_state[_PLAYING] = False


def _advance(context: Context, pool: str) -> None:
    """One step of the play; it ends at the last instant of the range."""
    stretch = _stretch()
    times = _times(context, pool, stretch)
    following = past.after(times.times_unix, stretch.at_unix) if times is not None and stretch.at_unix else None
    if following is None:
        st.session_state[_PLAYING] = False
    else:
        _go(following)


def _times(context: Context, pool: str, stretch: Stretch) -> FrameTimes | None:
    """The instants of the range; None where there are none to be had, which is said."""
    return _ask_past(lambda: context.client.frame_times(pool, stretch.start_unix, stretch.end_unix, INSTANTS), "")


def _ask_past(call: Callable[[], Answer], without: str) -> Answer | None:
    """As `ask`; where the agent keeps no past, which is no fault, the page says `without` instead."""
    try:
        return call()
    except AgentRefused as error:
        if error.error != "not_kept":
            show_condition(refused(error))
        elif without:
            st.html(widgets.note_html(f"{error.message}. {without}"))
    except AgentUnavailable as error:
        st.html(widgets.note_html(f"No data: {source().reason(error)}"))
    return None


def _scrubber(times: FrameTimes, frame: FrameCells | None, stretch: Stretch, mode: str) -> None:
    """Its last position is the present, which stays the same one while instants are added before it."""
    instants = times.times_unix
    shown = frame.time_unix if frame is not None else instants[-1]
    labels = dict(zip(instants, past.moments(instants), strict=True)) | {NOW: "live"}
    chosen = NOW if stretch.at_unix is None else min(instants, key=lambda one: abs(one - shown))
    if st.session_state.get(_SLIDER) != chosen:
        st.session_state[_SLIDER] = chosen
    st.select_slider(
        "Instant, UTC",
        [*instants, NOW],
        key=_SLIDER,
        format_func=lambda one: labels[one],
        on_change=_scrubbed,
        label_visibility="collapsed",
        disabled=mode == "playing",
    )
    st.html(widgets.note_html(past.instants_note(times, stretch.at_unix is None)))


def _scrubbed() -> None:
    chosen = st.session_state[_SLIDER]
    _stop_at(None if chosen == NOW else chosen)


# ---- what is shown --------------------------------------------------------------------------------------------------


def _frame(context: Context, pool: str, times: FrameTimes, stretch: Stretch) -> FrameCells | None:
    at = stretch.at_unix
    if times.first_unix is None or (at is not None and at < times.first_unix):
        first = "" if times.first_unix is None else f" The oldest frame is of {past.moment(times.first_unix)}."
        st.html(widgets.note_html(f"No frame of this pool is kept of that time.{first} Choose a later one."))
        return None
    return ask(lambda: context.client.frame(pool, at, MAP_CELLS))


def _map(context: Context, pool: str, frame: FrameCells) -> None:
    left, right = st.columns([2.35, 1], gap="medium")
    with right:
        st.html(
            widgets.heading_html("At this instant", past.moment(frame.time_unix))
            + past.few_tiles_html(past.tiles_of(frame))
            + past.states_html(frame, context.theme)
            + widgets.note_html(past.frame_note(frame))
        )
    with left.container(key="map_box"):
        st.html(widgets.heading_html("Block map", widgets.map_note(frame.blocks_per_cell)))
        show_figure(
            figures.block_map(past.cells_of(frame), context.theme, incarnation=frame.incarnation),
            key="time_map",
            label=f"Block map of {pool} at {past.moment(frame.time_unix)}",
            height=MAP_HEIGHT,
            expires_ms=None if _instant() is not None else context.expires_ms(SLOW_REFRESH_SECONDS),
        )


def _metrics(context: Context, pool: str, stretch: Stretch, frame: FrameCells | None) -> None:
    with st.container(key="time_metrics_head", horizontal=True, vertical_alignment="center"):
        st.html(widgets.heading_html("Metrics", "mean and range of each bucket, UTC; shaded: nothing was sampled"))
        st.pills(
            "Metrics",
            list(timeline.METRICS),
            default=list(timeline.DEFAULT_METRICS),
            selection_mode="multi",
            key=_METRICS,
            label_visibility="collapsed",
        )
    chosen = [timeline.METRICS[name] for name in timeline.METRICS if name in (st.session_state.get(_METRICS) or [])]
    listing = ask(context.client.engines)
    if listing is None:
        return
    lines = ask(lambda: _lines(context, pool, chosen, stretch, listing.agent.interval_seconds))
    if lines is None:
        return
    marks = _marks(context, pool, stretch)
    with st.container(key="time_figure_box"):
        show_figure(
            timeline.timeline(
                lines,
                timeline.episodes_of(marks or [], stretch.start_unix),
                pool=pool,
                start_unix=stretch.start_unix,
                end_unix=stretch.end_unix,
                at_unix=stretch.at_unix if stretch.at_unix is None or frame is None else frame.time_unix,
                threshold=listing.agent.threshold,
                theme=context.theme,
            ),
            key="timeline",
            label=f"Metrics of {pool}, with what happened",
            height=timeline.height_of(len(lines)),
            expires_ms=None if stretch.at_unix is not None else context.expires_ms(SLOW_REFRESH_SECONDS),
        )
    exports.offer("time", lambda: past.rows_of(lines), id=pool, from_unix=stretch.start_unix, to_unix=stretch.end_unix)
    if marks is not None:
        _mark_table(marks)


def _lines(
    context: Context, pool: str, chosen: Sequence[timeline.Metric], stretch: Stretch, interval_seconds: float
) -> list[timeline.Line]:
    names = dict.fromkeys(name for metric in chosen for name in metric.of)
    seconds = stretch.end_unix - stretch.start_unix
    # Two samples a bucket at least: with one, the jitter of sampling would leave gaps that mean nothing.
    points = min(POINTS, max(2, int(seconds / (2 * max(interval_seconds, 1.0)))))
    histories = {
        name: context.client.history(pool, name, seconds, points, until_unix=stretch.end_unix) for name in names
    }
    return [timeline.line_of(metric, histories) for metric in chosen]


def _marks(context: Context, pool: str, stretch: Stretch) -> list[Mark] | None:
    found = _ask_past(
        lambda: context.client.marks(pool, stretch.start_unix, stretch.end_unix, holds=False), past.KEEP_A_PAST
    )
    return found.marks if found is not None else None


def _mark_table(marks: Sequence[Mark]) -> None:
    """Newest first; a row that is chosen takes the page to its instant."""
    shown = list(reversed(marks))[:MARKS_SHOWN]
    st.session_state[_ROWS] = [mark.time_unix for mark in shown]
    more = f"; the newest {MARKS_SHOWN} of {len(marks):,}" if len(marks) > MARKS_SHOWN else ""
    st.html(widgets.heading_html("What happened", f"choose a row to go to its instant{more}"))
    if not shown:
        st.html(widgets.note_html("Nothing: no engine ended or began, nothing was moved, and no alert fired or ended."))
        return
    st.dataframe(
        [{"UTC": past.moment(mark.time_unix), "what": mark.kind, "text": visible(mark.text)} for mark in shown],
        key="time_marks",
        hide_index=True,
        height=220,
        on_select=_mark_chosen,
        selection_mode="single-row",
        column_config={"UTC": st.column_config.TextColumn(width=150), "what": st.column_config.TextColumn(width=90)},
    )


def _mark_chosen() -> None:
    rows = st.session_state["time_marks"]["selection"]["rows"]
    if rows:
        _stop_at(st.session_state[_ROWS][rows[0]])
