"""The one table of bars: every bar of every benchmark is in it, and what is missed or not there never reads as met."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks._bar_table import COLUMNS, LINE, Outcome, Row, as_markdown, as_text, judge
from benchmarks._bars import BARS, WITHOUT_A_BAR, Bar, at, soak_bars
from benchmarks._soak_verdict import judge as judge_soak

BAR_NAME = re.compile(r"(?:^|_)BARS?(?:_|$)")
MACHINE = {"cpu": "A CPU", "cores": 2, "kernel": "6.1", "python": "3.12.1", "load_average_before": 0.25}
INTERVAL = {"median": 1.0, "low": 0.99, "high": 1.01}
SAME = {"tokens": "a", "hits": "b", "evicted": "c"}
COST = {
    "blocks": 3000,
    "budget_ms": 2.0,
    "time_share_bound": 0.0125,
    "excess_p99_ms": 1.5,
    "excess_cpu_p99_ms": 1.5,
    "work_cpu_p99_ms": 1.5,
    "throughput_ratio": 0.99,
    "throughput_cpu_ratio": 0.99,
    "time_share_cpu": 0.01,
    "mismatches": 0,
}
FACTS = {"mismatched_blocks": 0}
# Of each benchmark what of its JSON the table reads, all bars met.
SAMPLES: dict[str, Any] = {
    "agent_cost": {
        "cpu_share_of_a_core": {"value": 0.005},
        "resident_mb": {"value": 90.0},
        "slope_mb_per_minute": {"value": -0.01},
    },
    "alert_delivery": {
        "refused_as_invalid": 0,
        "slack": {"firings": 5000, "lost": 0, "told_twice_without_cause": 0},
        "webhook": {"messages": 206, "lost": 0, "never_told": 0, "left_open": 0, "told_twice_without_cause": 0},
        "told_open_at_the_end": {"slack": 0, "webhook": 0},
        "always_durable": True,
    },
    "alert_latency": {name: {"lost": 0, "p99": 1.5} for name in ("alertmanager", "slack")},
    "alert_sampling": {"requests_left_unanswered": 9, "p99_ratio": 1.01},
    "analyze": {
        "rows": [
            {"pool": "1,000,000 blocks, 5,000 runs", "median_ms": 1.0},
            {"pool": "1,000,000 blocks, random", "median_ms": 5.0},
            {"pool": "16,000,000 blocks, 20,000 runs", "median_ms": 20.0},
        ]
    },
    "block_copy": {
        "rows": [
            {"model": model, "pool": pool, "share": 0.9}
            for model in ("small", "large")
            for pool in ("islands", "aged", "random")
        ]
    },
    "block_pool": {
        "rows": [
            {"blocks": blocks, "step_operations": step, "ratio": 1.1, "ratio_quartiles": [1.0, 1.2]}
            for blocks in (1, 8, 128)
            for step in (16, 32, 64)
        ]
    },
    "compaction": {"costs": [COST, {**COST, "blocks": 91_200}], "gain": {"realised_share": 0.99, "mismatches": 0}},
    "dashboard": {
        "first_paint_ms": {"cold": 3000.0, "warm": 2000.0},
        "views": {view: {"refresh_ms": 100.0, "whole_page_bytes": 90_000} for view in ("pool", "fleet")},
    },
    "engine_identity": {"rows": [{"difference": "", "vllm": FACTS, "relocating": FACTS}]},
    "fleet": {
        "agents": 50,
        "seconds": 120.0,
        "scrape_interval_seconds": 15,
        "operations_a_second": [1200, 1250],
        "scrapes": {
            "targets": 50,
            "p99_ms": 30.0,
            "failed": 0,
            "fewest_of_a_target": 8,
            "longest_gap_seconds": 15.1,
        },
        "view": {"shown": 50, "page_errors": []},
    },
    "metrics": {"p99_ms": 20.0, "render_over_prometheus_client": 0.2},
    "recording": {"lost_events": 0, "cpu_share": 0.01, "mb_per_hour": 16.0},
    "sglang_allocator": {
        "rows": [
            {"pool": pool, "ratio": 1.02, "quartiles": [1.01, 1.03]}
            for pool in ("token, 20,000 slots", "token, 1,000,000 slots", "paged, 1,000,000 slots")
        ]
    },
    "soak": {"verdict": [{"name": name, "value": "1: a, b", "met": True} for name, _ in soak_bars()]},
    "transformers_throughput": {
        "rows": [
            {"what": what, "unit": "tokens/s", "ratio": 0.99, "low": 0.97, "high": 1.01}
            for what in ("watched", "not watched")
        ]
    },
    "vllm_gpu": [
        {"runner": runner, "mode": mode, "runs": [SAME, SAME]} for runner in ("V1", "V2") for mode in ("without", "on")
    ],
    "vllm_observer": {
        "rows": [
            {
                "blocks": blocks,
                "step_operations": step,
                "hashed": hashed,
                "ratio": 1.1,
                "ratio_quartiles": [1.0, 1.2],
            }
            for blocks in (1, 8, 128)
            for step in (16, 32, 64)
            for hashed in (False, True)
        ]
    },
    "vllm_relocation": {"throughput": INTERVAL},
    "vllm_throughput": {"allocation": "stock", "throughput": INTERVAL},
}
# Each alone, in its kind, is far from every bar.
EXTREMES: dict[type, tuple[Any, ...]] = {
    bool: (False,),
    int: (-(10**9), 10**9),
    float: (-1e9, 1e9),
    str: ("something else",),
    list: (["an error"],),
}


def result_of(bar: Bar) -> Any:
    """An invented JSON in which the bar is met."""
    sample = copy.deepcopy(SAMPLES[bar.benchmark])
    if bar.what.startswith("throughput, relocating") and bar.benchmark == "vllm_throughput":
        sample["allocation"] = "relocating"
    return sample


def row_of(bar: Bar, result: Any) -> Row:
    (row,) = judge([bar], {bar.benchmark: result})
    return row


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value as (the thing that holds it, its key or index)."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def changed(bar: Bar, change: Callable[[Any, Any], list[Callable[[], None]]]) -> set[Outcome]:
    """Outcomes of the bar with each change at each place alone."""
    found = set()
    for number in range(len(list(places(result_of(bar))))):
        for option in range(len(change(*list(places(result_of(bar)))[number]))):
            result = json.loads(json.dumps(result_of(bar)))  # nothing in it is shared
            change(*list(places(result))[number])[option]()
            found.add(row_of(bar, result).outcome)
    return found


def test_every_benchmark_is_in_the_table_or_has_no_bar() -> None:
    with_bars = {bar.benchmark for bar in BARS}
    assert with_bars.isdisjoint(WITHOUT_A_BAR)
    assert sorted(with_bars | set(WITHOUT_A_BAR)) == command.names()


def test_what_has_no_bar_speaks_of_none() -> None:
    for name in WITHOUT_A_BAR:
        text = (command.HERE / f"{name}.py").read_text()
        assert not re.search(r"\bbars?\b", text, re.IGNORECASE), name
        assert constants(text) == [], name


def constants(text: str) -> list[str]:
    """Module-level names of a script that are bars."""
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])]
    return [target.id for target in targets if isinstance(target, ast.Name) and BAR_NAME.search(target.id)]


def unrepresented(name: str, bars: tuple[Bar, ...]) -> list[str]:
    """Bars of a script, as NAME value, that no bar of the table has as its limit."""
    limits = {bar.limit for bar in bars if bar.benchmark == name}
    module = import_module(f"benchmarks.{name}")
    return [
        f"{constant} {number}"
        for constant in constants(Path(str(module.__file__)).read_text())
        for value in [getattr(module, constant)]
        for number in (value.values() if isinstance(value, dict) else [value])
        if number not in limits
    ]


@pytest.mark.parametrize("name", command.names())
def test_every_bar_of_a_script_is_in_the_table(name: str) -> None:
    assert unrepresented(name, BARS) == []


def test_a_bar_that_is_not_in_the_table_is_noticed() -> None:
    one_less = tuple(bar for bar in BARS if bar.limit != 120.0)
    assert unrepresented("agent_cost", one_less) == ["MEMORY_BAR_MB 120.0"]
    assert constants("A = 1\nBAR = 2\nBARS: int = 3\nBARREL = 4\nBAR_MS = 5\nX_BAR = 6\n") == [
        "BAR",
        "BARS",
        "BAR_MS",
        "X_BAR",
    ]


def test_the_soaks_lines_are_those_of_its_verdict(record: dict[str, Any]) -> None:
    assert list(soak_bars()) == [(line.name, line.bar) for line in judge_soak(record)]


def test_bars_can_be_told_apart() -> None:
    assert len({(bar.benchmark, bar.what) for bar in BARS}) == len(BARS)


each_bar = pytest.mark.parametrize("bar", BARS, ids=lambda bar: f"{bar.benchmark}: {bar.what}")


@each_bar
def test_a_bar_is_met_missed_not_run_or_unreadable(bar: Bar) -> None:
    assert row_of(bar, result_of(bar)).outcome is Outcome.MET
    (row,) = judge([bar], {})
    assert (row.outcome, row.measured) == (Outcome.NOT_RUN, "")
    nothings: tuple[object, ...] = ({}, [], None, "text", 0)
    for nothing in nothings:
        assert row_of(bar, nothing).outcome is Outcome.ERROR


def delete(holder: Any, key: Any) -> list[Callable[[], None]]:
    return [lambda: holder.__delitem__(key)]


def spoil(holder: Any, key: Any) -> list[Callable[[], None]]:
    return [lambda: holder.__setitem__(key, None)]


def exaggerate(holder: Any, key: Any) -> list[Callable[[], None]]:
    values = EXTREMES.get(type(holder[key]), ())
    return [lambda value=value: holder.__setitem__(key, value) for value in values]  # type: ignore[misc]


@each_bar
def test_some_value_of_the_result_makes_it_miss(bar: Bar) -> None:
    assert Outcome.MISSED in changed(bar, exaggerate)


@each_bar
def test_a_value_that_is_missing_or_null_is_an_error(bar: Bar) -> None:
    assert Outcome.ERROR in changed(bar, delete)
    assert Outcome.ERROR in changed(bar, spoil)


PLAIN = Bar("plain", "time of it", at("a", "b"), 2.0, "ms", "theirs")
SPEED = Bar("plain", "speed of it", at("a", "b"), 0.98, at_least=True)


@pytest.mark.parametrize(
    ("bar", "value", "outcome", "measured"),
    [
        (PLAIN, 1.234, Outcome.MET, "1.23 ms"),
        (PLAIN, 2.0, Outcome.MET, "2 ms"),
        (PLAIN, 2.5, Outcome.MISSED, "2.50 ms"),
        (PLAIN, 2.0004, Outcome.MISSED, "2.0004 ms"),  # not 2.00, which would be met
        (PLAIN, 12345.6, Outcome.MISSED, "12,346 ms"),
        (SPEED, 0.98, Outcome.MET, "0.980"),
        (SPEED, 0.97996, Outcome.MISSED, "0.97996"),
        (SPEED, 1, Outcome.MET, "1"),
        (SPEED, 0.5, Outcome.MISSED, "0.500"),
    ],
)
def test_a_value_is_shown_on_its_side_of_the_bar(bar: Bar, value: float, outcome: Outcome, measured: str) -> None:
    row = row_of(bar, {"a": {"b": value}})
    assert (row.outcome, row.measured) == (outcome, measured)


@pytest.mark.parametrize("value", [None, True, "1.0", [], float("nan")])
def test_what_is_no_number_is_an_error(value: object) -> None:
    row = row_of(PLAIN, {"a": {"b": value}})
    assert row.outcome is Outcome.ERROR
    assert row.measured.startswith("no value: ")


def test_a_limit_that_an_option_sets_is_that_of_the_run() -> None:
    bar = next(bar for bar in BARS if bar.what == "work of a run in a step, CPU time, p99, 110 kB blocks")
    result = result_of(bar)
    assert row_of(bar, result).bar == "at most 2 ms"
    result["costs"] = [{**one, "budget_ms": 1.0} for one in result["costs"]]
    row = row_of(bar, result)
    assert (row.bar, row.outcome) == ("at most 1 ms", Outcome.MISSED)
    result["costs"][0]["budget_ms"] = 2.0
    assert row_of(bar, result).outcome is Outcome.ERROR


def test_what_options_left_out_is_not_run() -> None:
    bars = {bar.limit: bar for bar in BARS if bar.benchmark == "vllm_throughput"}
    row = row_of(bars[0.97], SAMPLES["vllm_throughput"])
    assert (row.outcome, row.measured) == (Outcome.NOT_RUN, "needs --allocation relocating")
    assert row_of(bars[0.99], SAMPLES["vllm_throughput"]).outcome is Outcome.MET


def test_a_benchmark_that_gave_no_result_is_an_error() -> None:
    assert [row.outcome for row in judge([PLAIN], {"failed": ["plain"], "ran": ["plain"]})] == [Outcome.ERROR]
    assert [row.outcome for row in judge([PLAIN], {"failed": [], "ran": ["plain"]})] == [Outcome.ERROR]
    assert [row.outcome for row in judge([PLAIN], {"failed": ["other"], "ran": ["other"]})] == [Outcome.NOT_RUN]


def test_the_table_is_aligned_and_narrow() -> None:
    rows = judge(BARS, {**SAMPLES, "metrics": {}, "failed": ["fleet"]} | {"soak": {"verdict": []}})
    lines = as_text(rows, MACHINE, command.how_to_run()).splitlines()
    assert lines[0] == "A CPU, 2 cores, Linux 6.1, Python 3.12.1, load average 0.2 before"
    assert max(map(len, lines)) <= LINE
    starts = [lines[2].index(name) for name, _ in COLUMNS]
    body = [line for line in lines[3:-2] if line.startswith("  ")]
    assert len(body) >= len(BARS)
    assert all(line[start - 2 : start].strip() == "" for line in body for start in starts)
    assert lines[-1].startswith(f"{len(BARS)} bars: ")


def test_the_table_says_how_to_run_what_was_not() -> None:
    rows = judge(BARS, {"metrics": SAMPLES["metrics"]})
    text, markdown = (make(rows, MACHINE, command.how_to_run()) for make in (as_text, as_markdown))
    assert "\nsoak  (not run: make bench ARGS=soak, 7 minutes)\n" in text
    assert "\nmetrics\n" in text
    assert "| soak | console errors | `make bench ARGS=soak`, 7 minutes | 0 |  | not run |" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == len(BARS) + 2
    assert {line.count("|") for line in table} == {7}


def test_long_ones_run_when_asked_for() -> None:
    short, every = command.chosen((), everything=False), command.chosen((), everything=True)
    assert set(command.LONG) | set(command.ELSEWHERE) <= set(command.names())
    assert set(every) == set(command.names()) - set(command.ELSEWHERE)
    assert set(every) - set(short) == set(command.LONG)
    assert command.chosen(["soak", "vllm_gpu"], everything=False) == ["soak", "vllm_gpu"]


def test_help_names_the_long_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in command.names() if name not in text] == []


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["--all", "metrics"], ["--table", "x", "--all"], ["--", "--short"], ["a", "b", "--", "--short"]],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


SCRIPT = """
import pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
if "--nothing" not in sys.argv:
    path.write_text('{"p99_ms": %s}')
sys.exit(%d)
"""


@pytest.mark.parametrize(
    ("p99", "status", "options", "outcome"),
    [(1.0, 0, [], "met"), (99.0, 1, [], "misses"), (99.0, 0, [], "misses"), (1.0, 0, ["--", "--nothing"], "error")],
)
def test_a_run_shows_and_keeps_the_table(
    p99: float,
    status: int,
    options: list[str],
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "scripts").mkdir()
    for name in command.names():
        (tmp_path / "scripts" / f"{name}.py").write_text(SCRIPT % (p99, status))
    monkeypatch.setattr(command, "HERE", tmp_path / "scripts")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.json").write_text('{"p99_ms": 1.0}')  # of an earlier run, which must not speak
    expected = 0 if (outcome, status) == ("met", 0) else 1
    assert command.main(["metrics", "--out", str(tmp_path / "out"), *options]) == expected
    shown = capfd.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.startswith("  scrape of an agent with 32")]
    assert row.endswith(outcome)
    (row,) = [line for line in (tmp_path / "out" / "table.md").read_text().splitlines() if "| metrics |" in line]
    assert row.endswith(f"| {outcome} |")
    assert command.main(["--table", str(tmp_path / "out")]) == (0 if outcome == "met" else 1)
    again = capfd.readouterr().out
    assert again.strip() in shown


def test_a_table_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"results\.json cannot be read"):
        command.main(["--table", str(tmp_path)])
    (tmp_path / "results.json").write_text('{"schema": "other"}')
    with pytest.raises(SystemExit, match="is not of the schema"):
        command.main(["--table", str(tmp_path)])
