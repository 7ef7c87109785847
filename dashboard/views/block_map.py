"""The block map of a pool: its colours, whose blocks are lit, and the files of what it shows."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from agent.wire import EngineSummary, MapCells
from dashboard import address, colouring, exports, figures, widgets
from dashboard.colouring import Colouring
from dashboard.context import Context, ask
from dashboard.figure_component import show_figure
from dashboard.map_rows import map_rows
from dashboard.source import MAP_CELLS, REFRESH_SECONDS
from dashboard.wording import counted, shortened

MAP_HEIGHT = 456
COLOURS = ("state", "owner", "age", "references")
PICKER = "colour_picker"
_SLOTS = "owner_slots"


def show_block_map(engine: EngineSummary, context: Context) -> None:
    """One refresh of the map and what stands above it."""
    request = address.get(address.REQUEST)
    cells = ask(lambda: context.client.map(engine.id, cells=MAP_CELLS, request=request))
    if cells is None:
        return
    by = _head(engine, cells)
    colours = _colouring(by, cells, context, _slots(context))
    notes = [_doubt(engine), widgets.map_note(cells.blocks_per_cell) if by == "state" else _cell_note(by, cells)]
    if colours is None:
        notes.append(f"this map tells no {by}: shown by state")
    if request:
        notes.append(_lit_note(request, cells))
    legend = widgets.legend_html(colours.legend) if colours and colours.legend else ""
    st.html(widgets.note_html(" · ".join(note for note in notes if note)) + legend)
    if request and cells.requested is not None:
        base = colours or colouring.by_state(cells, context.theme)
        colours = colouring.lit(base, cells.requested, context.theme.ground)
    show_figure(
        figures.block_map(cells, context.theme, incarnation=engine.incarnation, colouring=colours),
        key="block_map",
        label=f"Block map of {engine.id} by {by}",
        height=MAP_HEIGHT,
        expires_ms=context.expires_ms(REFRESH_SECONDS),
    )


def _head(engine: EngineSummary, cells: MapCells) -> str:
    """The heading, the choice of colours and the files; returns what the colours tell."""
    named = address.get(address.COLOUR)
    by = named if named in COLOURS else COLOURS[0]
    if st.session_state.get(PICKER) != by:
        st.session_state[PICKER] = by
    with st.container(key="map_head", horizontal=True, vertical_alignment="center"):
        st.html(widgets.heading_html("Block map"), width="content")
        st.segmented_control(
            "Colour by",
            COLOURS,
            key=PICKER,
            format_func=str.capitalize,
            required=True,
            on_change=_colour_picked,
            label_visibility="collapsed",
            width="content",
        )
        exports.offer("map", lambda: map_rows(cells), pool=engine.id, sequence=cells.sequence)
    return by


def _colour_picked() -> None:
    picked = st.session_state[PICKER]
    address.put(address.COLOUR, None if picked == COLOURS[0] else picked)


def _slots(context: Context) -> Mapping[str, int]:
    """Colours that owners of this pool had before."""
    kept: tuple[tuple[str, str], Mapping[str, int]] | None = st.session_state.get(_SLOTS)
    return kept[1] if kept is not None and kept[0] == context.pool_key else {}


def _colouring(by: str, cells: MapCells, context: Context, before: Mapping[str, int]) -> Colouring | None:
    """None where the map does not tell what was asked for."""
    if by != "owner":
        return colouring.BY[by](cells, context.theme)
    slots = colouring.owner_slots(cells, len(context.theme.series), before)
    st.session_state[_SLOTS] = context.pool_key, slots
    return colouring.by_owner(cells, context.theme, slots)


def _doubt(engine: EngineSummary) -> str:
    doubt = engine.state if engine.state != "live" else "degraded" if engine.degraded else ""
    return f"{doubt}, not the present" if doubt else ""


def _cell_note(by: str, cells: MapCells) -> str:
    if cells.blocks_per_cell == 1:
        return "one block a cell, in address order"
    which = {"owner": "the owner of most", "age": "the most recent touch", "references": "the highest count"}[by]
    return f"{counted(cells.blocks_per_cell, 'block')} a cell, in address order: {which}"


def _lit_note(request: str, cells: MapCells) -> str:
    name = shortened(request, 24)
    if cells.requested is None:
        return f"{name} is not among the live sequences" if cells.owner is not None else "this map tells no owners"
    blocks, where = sum(cells.requested), sum(1 for each in cells.requested if each)
    return f"lit: {counted(blocks, 'block')} that {name} was first to hold, in {counted(where, 'cell')}"
