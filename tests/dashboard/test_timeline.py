"""The figure of metrics over time: gaps stay gaps, shares are shares, and every mark stands where it happened."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from agent.wire import History, HistoryPoint
from agent.wire.history import Mark
from dashboard import timeline
from dashboard.figure_component import pack
from dashboard.palette import DARK, LIGHT
from dashboard.timeline import LANES, METRICS, episodes_of, gaps_of, line_of

POOL, START, STEP = "example.dp0.tp0.pp0.kv", 1_700_000_000.0, 2.0
Values = Sequence[float | None]


def history(metric: str, means: Values) -> History:
    points = [
        HistoryPoint(
            time_unix=START + STEP * i,
            minimum=None if mean is None else 0.9 * mean,
            mean=mean,
            maximum=None if mean is None else 1.1 * mean,
        )
        for i, mean in enumerate(means)
    ]
    return History(id=POOL, metric=metric, step_seconds=STEP, points=points)


def mark(after: float, kind: str, text: str, **detail: Any) -> Mark:
    return Mark(time_unix=START + after, pool=POOL, kind=kind, text=text, detail=detail)


def draw(lines: Sequence[timeline.Line], marks: Sequence[Mark] = (), **changes: Any) -> Any:
    given: dict[str, Any] = {
        "pool": POOL,
        "start_unix": START,
        "end_unix": START + 20,
        "at_unix": None,
        "threshold": 0.3,
        "theme": LIGHT,
    }
    return timeline.timeline(lines, episodes_of(marks, START), **(given | changes))


def test_a_metric_of_one_has_its_range_and_its_gaps() -> None:
    line = line_of(METRICS["F"], {"fragmentation": history("fragmentation", [0.5, 0.6, None, None, None, 0.7])})
    assert line.times_ms.tolist() == [1000 * (START + STEP * i) for i in range(6)]
    assert line.mean[:2].tolist() == [0.5, 0.6]
    assert np.isnan(line.mean[2:5]).all()
    assert line.low is not None
    assert line.high is not None
    assert (line.low[0], line.high[0]) == (0.45, pytest.approx(0.55))
    assert gaps_of(line, START, START + 12) == [(1000 * (START + 4), 1000 * (START + 10))]
    assert gaps_of(line, START - 20, START + 12)[0] == (1000 * (START - 20), 1000 * START)
    # The negative control: one bucket without a sample is no gap that is worth a word.
    whole = line_of(METRICS["F"], {"fragmentation": history("fragmentation", [0.5, 0.6, None, 0.5])})
    assert gaps_of(whole, START, START + 8) == []


def test_shares_are_of_what_is_not_reserved() -> None:
    values: dict[str, Values] = {
        "used": [30, 40, None],
        "pinned": [10, 0, None],
        "free": [40, 60, None],
        "cached": [20, 0, None],
    }
    histories = {name: history(name, means) for name, means in values.items()}
    live = line_of(METRICS["Live share"], histories)
    assert live.mean[:2].tolist() == [0.4, 0.4]
    assert np.isnan(live.mean[2])
    assert (live.low, live.high) == (None, None)  # extremes of several metrics need not be of one instant
    cached = line_of(METRICS["Cached share"], histories)
    assert cached.mean[:2].tolist() == [0.2, 0.0]
    nothing = {name: history(name, [0]) for name in values}
    assert np.isnan(line_of(METRICS["Live share"], nothing).mean[0])


def test_an_alert_lasts_from_when_it_fired_to_when_it_was_over() -> None:
    about = {"rule": "fragmentation", "severity": "warning", "labels": {"pool": "kv"}}
    other = about | {"labels": {"pool": "state"}}
    found = episodes_of(
        [
            mark(1, "alert", "old is over: it was", rule="old", severity="critical", labels={}),
            mark(2, "alert", "fragmentation fires: F is high", **about),
            mark(3, "alert", "fragmentation fires: F is high", **other),
            mark(6, "alert", "fragmentation is over: F is low", **about),
        ],
        START,
    )
    told = [(one.what, one.start_unix - START, None if one.end_unix is None else one.end_unix - START) for one in found]
    assert told == [
        ("old (critical)", 0, 1),  # it fired before the range
        ("fragmentation (warning)", 2, 6),
        ("fragmentation (warning)", 3, None),
    ]


def test_moves_restarts_and_ends_are_told_apart_and_holds_are_left_out() -> None:
    found = episodes_of(
        [
            mark(1, "engine", "the engine is live", state="live", incarnation="a"),
            mark(2, "decision", "hold: hold_healthy, F is low", outcome="hold_healthy"),
            mark(3, "decision", "decide: compact, 3 moves", outcome="compact"),
            mark(4, "decision", "compact: reached", outcome="reached"),
            mark(5, "decision", "compact: refused, switched off", outcome="refused"),
            mark(6, "decision", "relocation: on", outcome="on"),
            mark(7, "engine", "the engine is gone: it ended", state="gone", incarnation="a"),
            mark(8, "engine", "the engine was started anew", state="live", incarnation="b"),
        ],
        START,
    )
    assert [(one.lane, one.what, one.tone) for one in found] == [
        ("engine", "live", "state"),
        ("moves", "run", "move"),
        ("moves", "relocation on", "move"),
        ("engine", "gone", "end"),
        ("engine", "restart", "start"),
    ]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("names", [[], ["F"], list(METRICS)])
def test_every_mark_is_in_its_lane_at_its_time(names: list[str], theme: Any) -> None:
    marks = [
        mark(4, "decision", "compact: reached <b>", outcome="reached"),
        mark(5, "alert", "x fires: y", rule="x", severity="critical", labels={}),
        mark(8, "engine", "the engine was started anew", state="live"),
    ]
    metrics = [METRICS[name] for name in names]
    histories = {name: history(name, [0.5, 0.4, None, 0.5]) for metric in metrics for name in metric.of}
    figure = draw([line_of(one, histories) for one in metrics], marks, theme=theme, at_unix=START + 6)
    points = next(trace for trace in figure.data if trace.mode == "markers")
    assert list(zip(points.x, points.y, strict=True)) == [
        (1000 * (START + 4), LANES.index("moves")),
        (1000 * (START + 8), LANES.index("engine")),
    ]
    assert points.text[0] == "compact: reached &lt;b&gt;"
    (alert,) = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert list(alert.x) == [1000 * (START + 5), 1000 * (START + 20)]  # it goes on: to the end of the range
    verticals = {shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.xref == "x"}
    assert verticals == {1000 * (START + after) for after in (4, 6, 8)}
    assert list(figure.layout.xaxis.range) == [1000 * START, 1000 * (START + 20)]
    rows = [figure.layout[f"yaxis{2 + i}"].domain for i in range(len(names))]
    assert all(below[1] <= above[0] for above, below in pairwise(rows))
    assert all(figure.layout.yaxis.domain[1] <= row[0] for row in rows)
    assert len(pack(figure, plotly_url="x")) < 10_000


def test_alerts_of_one_time_do_not_cover_each_other() -> None:
    marks = [
        mark(i, "alert", f"rule-{i} fires: now", rule=f"rule-{i}", severity="warning", labels={}) for i in range(3)
    ]
    levels = [trace.y[0] for trace in draw([], marks).data if trace.y[0] is not None]
    assert len(set(levels)) == 3
    assert min(levels) == LANES.index("alerts")


def test_the_lanes_stand_where_nothing_happened() -> None:
    """Plotly drops an axis that no trace is on."""
    figure = draw([line_of(METRICS["F"], {"fragmentation": history("fragmentation", [0.5, 0.6])})])
    assert [one for one in figure.data if one.yaxis in (None, "y") and len(one.x)]
