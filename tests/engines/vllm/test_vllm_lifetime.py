"""vLLM 0.32 over a long life: nothing of ours ends early, grows, or outlives the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = dict[str, Any]
MEMORY_WARNING = "not in memory"


def said(report: Report) -> list[str]:
    """What our logger said, apart from where the maps lie."""
    return [line for line in report["log"] if MEMORY_WARNING not in line]


def test_requests_that_end_before_their_step_is_shown_end_nothing_else(lifetime: Report) -> None:
    report = lifetime["structured"]
    assert report["batches"] == 2
    assert report["gone_before_shown"]["ended"] >= 5
    assert report["gone_before_shown"]["aborted"] >= 1
    assert report["finish_reasons"]["stop"] >= 5
    assert (report["reason"], report["degraded"], report["repairs"]) == ("", False, 0)
    assert report["first"] == []
    assert report["steps"] > 30
    assert said(report) == []


def test_with_a_kv_consumer_and_two_batches_in_flight_ended_requests_are_closed(lifetime: Report) -> None:
    report = lifetime["consumer"]
    assert report["defers"]
    assert report["served"] >= 150
    assert report["with_waiting_blocks"] > 100
    assert report["most_ended"] < 12
    assert report["unnamed"] == 0
    assert report["owners_at_rest"] == 0
    assert report["differences"] == []
    assert (report["reason"], report["repairs"]) == ("", 0)


def test_each_reset_of_the_prefix_cache_lets_the_old_table_go(lifetime: Report) -> None:
    report = lifetime["resets"]
    assert len(set(report["hooks"])) == 1
    assert report["tables_left"] == 0
    assert report["watched"]
    assert report["differences"] == []


def test_each_map_of_an_engine_that_wakes_names_its_devices(lifetime: Report) -> None:
    assert lifetime["named_devices"]["names"] == [["GPU-1", "GPU-2"]] * 3


def test_an_engine_that_wakes_without_a_map_is_left_alone(lifetime: Report) -> None:
    report = lifetime["woken_without_a_map"]
    assert report["relocated"] == [True, False]
    assert report["reasons"][0] == report["reasons"][1] != ""
    assert report["hooked"] == []
    assert report["watched"] == 0
    assert report["same"]
    (line,) = said(report)
    assert "not instrumented" in line


def test_an_engine_that_has_ended_is_not_held(lifetime: Report) -> None:
    assert lifetime["let_go"] == {"watched": True, "left": []}


def test_an_idle_engine_core_that_is_turned_off_is_left_alone_at_once(drive: Callable[..., Report]) -> None:
    report = drive("drive_idle", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert report["watched"] == [1]
    assert report["files"] == [[".kvmap", ".sock"], []]
    assert report["same"]
