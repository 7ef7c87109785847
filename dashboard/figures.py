"""Wire models in, Plotly figures out. Pure: no Streamlit, no clock, no network."""

from __future__ import annotations

import base64

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from agent.wire import History, MapCells
from dashboard.colouring import Colouring, by_state, cell_counts
from dashboard.palette import STATE_ORDER, Theme
from dashboard.raster import indexed_png
from dashboard.wording import duration, in_figure, shortened

MAX_COLUMNS = 64
OWNER_CHARACTERS = 24  # both ends of a long id; whole ones would double what each refresh sends
_CLEAR = "rgba(0,0,0,0)"
_STATE_VALUES = ("free", "cached", "used", "pinned", "reserved")  # by BlockState value


def columns_of(cells: int) -> int:
    """Cells in a row: a power of two near the square root, at most 64, so that rows keep their place in mind."""
    columns = 1
    while columns * columns < cells and columns < MAX_COLUMNS:
        columns *= 2
    return columns


def block_map(cells: MapCells, theme: Theme, *, incarnation: str, colouring: Colouring | None = None) -> go.Figure:
    """The pool in address order, row by row from the top left: one cell for each of `cells`.

    What is seen is a picture below an invisible heatmap trace that carries the hover. By `colouring`; without one, a
    cell of several blocks is cut into stripes by the share of each state, held states left, allocatable ones right, and
    every state present gets at least one stripe. Zoom is kept (`uirevision`) while the pool keeps its incarnation and
    geometry.
    """
    columns = columns_of(cells.cells)
    rows = -(-cells.cells // columns)
    figure = go.Figure(_hover_trace(cells, rows, columns))
    figure.add_layout_image(
        source="data:image/png;base64,"
        + base64.b64encode(_picture(colouring or by_state(cells, theme), rows, columns)).decode(),
        xref="x",
        yref="y",
        x=-0.5,
        y=-0.5,
        sizex=columns,
        sizey=rows,
        xanchor="left",
        yanchor="top",
        sizing="stretch",
        layer="below",
    )
    blocks_per_row = columns * cells.blocks_per_cell
    marks = np.arange(0, rows, -(-rows // 9))
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "constrain": "domain"}
    figure.update_layout(
        **base_layout(theme),
        uirevision=f"{cells.id} {incarnation} {cells.total_blocks} {cells.blocks_per_cell}",
        margin={"l": 84, "r": 2, "t": 26, "b": 4},
        dragmode="zoom",
        hovermode="closest",
    )
    # Neither zoom nor pan leaves the pool.
    figure.update_xaxes(
        **axis, range=[-0.5, columns - 0.5], minallowed=-0.5, maxallowed=columns - 0.5, showticklabels=False
    )
    figure.update_yaxes(
        **axis,
        range=[rows - 0.5, -0.5],
        minallowed=-0.5,
        maxallowed=rows - 0.5,
        tickmode="array",
        tickvals=marks.tolist(),
        ticktext=[f"{row * blocks_per_row:,}" for row in marks],
        tickfont={"size": 11, "color": theme.muted},
        ticklabelstandoff=6,
    )
    return figure


def _picture(colouring: Colouring, rows: int, columns: int) -> bytes:
    cells, width = colouring.pixels.shape
    pixels = np.full((rows * columns, width), len(colouring.colours), dtype=np.uint8)  # past the palette: transparent
    pixels[:cells] = colouring.pixels
    return indexed_png(pixels.reshape(rows, columns * width), colouring.colours)


def _hover_trace(cells: MapCells, rows: int, columns: int) -> go.Heatmap:
    """Invisible; customdata is (rows, columns, 3): first and last block, references. Text says what is in the cell."""
    grid = rows * columns
    first = np.arange(cells.cells, dtype=np.int64) * cells.blocks_per_cell
    last = np.minimum(first + cells.blocks_per_cell, cells.total_blocks) - 1
    references = cells.references if cells.references is not None else [0] * cells.cells
    custom = np.zeros((grid, 3), dtype=np.int32)
    custom[: cells.cells] = np.column_stack((first, last, references))
    state = np.full(grid, np.nan, dtype=np.float32)  # NaN: no cell there, so no hover either
    state[: cells.cells] = cells.state
    padding = [""] * (grid - cells.cells)
    return go.Heatmap(
        z=state.reshape(rows, columns),
        zmin=0,
        zmax=255,
        colorscale=[[0, _CLEAR], [1, _CLEAR]],
        showscale=False,
        hoverongaps=False,
        customdata=custom.reshape(rows, columns, -1),
        text=_grid(_words(cells) + padding, columns),
        hovertext=_grid(_ages(cells) + padding, columns),
        hovertemplate=_hover_template(cells),
    )


def _grid(words: list[str], columns: int) -> NDArray[np.object_]:
    """As an array, which Plotly copies once where it would copy nested lists element by element, several times."""
    return np.array(words, dtype=object).reshape(-1, columns)


def _words(cells: MapCells) -> list[str]:
    """What is in each cell, states that are not left out, and its owner."""
    if cells.owner is None:
        names = ["not in the map"] * cells.cells
    else:
        owners = [in_figure(shortened(owner, OWNER_CHARACTERS)) for owner in cells.owners]
        owners.append("nobody")  # -1 is the last
        names = [owners[i] for i in cells.owner]
    if cells.blocks_per_cell > 1:
        return [f"{mix}<br>owner of most: {name}" for mix, name in zip(_mixes(cells), names, strict=True)]
    states = [_STATE_VALUES[s] if s < len(_STATE_VALUES) else "unknown" for s in cells.state]
    return [f"<b>{state}</b><br>owner {name}" for state, name in zip(states, names, strict=True)]


def _mixes(cells: MapCells) -> list[str]:
    """Blocks of each cell by state, "used 12 · cached 11", without the states that it has none of."""
    mixes: list[list[str]] = [[] for _ in range(cells.cells)]
    for name, column in zip(STATE_ORDER, cell_counts(cells).tolist(), strict=True):
        for mix, blocks in zip(mixes, column, strict=True):
            if blocks:
                mix.append(f"{name} {blocks:,}")
    return [" · ".join(mix) for mix in mixes]


def _ages(cells: MapCells) -> list[str]:
    if cells.age_seconds is None:
        return [""] * cells.cells
    return [duration(age) for age in cells.age_seconds]


def _hover_template(cells: MapCells) -> str:
    single = cells.blocks_per_cell == 1
    if single:
        lines = ["block %{customdata[0]:,d}: %{text}"]
    else:
        lines = ["<b>blocks %{customdata[0]:,d} to %{customdata[1]:,d}</b>", "%{text}"]
    if cells.references is not None:
        which = "references" if single else "highest reference count"
        lines.append(f"{which} %{{customdata[2]:,d}}")
    if cells.age_seconds is not None:
        lines.append(("last touched" if single else "most recent touch") + " %{hovertext} ago")
    return "<br>".join(lines) + "<extra></extra>"


def fragmentation_history(rate: History, strict: History, *, threshold: float, theme: Theme) -> go.Figure:
    """F over time: the mean of each bucket, its range as a band, F over free blocks alone, and the threshold.

    Times are UTC. Buckets without a sample are gaps: a line across them would claim what nobody saw.
    """
    times, low, mean, high = _series(rate, "minimum", "mean", "maximum")
    strict_times, strict_mean = _series(strict, "mean")
    plain = {"mode": "lines", "connectgaps": False}
    figure = go.Figure()
    band_times, polygon = band(times, low, high)
    figure.add_scatter(
        x=band_times,
        y=polygon,
        line={"width": 0},
        fill="toself",
        fillcolor=f"rgba({','.join(str(c) for c in bytes.fromhex(theme.line[1:]))},0.18)",
        showlegend=False,
        hoverinfo="skip",
        **plain,
    )
    figure.add_scatter(
        x=strict_times,
        y=strict_mean,
        name="free alone",
        line={"width": 1.2, "color": theme.line_second, "dash": "dot"},
        hovertemplate="%{y:.3f}",
        **plain,
    )
    figure.add_scatter(
        x=times,
        y=mean,
        name="free + cached",
        line={"width": 1.8, "color": theme.line},
        hovertemplate="%{y:.3f}",
        **plain,
    )
    figure.add_hline(
        y=threshold,
        line={"width": 1.2, "color": theme.threshold, "dash": "dash"},
        annotation={
            "text": f"threshold {threshold:.0%}",
            "font": {"size": 11, "color": theme.threshold},
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
        },
        annotation_position="top left",
    )
    figure.update_layout(
        **base_layout(theme),
        uirevision=f"history {rate.id}",
        margin={"l": 44, "r": 10, "t": 26, "b": 22},
        hovermode="x unified",
        # On the left: the tool bar comes up on the right.
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
    )
    axis = {"gridcolor": theme.grid, "zeroline": False, "tickfont": {"size": 11, "color": theme.muted}}
    figure.update_xaxes(**axis, type="date", tickformat="%H:%M:%S", hoverformat="%H:%M:%S UTC")
    figure.update_yaxes(**axis, range=[-0.02, 1.02], tickvals=[0, 0.25, 0.5, 0.75, 1], fixedrange=True)
    return figure


def _series(history: History, *which: str) -> list[NDArray[np.floating]]:
    """Milliseconds since 1970, then one column for each name; an undefined value, or a bucket left out, is NaN."""
    rows = [
        (point.time_unix * 1000, *(np.nan if (value := getattr(point, name)) is None else value for name in which))
        for point in history.points
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(which))
    after = np.flatnonzero(np.diff(table[:, 0]) > 2500 * history.step_seconds)
    breaks = np.full((len(after), 1 + len(which)), np.nan)
    breaks[:, 0] = table[after, 0] + 1000 * history.step_seconds
    table = np.insert(table, after + 1, breaks, axis=0)
    return [table[:, 0].round(), *(column.astype(np.float32) for column in table.T[1:])]


def band(
    times: NDArray[np.floating], low: NDArray[np.floating], high: NDArray[np.floating]
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """The area between two lines as one polygon for each stretch without a gap, with NaN between polygons."""
    xs: list[NDArray[np.floating]] = []
    ys: list[NDArray[np.floating]] = []
    measured = np.flatnonzero(~np.isnan(low))
    for stretch in np.split(measured, np.flatnonzero(np.diff(measured) > 1) + 1):
        if len(stretch):
            xs += [times[stretch], times[stretch[::-1]], times[stretch[-1:]]]
            ys += [high[stretch], low[stretch[::-1]], np.array([np.nan], dtype=low.dtype)]
    return np.concatenate(xs or [times]), np.concatenate(ys or [low])


def base_layout(theme: Theme) -> dict[str, object]:
    """No template: Plotly's default one is about nine tenths of a small figure."""
    return {
        "template": None,
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": theme.text, "size": 12},
        "hoverlabel": {
            "bgcolor": theme.hover_background,
            "bordercolor": theme.muted,
            "font": {"color": theme.text, "size": 12},
            "align": "left",
        },
        "modebar": {"bgcolor": _CLEAR, "color": theme.muted, "activecolor": theme.text},
    }
