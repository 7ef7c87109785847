"""The demo's screen: every name and number whole, at any width, and plain lines where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from agent.demo.screen import Screen, live_table
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import PoolSample
from agent.web.presenter import summarize
from agent.wire import EngineSummary
from engine_shim.snapshot import MapSnapshot

ENGINES = (("demo-vllm", "vllm"), ("demo-relocating", "relocating"))
Summaries = list[EngineSummary]


@pytest.fixture
def engines(make_snapshot: Callable[..., MapSnapshot]) -> Summaries:
    """Two pools of the demo's size; numbers as wide as they get."""
    states = [4] + [0] * 10_000 + [2] * 30_123 + [1] * 40_001 + [3] * 11_075
    made = []
    for engine_id, policy in ENGINES:
        snapshot = make_snapshot(
            states, engine_id=engine_id, policy=policy, running_requests=256, waiting_requests=1_234
        )
        sample = PoolSample(
            id=f"{engine_id}.dp0.tp0.pp0.kv",
            state="live",
            reason="",
            snapshot=snapshot,
            report=analyze(snapshot.states),
            fragmentation_known=True,
            waste=None,
            oldest_pinned_seconds=None,
            forecast=ExhaustionForecast(None, "no trend"),
            tokens_per_second=None,
            torn_reads=0,
            read_seconds=0.0,
        )
        made.append(summarize(sample, snapshot.heartbeat_unix_ns / 1e9))
    return made


def shown(engines: Summaries, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(live_table(engines, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_nothing_is_cut_short(engines: Summaries, width: int) -> None:
    text = shown(engines, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for word in ("demo-vllm", "demo-relocating", "live", "0.452", "0.200"):
        assert word in text, text
    assert "(relocating)" not in text  # the id says it


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (80, ("256", "10,000", "40,001", "30,123", "11,075")),
        (100, ("256", "1,234", "10,000", "40,001", "30,123", "11,075")),
        (140, ("256", "1,234", "10,000", "40,001", "30,123", "11,075", "waiting", "fragmentation")),
    ],
)
def test_what_common_widths_hold(engines: Summaries, width: int, numbers: tuple[str, ...]) -> None:
    text = shown(engines, width)
    for number in numbers:
        assert number in text, text


def test_a_policy_that_the_id_does_not_tell_is_told(engines: Summaries) -> None:
    assert "demo-vllm (fifo)" in shown([engines[0].model_copy(update={"policy": "fifo"})], 140)


def test_without_a_terminal_there_are_lines(engines: Summaries) -> None:
    out = io.StringIO()
    with Screen(console=Console(file=out, width=80, highlight=False, soft_wrap=True)) as screen:
        screen.started("http://127.0.0.1:1", None, Path("/dev/shm/kvatlas-0/demo-x"))
        for _ in range(12):
            screen.show(engines, [])
    lines = out.getvalue().splitlines()
    assert "Maps       /dev/shm/kvatlas-0/demo-x  (other commands find them with KVATLAS_DIR set to that)" in lines
    assert [line.split(":")[0] for line in lines if "running" in line] == ["demo-vllm", "demo-relocating"] * 2
    assert "demo-relocating: live, 256 running, 1,234 waiting, live share 0.452, fragmentation 0.200" in lines
