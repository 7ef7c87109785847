"""`kvatlas simulate --sizes`: hits against pool size, one full simulation each."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main
from agent.commands.sizes import auto_sizes, parse_sizes, range_of_trace, simulate_sizes
from engine_shim.errors import SettingsError
from engine_shim.simulator import SimulationReport, simulate
from engine_shim.workload import Workload, load_workload


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that come back in turn: how many of them are found again depends on how many fit."""
    path = tmp_path_factory.mktemp("traces") / "turns.jsonl"
    lines = []
    for turn in range(4):
        for talk in range(12):
            ids = [talk * 100 + part for part in range(turn + 1)]
            tokens = {"prompt_tokens": 512 * (turn + 1), "output_tokens": 20, "hash_ids": ids}
            lines.append(json.dumps({"arrival_s": 12.0 * turn + talk, **tokens}))
    path.write_text("\n".join(lines))
    return path


def run(workload: Workload, size: int) -> SimulationReport:
    return simulate(workload, policies=("vllm",), blocks=size)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_each_size_is_what_a_simulation_of_that_size_says(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = told(capsys, str(trace), "--sizes", "1600,200,600")
    assert curve["schema"] == "kvatlas.simulate-sizes/v1"
    assert [one["blocks"] for one in curve["sizes"]] == [200, 600, 1600]
    for one in curve["sizes"]:
        whole = told(capsys, str(trace), "--blocks", str(one["blocks"]), "--policy", "vllm")
        point = dict(one["policies"]["vllm"])
        share = point.pop("prefix_hit_share")
        assert point == whole["policies"]["vllm"]
        assert share == point["prefix_hit_tokens"] / point["prefix_query_tokens"]
        assert one["lower_bound"] is False
    shares = [one["policies"]["vllm"]["prefix_hit_share"] for one in curve["sizes"]]
    assert shares[0] < shares[1] < shares[2]


def test_several_processes_say_what_one_says(trace: Path) -> None:
    workload = load_workload(trace)
    sizes = (300, 900)
    assert simulate_sizes(partial(run, workload), sizes) == [run(workload, size) for size in sizes]


def test_the_sizes_of_auto_go_from_what_must_fit_to_what_holds_everything(trace: Path) -> None:
    workload = load_workload(trace)
    least, most = range_of_trace(workload, 16, 0.10)
    small, large = run(workload, least), run(workload, most)
    assert small.rejected_requests == 0
    assert run(workload, least - 3).rejected_requests > 0
    assert large.policies["vllm"].evictions == 0
    bigger = run(workload, 2 * most)
    assert bigger.policies["vllm"].prefix_hit_tokens == large.policies["vllm"].prefix_hit_tokens
    sizes = auto_sizes(least, most)
    assert (sizes[0], sizes[-1], len(sizes)) == (least, most, 8)
    assert list(sizes) == sorted(set(sizes))
    assert auto_sizes(5, 6) == (5, 6)


def test_a_plot_holds_the_curve(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--sizes", "400,800", "--plot", str(tmp_path / "curve.html")]) == 0
    out = capsys.readouterr().out
    assert "400" in out
    assert "800" in out
    page = (tmp_path / "curve.html").read_text()
    assert "prefix hits against pool size" in page
    assert "http" not in page.partition("<body>")[0].replace("http-equiv", "").replace('content="http', "")


@pytest.mark.parametrize("text", ["", "0", "a", "10,-1", "10;20", str(1 << 40), ",".join(map(str, range(1, 66)))])
def test_sizes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize("flags", [["--headroom", "1"], ["--headroom", "nan"], ["--block-size", "0"]])
def test_what_no_pool_could_be_is_refused(trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["simulate", str(trace), "--sizes", "auto", *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_sizes_come_in_order_and_once() -> None:
    assert parse_sizes("30, 10,30") == (10, 30)
    assert parse_sizes("auto") is None


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--sizes", "10", "--compare"], "one of --compare and --sizes"),
        (["--plot", "x.html"], "add --compare or --sizes"),
    ],
)
def test_flags_that_contradict_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    assert main(["simulate", str(trace), *flags]) == 2
    assert why in capsys.readouterr().err
