"""Draws a snapshot's segments, one bar each, into one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.allocator.snapshot import DEFAULT_POOL, BlockState, Segment, Snapshot
from engine_shim.errors import SettingsError

MIB = 1 << 20
MAX_BARS = 300  # segments drawn; the largest
MAX_STRIPES = 20_000  # runs of blocks of one state, over all bars: what a browser draws at ease
_ROW_PIXELS, _LEAST_PIXELS = 18, 420
_NAMES = {BlockState.LIVE: "live", BlockState.PENDING: "pending free", BlockState.FREE: "free"}
# Tol's bright scheme, which colour-blind eyes can tell apart; free is as pale as the ground.
_COLORS = {BlockState.LIVE: "#4477aa", BlockState.PENDING: "#ccbb44", BlockState.FREE: "#dfe4ea"}


@dataclass(frozen=True, slots=True)
class Stripes:
    """Runs of neighbouring blocks of one state in one segment. Arrays are (runs,); starts and sizes in bytes."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    states: NDArray[np.uint8]
    blocks: NDArray[np.int64]  # how many blocks each run is


def require_plotting() -> None:
    """Raises SettingsError where Plotly is missing, so that nothing is read before that is known."""
    if find_spec("plotly") is None:
        raise SettingsError("--html needs plotly, which is missing here: pip install 'kvatlas[dashboard]'")


def write_picture(snapshot: Snapshot, title: str, path: Path) -> str:
    """Draw into `path`. Returns what was left out, "" where nothing was. Raises SettingsError where it cannot."""
    require_plotting()
    import plotly.graph_objects as go

    shown, left_out = _choose(snapshot.segments)
    figure = go.Figure()
    for state in BlockState:
        rows, bases, sizes, texts = [], [], [], []
        for row, (segment, stripes) in enumerate(shown):
            mine = stripes.states == state
            label = _label(row, segment)
            rows += [label] * int(mine.sum())
            bases += (stripes.starts[mine] / MIB).tolist()
            sizes += (stripes.sizes[mine] / MIB).tolist()
            texts += [f"{count:,} blocks" if count > 1 else "1 block" for count in stripes.blocks[mine].tolist()]
        figure.add_trace(
            go.Bar(
                y=rows,
                x=sizes,
                base=bases,
                orientation="h",
                name=_NAMES[state],
                marker={"color": _COLORS[state], "line": {"width": 0}},
                customdata=texts,
                hovertemplate="%{y}<br>%{x:.3f} MiB %{fullData.name}, %{customdata}, from %{base:.3f} MiB"
                "<extra></extra>",
            )
        )
    note = f"<br><sub>{left_out}</sub>" if left_out else ""
    figure.update_layout(
        title=f"torch's allocator: {html.escape(title)}{note}",
        barmode="overlay",
        template="plotly_white",
        height=max(_LEAST_PIXELS, 160 + _ROW_PIXELS * len(shown)),
        xaxis_title="MiB from the segment's start",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    )
    labels = [_label(row, segment) for row, (segment, _) in enumerate(shown)]
    # Given in full: by itself Plotly would list first what has a live block.
    figure.update_yaxes(
        autorange="reversed", type="category", categoryorder="array", categoryarray=labels, automargin=True
    )
    try:
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"the picture cannot be written to {path}: {error.strerror or error}") from error
    return left_out


def stripes_of(segment: Segment) -> Stripes:
    """The segment's blocks, neighbours of one state taken together."""
    count = segment.states.size
    if count == 0:
        empty = np.zeros(0, np.int64)
        return Stripes(empty, empty, np.zeros(0, np.uint8), empty)
    first = np.flatnonzero(np.concatenate(([True], np.diff(segment.states.astype(np.int16)) != 0)))
    sizes = np.add.reduceat(segment.sizes, first)
    return Stripes(
        np.concatenate(([0], np.cumsum(sizes)[:-1])),
        sizes,
        segment.states[first],
        np.diff(np.append(first, count)),
    )


def _choose(segments: Sequence[Segment]) -> tuple[list[tuple[Segment, Stripes]], str]:
    """The largest segments that fit, by pool, kind, stream and size; and what that leaves out, in words."""
    chosen: list[tuple[Segment, Stripes]] = []
    stripes = 0
    for segment in sorted(segments, key=lambda one: -one.total_bytes)[:MAX_BARS]:
        drawn = stripes_of(segment)
        if chosen and stripes + drawn.sizes.size > MAX_STRIPES:
            break
        stripes += drawn.sizes.size
        chosen.append((segment, drawn))
    shown = sum(segment.total_bytes for segment, _ in chosen)
    total = sum(segment.total_bytes for segment in segments)
    chosen.sort(key=lambda one: _order(one[0]))
    if len(chosen) == len(segments):
        return chosen, ""
    return chosen, f"the largest {len(chosen):,} of {len(segments):,} segments, {shown / total:.1%} of what is reserved"


def _order(segment: Segment) -> tuple[int, bool, tuple[int, int], str, int, int]:
    """Device by device, default pools first, the largest segments first."""
    private = segment.pool != DEFAULT_POOL
    return segment.device, private, segment.pool, segment.kind, segment.stream, -segment.total_bytes


def _label(row: int, segment: Segment) -> str:
    pool = "" if segment.pool == DEFAULT_POOL else f" private {segment.pool[0]},{segment.pool[1]}"
    stream = f" stream {segment.stream}" if segment.stream else ""
    growing = " expandable" if segment.expandable else ""
    size = f"{segment.total_bytes / MIB:,.0f} MiB"
    return f"{row + 1}: GPU {segment.device} {segment.kind or 'segment'}{growing}{pool}{stream}, {size}"
