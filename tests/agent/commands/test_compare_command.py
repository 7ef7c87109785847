"""`kvatlas simulate --compare`: the table, the JSON, the plot, and what is said where plotly is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent import cli
from agent.commands import compare as compare_command
from agent.commands.compare import NAMED_POOLS, pool_sizes, render_comparison
from engine_shim.simulator import simulate
from engine_shim.workload import BUNDLED_TRACES, TraceRequest, Workload

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    rows = [f"{i * 0.5},{150 + i % 7 * 40},{30 + i % 5 * 20}" for i in range(120)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    return path


def test_every_bundled_trace_has_named_pools() -> None:
    assert set(NAMED_POOLS) == set(BUNDLED_TRACES)
    assert pool_sizes("azure-conv", None) == (5_000, 8_000)
    assert pool_sizes("azure-conv", 700) == (700,)
    assert pool_sizes("own.csv", None) == (60_000,)


def test_table_and_json_say_the_same(trace: Path, capsys: Capture) -> None:
    arguments = ["simulate", str(trace), "--compare", "--blocks", "300"]
    assert cli.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["trace"]) == ("kvatlas.simulate-compare/v1", str(trace))
    (pool,) = document["pools"]
    assert list(pool["policies"]) == ["vllm", "lowest-any", "relocating"]
    stock, _, relocating = pool["policies"].values()
    assert relocating["evictions"] == stock["evictions"] > 0
    assert relocating["copies_per_allocated_block"] > 0 == stock["copies_per_allocated_block"]
    assert cli.main(arguments) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["blocks", "live", "policy", "F", "p10", "p50", "p90", "hits", "evictions", "copies/blk",
                            "desc/blk"]  # fmt: skip
    cells = lines[2].split()
    assert cells[0] == "300"
    assert cells[2] == "relocating"
    assert cells[4] == f"{relocating['settled_fragmentation_rate']['p50']:.2f}"
    assert cells[8] == f"{relocating['copies_per_allocated_block']:.2f}"


def test_what_is_undefined_is_a_dash() -> None:
    report = simulate(Workload("one", (TraceRequest(0, 0.0, 16, 1),), 0), policies=["vllm"], blocks=2, headroom=0)
    assert render_comparison([report]).splitlines()[1].split()[-1] == "1.000"
    nothing = simulate(Workload("none", (TraceRequest(0, 0.0, 99, 1),), 0), policies=["vllm"], blocks=2, headroom=0)
    assert render_comparison([nothing]).splitlines()[1].split()[3:6] == ["-", "-", "-"]


def test_the_plot_is_one_file_with_every_policy_and_size(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    plot = tmp_path / "plot.html"
    flags = ["--policy", "vllm", "--policy", "relocating", "--blocks", "300", "--plot", str(plot)]
    assert cli.main(["simulate", str(trace), "--compare", *flags]) == 0
    text = plot.read_text()
    for words in ('"name":"vllm"', '"name":"relocating"', '"x":["300"]', "Copies per allocated block"):
        assert words in text
    assert "<script src=" not in text  # opened without a network


def test_a_plot_without_plotly_is_refused_before_anything_is_simulated(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(compare_command, "find_spec", lambda name: None)
    assert cli.main(["simulate", str(trace), "--compare", "--plot", str(tmp_path / "plot.html")]) == 2
    assert "error: a plot needs plotly; pip install 'kvatlas[dashboard]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plot", "plot.html"], "error: --plot draws a comparison, or hits against sizes; add --compare or --sizes"),
        (["--compare", "--plot", "/nowhere/plot.html"], "error: the plot cannot be written to /nowhere/plot.html"),
    ],
)
def test_wrong_usage(trace: Path, flags: list[str], words: str, capsys: Capture) -> None:
    assert cli.main(["simulate", str(trace), "--blocks", "300", *flags]) == 2
    assert words in capsys.readouterr().err
