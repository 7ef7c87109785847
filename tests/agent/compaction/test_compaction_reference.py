"""The agent beside the reference engine, both as processes: it acts on what is fragmented, and contents stay whole."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.client import AgentClient

ROOT = Path(__file__).resolve().parents[3]
ID = "engine.dp0.tp0.pp0.kv"
BLOCKS, SEQUENCES, PROMPT_BLOCKS, BLOCK_TOKENS = 1024, 118, 8, 128
Start = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sequences that fill most of the pool at once; a third of them end soon, here and there among the others."""
    path, order = tmp_path / "trace.csv", random.Random(1)
    short = set(order.sample(range(SEQUENCES), SEQUENCES // 3))
    rows = [f"0,{BLOCK_TOKENS * PROMPT_BLOCKS - 24},{20 if index in short else 2000}" for index in range(SEQUENCES)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture
def start_reference(folder: Path, trace: Path) -> Iterator[Start]:
    """Starts reference engines on that trace; each must end well, with every block holding what it must."""
    started: list[subprocess.Popen[str]] = []

    def start(policy: str, *flags: str) -> None:
        arguments = ["--engine-id", "engine", "--policy", policy, "--trace", str(trace), "--blocks", str(BLOCKS)]
        arguments += [
            "--headroom",
            "0",
            "--block-size",
            str(BLOCK_TOKENS),
            "--tokens-per-second",
            "10",
            "--move-budget-ms",
            "20",  # these tests are of the agent; on a busy machine 2 ms are one move a step
            "--verify-every",
            "5",
        ]
        arguments += ["--model-geometry", "test-tiny", "--device", "cpu", "--map-folder", str(folder), *flags]
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_shim.reference", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)

    yield start
    for process in started:
        process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert json.loads(output.splitlines()[-1])["mismatched_blocks"] == 0


def agent_flags(*more: str) -> tuple[str, ...]:
    return ("--interval-seconds", "0.2", "--compaction-for-seconds", "1", *more)


def told_by(client: AgentClient) -> list[str]:
    """Outcomes in the audit log, oldest first; one is there a moment after what it tells of can be seen."""
    return [entry.outcome for entry in reversed(client.compactions(ID).entries)]


def test_an_ordered_engine_comes_down(
    start_reference: Start, start_agent: Start, client_of: Start, wait_until: Start
) -> None:
    start_reference("lowest-any")
    client = client_of(start_agent(*agent_flags()))
    wait_until(lambda: client.engines().engines)
    run = wait_until(lambda: client.compaction(ID).last_run).run
    assert run.decision == "reached"
    assert run.moved_blocks > 0
    assert run.fragmentation_rate_before > 0.30
    assert run.fragmentation_rate_after <= 0.12
    wait_until(lambda: client.engine(ID).fragmentation.rate <= 0.12)
    told = wait_until(lambda: "reached" in (outcomes := told_by(client)) and outcomes)
    assert told.index("compact") < told.index("reached")


def test_a_stock_engine_is_given_relocation_first(
    start_reference: Start, start_agent: Start, client_of: Start, wait_until: Start
) -> None:
    start_reference("vllm")
    client = client_of(start_agent(*agent_flags()))
    wait_until(lambda: client.engines().engines and client.engine(ID).policy == "relocating")
    told = wait_until(lambda: "on" in (outcomes := told_by(client)) and outcomes)
    assert told.index("relocate") < told.index("on")


def test_where_relocation_is_not_wanted_a_stock_engine_has_its_run(
    start_reference: Start, start_agent: Start, client_of: Start, wait_until: Start
) -> None:
    start_reference("vllm")
    client = client_of(start_agent(*agent_flags("--no-compaction-relocation")))
    wait_until(lambda: client.engines().engines and client.compaction(ID).last_run)
    state = client.compaction(ID)
    assert state.budget.moved_bytes <= (state.budget.allowance_bytes or 0) + state.budget.written_share * 10**9
    assert client.engine(ID).policy == "vllm"
