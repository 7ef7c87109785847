"""Black boxes in words, the numbers those of the API."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent import wire
from agent.wire.blackbox import BlackBox, BoxEvent, BoxHistory, BoxMap, BoxRequest, BoxSummary
from dashboard import boxes
from dashboard.palette import LIGHT

BAD = "<b onmouseover=alert(1)>"


def summary(**changes: Any) -> BoxSummary:
    values: dict[str, Any] = {
        "name": "20231114T221320Z-x.tar.gz",
        "id": "engine.dp0.tp0.pp0.kv",
        "engine_id": "engine",
        "incarnation": "00ff",
        "model": BAD,
        "ended_unix": 1_700_000_000.0,
        "state": "gone",
        "reason": "its map is not there any more",
        "in_good_order": False,
        "size_bytes": 2048,
        "left_out": [],
    }
    return BoxSummary(**(values | changes))


def box(**changes: Any) -> BlackBox:
    values: dict[str, Any] = {
        "summary": summary(),
        "facts": {
            "engine": {"kind": BAD, "version": "1", "pid": 7, "total_blocks": 1000, "block_tokens": 16},
            "counters": {"blocks_allocated": 12345},
            "running_requests": 3,
            "waiting_requests": 1,
        },
        "map": BoxMap(
            total_blocks=1000,
            blocks_per_cell=500,
            cells=2,
            state=[2, 0],
            counts={"used": [400, 1], "free": [100, 499]},
            fragmentation=wire.Fragmentation(
                rate=0.125,
                strict_rate=0.125,
                largest_allocatable_run=499,
                largest_free_run=499,
                allocatable_runs=3,
                run_length_histogram=[1],
            ),
        ),
        "map_reason": "",
        "requests_total": 11,
        "requests": [
            BoxRequest(request_id=BAD, lora="", cache_salt="", tokens=5, blocks=9 - i, age_seconds=2.0)
            for i in range(9)
        ],
        "events_total": 2,
        "events_missed": 0,
        "events": [
            BoxEvent(time_unix=1_699_999_998.5 + i, kind="free", block=4 + i, count=2, owner=1, other=0)
            for i in range(2)
        ],
        "marks": [],
        "history": BoxHistory(
            step_seconds=10.0, start_unix=[10.0, 20.0, 30.0], columns={"used": [[None] * 3, [1, 2, 3], [1, 2, 3]]}
        ),
    }
    return BlackBox(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "died"),
        ({"in_good_order": True}, "in good order"),
        ({"state": "replaced"}, "replaced by a new start"),
        ({"state": "unreadable"}, "died while it published"),
    ],
)
def test_how_an_engine_ended(changes: dict[str, Any], words: str) -> None:
    one = summary(**changes)
    assert boxes.row_of(one)["how"] == words
    assert boxes.ended_text(one) == f"{words} at 2023-11-14 22:13:20 UTC · its map is not there any more"


def test_the_contents_are_told_and_nothing_in_them_is_markup() -> None:
    shown = box()
    html = boxes.facts_html(shown) + boxes.map_numbers_html(shown, LIGHT) + boxes.requests_html(shown)
    assert "<b on" not in html
    assert "12,345 blocks" in html
    assert "3 running, 1 waiting" in html
    assert "<td>401</td><td>40.1 %</td>" in html
    assert "F 0.125" in html
    assert "and 3 more" in html
    assert re.findall(r"<td>(\d)</td><td>5</td>", html) == [str(9 - i) for i in range(8)]
    cells = boxes.cells_of(shown)
    assert cells is not None
    assert (cells.counts, cells.total_blocks) == ({"used": [400, 1], "free": [100, 499]}, 1000)


def test_a_box_without_a_map() -> None:
    bare = box(map=None, map_reason="damaged", requests=[], requests_total=0, facts={})
    assert boxes.cells_of(bare) is None
    assert boxes.map_numbers_html(bare, LIGHT) == ""
    assert "No sequence was live" in boxes.requests_html(bare)
    assert "\N{EM DASH}" in boxes.facts_html(bare)


def test_events_newest_first_before_the_end() -> None:
    rows = boxes.event_rows(box())
    assert [(row["before its end (s)"], row["block"]) for row in rows] == [(0.5, 5), (1.5, 4)]


def test_the_history_begins_where_anything_was_sampled() -> None:
    assert boxes.seen_from(box()) == 20.0
    assert boxes.seen_from(box(history=BoxHistory(step_seconds=1, start_unix=[1.0], columns={}))) is None
