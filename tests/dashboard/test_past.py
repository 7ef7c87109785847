"""Instants and frames in words, and what is offered as files."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import wire
from agent.wire.history import FrameCells, FrameTimes
from dashboard import exports, past
from dashboard.figures import block_map
from dashboard.palette import LIGHT
from dashboard.timeline import METRICS, Line

instants = st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=20).map(sorted)


def frame(**changes: Any) -> FrameCells:
    values: dict[str, Any] = {
        "id": "example.dp0.tp0.pp0.kv",
        "at_unix": 1000.0,
        "time_unix": 999.5,
        "age_seconds": 0.5,
        "resolution_seconds": 1,
        "incarnation": "00ff",
        "sequence": 4,
        "first_unix": 10.0,
        "last_unix": 999.5,
        "previous_unix": 998.5,
        "next_unix": None,
        "total_blocks": 100,
        "blocks_per_cell": 50,
        "cells": 2,
        "state": [2, 0],
        "counts": {"used": [40, 0], "free": [0, 40], "cached": [10, 9], "reserved": [0, 1]},
        "blocks": wire.BlockCounts(free=40, cached=19, used=40, pinned=0, reserved=1),
        "fragmentation": wire.Fragmentation(
            rate=0.25,
            strict_rate=None,
            largest_allocatable_run=44,
            largest_free_run=40,
            allocatable_runs=2,
            run_length_histogram=[0],
        ),
    }
    return FrameCells(**(values | changes))


@given(instants, st.integers(-10, 1010))
def test_neighbours_of_an_instant(times: list[int], at: int) -> None:
    assert past.before(times, at) == max((one for one in times if one < at), default=None)
    assert past.after(times, at) == min((one for one in times if one > at), default=None)
    assert past.at_or_before(times, at) == max((one for one in times if one <= at), default=None)


def test_labels_of_instants_are_all_different() -> None:
    """The scrubber tells its positions by them."""
    day = 86_400.0
    assert past.moments([0.5, 1.5]) == ["00:00:00", "00:00:01"]
    assert past.moments([0.5, day]) == ["01 Jan 00:00:00", "02 Jan 00:00:00"]
    for times in ([0.25, 0.75], [0.0, 365 * day], [0.0, 0.001, 400 * day]):
        assert len(set(past.moments(times))) == len(times)
    assert past.moment(1_700_000_000.9) == "2023-11-14 22:13:20 UTC"


def test_a_frame_says_what_it_holds_and_how_near_it_is() -> None:
    near = frame()
    values = {tile.label: tile.value for tile in past.tiles_of(near)}
    assert values == {
        "Fragmentation F": "0.250",
        "F, free alone": "\N{EM DASH}",
        "Largest run": "44",
        "Live share": "40.4 %",
    }
    html = past.states_html(near, LIGHT)
    assert "<td>40</td><td>40.0 %</td>" in html
    assert "unknown" not in html
    assert "states alone" in past.frame_note(near)
    assert "No frame was kept for 5 min" in past.frame_note(frame(age_seconds=300.0))
    assert past.tiles_of(frame(blocks=None)) == []  # of an agent that does not tell them


def test_the_map_of_a_frame_shows_its_counts() -> None:
    figure = block_map(past.cells_of(frame()), LIGHT, incarnation="00ff")
    assert "used 40" in figure.data[0].text[0][0]
    assert "not kept" in figure.data[0].text[0][0]


@pytest.mark.parametrize(
    ("step", "live", "words"), [(0.0, False, "each of them"), (12.0, True, "the last one of each 12 s")]
)
def test_the_scrubber_says_what_it_leaves_out(step: float, live: bool, words: str) -> None:
    times = FrameTimes(
        id="x", from_unix=0, to_unix=9, first_unix=1, last_unix=8, total=1234, step_seconds=step, times_unix=[1, 8]
    )
    note = past.instants_note(times, live)
    assert "1,234 frames" in note
    assert words in note
    assert ("Live" in note) == live


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0.0, "1 frame is kept of this range, and can be chosen. Arrow keys"),
        (12.0, "1 frame is kept of this range; the last one of each 12 s can be chosen. Arrow keys"),
    ],
)
def test_one_frame_is_no_plural(step: float, words: str) -> None:
    times = FrameTimes(
        id="x", from_unix=0, to_unix=9, first_unix=1, last_unix=1, total=1, step_seconds=step, times_unix=[1]
    )
    assert past.instants_note(times, live=False).startswith(words)


def test_rows_of_lines_have_no_number_where_there_is_none() -> None:
    line = Line(METRICS["F"], np.array([1000.0, 2000.0]), np.array([0.5, np.nan]), np.array([0.4, np.nan]), None, 1000)
    assert past.rows_of([line]) == [
        {"metric": "F", "time_unix": 1.0, "minimum": 0.4, "mean": 0.5, "maximum": None},
        {"metric": "F", "time_unix": 2.0, "minimum": None, "mean": None, "maximum": None},
    ]


def test_files_hold_the_rows() -> None:
    rows = [{"id": "a,b", "n": 1, "share": None}, {"id": "=1+1", "n": -2, "more": {"x": [1]}}]
    table = list(csv.DictReader(io.StringIO(exports.csv_text(rows))))
    assert table == [
        {"id": "a,b", "n": "1", "share": "", "more": ""},
        {"id": "'=1+1", "n": "-2", "share": "", "more": '{"x": [1]}'},
    ]
    told = json.loads(exports.json_text("requests", rows, id="pool"))
    assert told == {"schema": "kvatlas.dashboard-requests/v1", "id": "pool", "rows": rows}
    assert exports.csv_text([]) == "\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        exports.json_text("x", [{"n": float("nan")}])
