"""Metrics of one pool over a stretch of time, with what happened in it. Pure: wire models in, a Plotly figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from agent.wire import History
from agent.wire.history import Mark
from dashboard.figures import band, base_layout
from dashboard.palette import Theme
from dashboard.wording import in_figure

Lane = Literal["engine", "moves", "alerts"]
LANES: tuple[Lane, ...] = ("engine", "moves", "alerts")
ROW_PIXELS, LANES_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 118, 92, 8, 40
SIDE_BY_SIDE = 4  # alerts that can be told apart at one time; others lie over them
GAP = 0.035  # between two rows, as a share of the height
MOVING = ("compact", "relocation")
MOVED = frozenset(
    {"reached", "best", "partial", "aborted", "on", "off"}
)  # outcomes after which blocks may lie elsewhere
SEVERITY_TONES = {"critical": "#d92d20", "warning": "#d9820a", "info": "#5b8def"}
Floats = NDArray[np.floating]
_TICKS = {
    ".3f": ".2f",
    ".1%": ".0%",
    ",.0f": ",.2~f",
}  # of numbers written so: a scale may have halves of what is whole


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the figure. `of` are the metrics of the API that it is made of."""

    name: str
    of: tuple[str, ...]
    unit: str
    number: str  # how a value is written, in the notation of d3-format
    full: float | None = None  # the top of the scale, where it has one


METRICS = {
    metric.name: metric
    for metric in (
        Metric("F", ("fragmentation",), "free + cached", ".3f", 1.0),
        Metric("F, free alone", ("strict_fragmentation",), "free blocks", ".3f", 1.0),
        Metric("Live share", ("used", "pinned", "free", "cached"), "used + pinned", ".1%", 1.0),
        Metric("Cached share", ("cached", "used", "pinned", "free"), "evictable", ".1%", 1.0),
        Metric("Largest run", ("largest_allocatable_run",), "blocks", ",.0f"),
        Metric("Tail waste", ("tail_waste_bytes",), "bytes", ".3s"),
        Metric("Tokens a second", ("tokens_per_second",), "written", ",.0f"),
        Metric("Waiting requests", ("waiting_requests",), "requests", ",.0f"),
    )
}
DEFAULT_METRICS = ("F", "Live share", "Waiting requests")


@dataclass(frozen=True, slots=True)
class Line:
    """One metric over time: milliseconds since 1970, and its mean in each bucket; NaN where nothing was sampled.

    `low` and `high` are the range of each bucket; None for a metric that is made of several, whose range is not known.
    """

    metric: Metric
    times_ms: Floats
    mean: Floats
    low: Floats | None
    high: Floats | None
    step_ms: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One entry of a lane: at one time, or from one to another; `end_unix` None: it goes on."""

    lane: Lane
    what: str
    tone: str  # "start", "end", "state", "move", "critical", "warning", "info"
    start_unix: float
    end_unix: float | None
    text: str

    @property
    def is_span(self) -> bool:
        return self.lane == "alerts"


def line_of(metric: Metric, histories: Mapping[str, History]) -> Line:
    """The line of a metric from the histories that it is made of, by name; all of one range and step."""
    first = histories[metric.of[0]]
    step_ms = 1000 * first.step_seconds
    if len(metric.of) == 1:
        times, low, mean, high = _columns(first)
        return Line(metric, times, mean, low, high, step_ms)
    columns = {name: dict(zip(*_columns(histories[name])[::2], strict=True)) for name in metric.of}
    times = np.array(sorted(set.intersection(*(set(one) for one in columns.values()))))
    means = {name: np.array([one[at] for at in times.tolist()]) for name, one in columns.items()}
    whole = np.sum(list(means.values()), axis=0) if times.size else times
    part = means["used"] + means["pinned"] if metric.of[0] == "used" else means[metric.of[0]]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(whole > 0, part / whole, np.nan)
    return Line(metric, times, share, None, None, step_ms)


def gaps_of(line: Line, start_unix: float, end_unix: float) -> list[tuple[float, float]]:
    """Stretches, in milliseconds, of two buckets or more in which nothing was sampled, within the range."""
    measured = line.times_ms[~np.isnan(line.mean)]
    edges = np.concatenate(([1000 * start_unix - line.step_ms], measured, [1000 * end_unix]))
    return [
        (before + line.step_ms, after)
        for before, after in pairwise(edges.tolist())
        if after - before > 2.5 * line.step_ms
    ]


def episodes_of(marks: Sequence[Mark], start_unix: float) -> list[Episode]:
    """What the lanes show. An alert that began before the range, or that is not over, is open at that end."""
    found: list[Episode] = []
    firing: dict[str, Mark] = {}
    for mark in marks:
        if mark.kind == "alert":
            rule = str(mark.detail.get("rule", ""))
            key = f"{rule} {sorted(dict(mark.detail.get('labels', {})).items())}"
            if mark.text.startswith(f"{rule} fires"):
                firing[key] = mark
            else:
                began = firing.pop(key, None)
                found.append(_alert(began or mark, began.time_unix if began else start_unix, mark.time_unix))
        elif mark.kind == "engine":
            found.append(_engine(mark))
        elif (action := mark.text.partition(":")[0]) in MOVING and mark.detail.get("outcome") in MOVED:
            what = "run" if action == "compact" else f"relocation {mark.detail.get('outcome')}"
            found.append(Episode("moves", what, "move", mark.time_unix, mark.time_unix, mark.text))
    found += [_alert(mark, mark.time_unix, None) for mark in firing.values()]
    return sorted(found, key=lambda one: (one.start_unix, one.lane))


def _alert(mark: Mark, start_unix: float, end_unix: float | None) -> Episode:
    severity = str(mark.detail.get("severity", "info"))
    rule = str(mark.detail.get("rule", ""))
    tone = severity if severity in SEVERITY_TONES else "info"
    return Episode("alerts", f"{rule} ({severity})", tone, start_unix, end_unix, mark.text)


def _engine(mark: Mark) -> Episode:
    state = str(mark.detail.get("state", ""))
    if "started anew" in mark.text:
        return Episode("engine", "restart", "start", mark.time_unix, mark.time_unix, mark.text)
    tone = "end" if state in ("gone", "unreadable") else "state"
    return Episode("engine", state or "engine", tone, mark.time_unix, mark.time_unix, mark.text)


def height_of(metrics: int) -> int:
    """Pixels of the figure for so many rows."""
    return metrics * ROW_PIXELS + LANES_PIXELS + TOP_PIXELS + BOTTOM_PIXELS


def timeline(
    lines: Sequence[Line],
    episodes: Sequence[Episode],
    *,
    pool: str,
    start_unix: float,
    end_unix: float,
    at_unix: float | None,
    threshold: float | None,
    theme: Theme,
) -> go.Figure:
    """One row for each line, below them three lanes of what happened; `at_unix` is the instant that is looked at.

    Times are UTC. What was not sampled is a gap, and shaded.
    """
    figure = go.Figure()
    height = height_of(len(lines)) - TOP_PIXELS - BOTTOM_PIXELS
    lanes = LANES_PIXELS / height
    each = (1 - lanes) / max(1, len(lines))
    axis = {"gridcolor": theme.grid, "zeroline": False, "tickfont": {"size": 11, "color": theme.muted}}
    for row, line in enumerate(lines):
        top = 1 - row * each
        _add_line(figure, line, row, theme)
        most = line.metric.full
        figure.update_layout(
            {
                f"yaxis{row + 2}": {
                    **axis,
                    "domain": [top - each + GAP, top - 0.035],
                    "range": [-0.02 * most, 1.02 * most] if most else None,
                    "rangemode": "tozero",
                    "nticks": 4,
                    "tickformat": _TICKS.get(line.metric.number, line.metric.number),
                    "fixedrange": True,
                    "anchor": "x",
                }
            }
        )
        figure.add_annotation(
            text=f"<b>{line.metric.name}</b>  {line.metric.unit}",
            xref="paper",
            yref="paper",
            x=0,
            y=top + 0.005,
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font={"size": 11, "color": theme.text},
        )
        if threshold is not None and line.metric.name.startswith("F"):
            figure.add_shape(
                type="line",
                xref="paper",
                x0=0,
                x1=1,
                yref=f"y{row + 2}",
                y0=threshold,
                y1=threshold,
                line={"width": 1.2, "color": theme.threshold, "dash": "dash"},
            )
    _add_episodes(figure, episodes, end_unix, theme)
    _add_verticals(figure, lines, episodes, start_unix, end_unix, at_unix, theme)
    figure.update_layout(
        **base_layout(theme),
        uirevision=f"timeline {pool} {round(end_unix - start_unix)}",
        margin={"l": 62, "r": 12, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
        hovermode="x",
        showlegend=False,
        yaxis={
            **axis,
            "domain": [0.0, max(0.02, lanes - GAP)],
            "range": [-0.6, len(LANES) - 0.6 + 0.4 * (SIDE_BY_SIDE - 1)],
            "tickvals": list(range(len(LANES))),
            "ticktext": list(LANES),
            "fixedrange": True,
        },
    )
    figure.update_xaxes(
        **axis,
        type="date",
        range=[1000 * start_unix, 1000 * end_unix],
        tickformatstops=[
            {"dtickrange": [None, 60_000], "value": "%H:%M:%S"},
            {"dtickrange": [60_000, 86_400_000], "value": "%H:%M<br>%d %b"},
            {"dtickrange": [86_400_000, None], "value": "%d %b"},
        ],
        hoverformat="%d %b %H:%M:%S UTC",
    )
    return figure


def _add_line(figure: go.Figure, line: Line, row: int, theme: Theme) -> None:
    plain = {"mode": "lines", "connectgaps": False, "yaxis": f"y{row + 2}"}
    if line.low is not None and line.high is not None:
        times, polygon = band(line.times_ms, line.low, line.high)
        figure.add_scatter(
            x=times,
            y=polygon,
            line={"width": 0},
            fill="toself",
            fillcolor=f"rgba({','.join(str(c) for c in bytes.fromhex(theme.line[1:]))},0.18)",
            hoverinfo="skip",
            **plain,
        )
    figure.add_scatter(
        x=line.times_ms,
        y=line.mean.astype(np.float32),
        name=line.metric.name,
        line={"width": 1.6, "color": theme.line},
        hovertemplate=f"{line.metric.name} %{{y:{line.metric.number}}}<extra></extra>",
        **plain,
    )


def _add_episodes(figure: go.Figure, episodes: Sequence[Episode], end_unix: float, theme: Theme) -> None:
    symbols = {"start": "star", "end": "x", "state": "circle-open", "move": "diamond"}
    points = [one for one in episodes if not one.is_span]
    # Plotly drops a subplot that no trace is on, and puts the axis of time below the first row then.
    at = round(1000 * end_unix)
    figure.add_scatter(x=[at], y=[None], mode="lines", hoverinfo="skip")
    if points:
        figure.add_scatter(
            x=[round(1000 * one.start_unix) for one in points],
            y=[LANES.index(one.lane) for one in points],
            mode="markers",
            marker={
                "symbol": [symbols[one.tone] for one in points],
                "size": 9,
                "color": [theme.threshold if one.tone == "end" else theme.text for one in points],
            },
            text=[in_figure(one.text) for one in points],
            hovertemplate="%{text}<extra></extra>",
        )
    levels: dict[str, int] = {}  # one for each alert, so that those of one time do not cover each other
    for one in episodes:
        if one.is_span:
            stop = end_unix if one.end_unix is None else one.end_unix
            level = levels.setdefault(one.what, len(levels) % SIDE_BY_SIDE)
            figure.add_scatter(
                x=[round(1000 * one.start_unix), round(1000 * stop)],
                y=[LANES.index(one.lane) + 0.4 * level] * 2,
                mode="lines+markers",
                line={"width": 5, "color": SEVERITY_TONES[one.tone]},
                marker={
                    "size": 8,
                    "symbol": ["triangle-up", "circle-open" if one.end_unix is None else "line-ns-open"],
                },
                text=[in_figure(one.text)] * 2,
                hovertemplate="%{text}<extra></extra>",
            )


def _add_verticals(
    figure: go.Figure,
    lines: Sequence[Line],
    episodes: Sequence[Episode],
    start_unix: float,
    end_unix: float,
    at_unix: float | None,
    theme: Theme,
) -> None:
    shade = {"fillcolor": theme.muted, "opacity": 0.1, "line": {"width": 0}, "layer": "below"}
    for left, right in gaps_of(lines[0], start_unix, end_unix) if lines else []:
        figure.add_shape(type="rect", xref="x", yref="paper", x0=left, x1=right, y0=0, y1=1, **shade)
    for one in episodes:
        if one.tone in ("start", "move"):
            dash = "dot" if one.tone == "move" else "dash"
            _add_vertical(figure, one.start_unix, {"width": 1, "color": theme.muted, "dash": dash})
    if at_unix is not None:
        _add_vertical(figure, at_unix, {"width": 2, "color": theme.threshold})


def _add_vertical(figure: go.Figure, time_unix: float, line: dict[str, object]) -> None:
    at = round(1000 * time_unix)
    figure.add_shape(type="line", xref="x", yref="paper", x0=at, x1=at, y0=0, y1=1, line=line)


def _columns(history: History) -> tuple[Floats, Floats, Floats, Floats]:
    """Milliseconds since 1970, then minimum, mean and maximum of each bucket; NaN where it has none."""
    rows = [
        [
            point.time_unix * 1000,
            *(np.nan if one is None else one for one in (point.minimum, point.mean, point.maximum)),
        ]
        for point in history.points
    ]
    table = np.array(rows, np.float64).reshape(-1, 4)
    return table[:, 0].round(), table[:, 1], table[:, 2], table[:, 3]
