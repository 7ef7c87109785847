"""The soak's judgement: a record without a fault passes, and each thing that can go wrong turns its line red."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks._soak_verdict import explained, gaps, judge, slope_a_minute

Record = dict[str, Any]


def test_a_record_without_a_finding_passes(record: Record) -> None:
    assert [line for line in judge(record) if not line.met] == []


def _grow(record: Record, column: int, a_minute: float, process: str = "agent") -> None:
    record["usage"][process] = [
        [*row[:column], row[column] + a_minute * row[0] / 60, *row[column + 1 :]] for row in record["usage"][process]
    ]


DOCTORED: dict[str, tuple[str, Callable[[Record], object]]] = {
    "a fault that nobody was told of": ("alerts of faults told", lambda r: r["told"].clear()),
    "told of another engine": ("alerts of faults told", lambda r: [one.update(engine="x") for one in r["told"]]),
    "told far too late": ("alerts of faults told", lambda r: [one.update(at=one["at"] + 200) for one in r["told"]]),
    "no fault at all": ("alerts of faults told", lambda r: r["expected"].clear()),
    "a firing that never ends": ("firings left without a resolve", lambda r: r["told"].pop()),
    "an alert that Slack never had": ("alerts that Slack", lambda r: r["slack"]["texts"].pop(0)),
    "an alert of another engine at Slack": (
        "alerts that Slack",
        lambda r: r["slack"].update(texts=["WARNING: Pool kv of engine-3 is 97 % full"]),
    ),
    "a message that Slack refused": ("alerts that Slack", lambda r: r["slack"].update(refused=1)),
    "a gap beside every fault": (
        "gaps over",
        lambda r: r["samples"].update({"engine-1": [1.0 * t for t in range(200)]}),
    ),
    "a gap in another engine's fault": (
        "gaps over",
        lambda r: r["samples"].update({"engine-1": [t for t in map(float, range(2400)) if not (20 < t < 34)]}),
    ),
    "an engine without a sample": ("gaps over", lambda r: r["samples"].update({"engine-1": []})),
    "history lost": ("history lost", lambda r: r["kills"].append({"at": 50.0, "kept": 40.0})),
    "an agent that was never killed": ("history lost", lambda r: r["kills"].clear()),
    "an audit entry lost": ("answered changes", lambda r: r["audit"].pop()),
    "memory that grows": ("agent: memory", lambda r: _grow(r, 1, 0.6e6)),
    "memory of the dashboard that grows": ("dashboard: memory", lambda r: _grow(r, 1, 0.6e6, "dashboard")),
    "descriptors that grow": ("agent: descriptors", lambda r: _grow(r, 2, 3.0)),
    "threads that grow": ("agent: threads", lambda r: _grow(r, 3, 3.0)),
    "a busy agent": ("agent: CPU", lambda r: _grow(r, 4, 60.0)),
    "no figures of a process": ("agent: measured", lambda r: r["usage"]["agent"].clear()),
    "an error in a page": ("console errors", lambda r: r["pages"]["pool"].append("TypeError")),
    "no page": ("console errors", lambda r: r["pages"].clear()),
    "an engine that waited": ("longest wait", lambda r: r["engines"]["engine-1"].update(waited_ms=250.0)),
    "an engine that did nothing": ("longest wait", lambda r: r["engines"]["engine-1"].update(steps=0)),
    "nothing to compare with": ("longest wait", lambda r: r["engines"]["engine-3"].update(steps=0)),
    "an engine that died": ("engines that ended", lambda r: r["engines"]["engine-1"].update(died="exit 3")),
    "a fault answered otherwise": ("engines that ended", lambda r: r["surprises"].append("room in a full tmpfs")),
    "a scrape that failed": ("scrapes that failed", lambda r: r["scrapes"].append([200.0, 500, 1.0])),
    "no scrape": ("scrapes that failed", lambda r: r["scrapes"].clear()),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_record_turns_its_line_red(record: Record, name: str) -> None:
    line, doctor = DOCTORED[name]
    doctored = copy.deepcopy(record)
    doctor(doctored)
    red = [one.name for one in judge(doctored) if not one.met]
    assert any(one.startswith(line) for one in red), red


@pytest.mark.parametrize("a_minute", [0.0, 5e6])
def test_a_run_that_is_warm_up_for_the_most_part_tells_nothing_of_memory(record: Record, a_minute: float) -> None:
    for process in ("agent", "dashboard"):
        _grow(record, 1, a_minute, process)
        record["usage"][process] = [row for row in record["usage"][process] if row[0] < 900]
    lines = {one.name: one for one in judge(record | {"seconds": 900.0})}
    assert lines["agent: memory"].met is None
    assert lines["dashboard: memory"].met is None
    assert "in 10 of 20 min" in lines["agent: memory"].value


def test_a_gap_is_explained_by_faults_that_cover_it_whole() -> None:
    def fault(began: float, ended: float) -> dict[str, float]:
        return {"began": began, "ended": ended}

    assert explained((10.0, 22.0), [fault(11.0, 18.0)])
    assert explained((10.0, 40.0), [fault(20.0, 35.0), fault(11.0, 18.0)])
    assert not explained((10.0, 40.0), [fault(11.0, 18.0)])
    assert not explained((10.0, 40.0), [fault(11.0, 18.0), fault(36.0, 38.0)])
    assert not explained((10.0, 40.0), [fault(16.0, 40.0)])
    assert not explained((10.0, 14.0), [])


def test_gaps_reach_to_both_ends() -> None:
    assert gaps([5.0, 6.0, 12.0], 0.0, 20.0) == [(0.0, 5.0), (6.0, 12.0), (12.0, 20.0)]
    assert gaps([1.0, 3.0, 5.0], 0.0, 6.0) == []


def test_the_slope_is_that_of_the_line() -> None:
    assert slope_a_minute([[t, 7.0 + 2.0 * t] for t in (0.0, 1.0, 5.0, 9.0)], 1) == pytest.approx(120.0)
