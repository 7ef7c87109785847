"""Black boxes of engines that ended: which there are, and one of them opened."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from agent.client import AgentRefused, AgentUnavailable
from agent.wire import History, HistoryPoint
from agent.wire.blackbox import BlackBox, BoxSummary
from dashboard import address, boxes, exports, figures, past, timeline, widgets
from dashboard.conditions import refused
from dashboard.context import Context, show_condition
from dashboard.figure_component import show_figure
from dashboard.source import MAP_CELLS, source, timed
from dashboard.wording import counted

MAP_HEIGHT = 330
BOXES_SHOWN = 100
BOXES_SECONDS = 6.0  # from one look at the list to the next
_OPEN = "open_black_box"  # the box that is open, with its agent: it does not change, so that it is fetched once
_ROWS = "black_box_rows"
METRICS = ("F", "Live share", "Waiting requests")


def show_boxes(context: Context) -> None:
    """The list, which grows with each engine that ends, and below it the one that is chosen."""
    with timed("black boxes"), st.container(key="black_boxes"):
        st.html(widgets.heading_html("Black boxes", "engines that ended, with their last map, events and history"))
        try:
            listing = context.client.black_boxes(limit=BOXES_SHOWN)
        except AgentRefused as error:
            if error.error == "not_kept":
                st.html(widgets.note_html(f"None are kept. {past.KEEP_A_PAST}"))
            else:
                show_condition(refused(error))
            return
        except AgentUnavailable:
            return  # the banner above every view says so
        for one in listing.damaged:
            st.html(widgets.note_html(f"Not readable: {one}"))
        if not listing.boxes:
            st.html(widgets.note_html("None yet: no engine has ended since this agent keeps them."))
            return
        _list(listing.boxes, listing.total)
        name = address.get(address.BOX)
        if not name:
            return
        try:
            box = _opened(context, name)
        except AgentRefused as error:
            show_condition(refused(error))
            return
        except AgentUnavailable as error:
            st.html(widgets.note_html(f"No data yet: {source().reason(error)}"))
            return
        _contents(context, box)


def _list(found: Sequence[BoxSummary], total: int) -> None:
    st.session_state[_ROWS] = [one.name for one in found]
    if total > len(found):
        st.html(widgets.note_html(f"The last {len(found)} of {total:,}."))
    st.dataframe(
        [boxes.row_of(one) for one in found],
        key="black_box_table",
        hide_index=True,
        height=min(220, 38 + 35 * len(found)),
        on_select=_chosen,
        selection_mode="single-row",
    )
    open_one = address.get(address.BOX)
    with st.container(horizontal=True, key="black_box_buttons"):
        newest = found[0].name
        st.button("Open the last one", key="open_last_box", disabled=open_one == newest, on_click=_open, args=(newest,))
        st.button("Close", key="close_box", disabled=open_one is None, on_click=_open, args=(None,))


def _chosen() -> None:
    rows = st.session_state["black_box_table"]["selection"]["rows"]
    if rows:
        _open(st.session_state[_ROWS][rows[0]])


def _open(name: str | None) -> None:
    address.put(address.BOX, name)


def _opened(context: Context, name: str) -> BlackBox:
    """Raises what the client does."""
    kept: tuple[str, BlackBox] | None = st.session_state.get(_OPEN)
    if kept is not None and (kept[0], kept[1].summary.name) == (context.client.url, name):
        return kept[1]
    with st.spinner("Opening the black box"):
        box = context.client.black_box(name, MAP_CELLS)
    st.session_state[_OPEN] = context.client.url, box
    return box


def _contents(context: Context, box: BlackBox) -> None:
    st.html(widgets.heading_html(box.summary.id, boxes.ended_text(box.summary)) + boxes.facts_html(box))
    left, right = st.columns([2.35, 1], gap="medium")
    with right:
        st.html(boxes.map_numbers_html(box, context.theme) + boxes.requests_html(box))
    with left.container(key="box_map_box"):
        st.html(widgets.heading_html("Last map"))
        cells = boxes.cells_of(box)
        if cells is None:
            st.html(widgets.note_html(f"No map: {box.map_reason}."))
        else:
            show_figure(
                figures.block_map(cells, context.theme, incarnation=box.summary.incarnation),
                key="box_map",
                label=f"Last block map of {box.summary.id}",
                height=MAP_HEIGHT,
                expires_ms=None,
            )
    _last_hour(context, box)
    missed = f", {counted(box.events_missed, 'more was', 'more were')} overwritten" if box.events_missed else ""
    st.html(
        widgets.heading_html("Last events", f"the newest {len(box.events)} of {box.events_total:,} in the box{missed}")
    )
    st.dataframe(boxes.event_rows(box), key="box_events", hide_index=True, height=240)
    exports.offer("black-box-events", lambda: boxes.event_rows(box), box=box.summary.name)


def _last_hour(context: Context, box: BlackBox) -> None:
    """From when the agent first saw it on."""
    lines = [timeline.line_of(timeline.METRICS[name], _histories(box)) for name in METRICS]
    seen = boxes.seen_from(box)
    if seen is None:
        return
    end = box.history.start_unix[-1] + box.history.step_seconds
    st.html(widgets.heading_html("Its last hour", "or as much of it as this agent saw"))
    with st.container(key="box_figure_box"):
        show_figure(
            timeline.timeline(
                lines,
                timeline.episodes_of([one for one in box.marks if seen <= one.time_unix < end], seen),
                pool=box.summary.name,
                start_unix=seen,
                end_unix=end,
                at_unix=box.summary.ended_unix,
                threshold=None,
                theme=context.theme,
            ),
            key="box_timeline",
            label=f"Metrics of {box.summary.id} before it ended",
            height=timeline.height_of(len(lines)),
            expires_ms=None,
        )


def _histories(box: BlackBox) -> dict[str, History]:
    """As the API's own histories, so that they are drawn alike; a metric that was not seen is empty."""
    nothing: list[list[float | None]] = [[None, None, None]] * len(box.history.start_unix)
    return {
        name: History(
            id=box.summary.id,
            metric=name,
            step_seconds=box.history.step_seconds,
            points=[
                HistoryPoint(time_unix=at, minimum=low, mean=mean, maximum=high)
                for at, (low, mean, high) in zip(
                    box.history.start_unix, box.history.columns.get(name) or nothing, strict=True
                )
            ],
        )
        for metric in METRICS
        for name in timeline.METRICS[metric].of
    }
