"""`kvatlas demo-vllm` as a person starts it, with real vLLM and SmolLM2: it serves, sums up, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import wire
from agent.client import AgentClient, AgentUnavailable
from tests.agent.demo.test_demo import Demo, eventually

BLOCKS, BLOCK_TOKENS = 200, 32
START_SECONDS = 900.0  # a first start with nothing cached, on a machine that has other work


@pytest.fixture(scope="session")
def smollm2(repository_root: Path, vllm_python: Path) -> Path:
    """The model's folder, made in the cache when it is not there."""
    script = repository_root / "scripts" / "smollm2.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return Path(found.stdout.strip())


@pytest.fixture
def demo(tmp_path: Path, vllm_python: Path, smollm2: Path) -> Iterator[Demo]:
    """One demo on a small pool. Without a dashboard, which the other demo's tests start."""
    flags = ["--python", str(vllm_python), "--model", str(smollm2), "--blocks", str(BLOCKS), "--no-dashboard"]
    started = Demo(tmp_path, *flags, "--json", command="demo-vllm")
    yield started
    started.process.kill()
    started.process.communicate()
    eventually(started.is_alone, "the demo's processes to end")


def await_engine(demo: Demo, ready: Callable[[wire.EngineSummary], bool]) -> wire.EngineSummary:
    """The engine as the demo's agent tells of it, once `ready`."""
    deadline = time.monotonic() + START_SECONDS
    with AgentClient(f"http://127.0.0.1:{demo.port}", timeout_seconds=60.0) as client:
        while True:
            assert demo.process.poll() is None, demo.process.communicate()
            assert time.monotonic() < deadline
            try:
                found = [one for one in client.engines().engines if ready(one)]
            except AgentUnavailable:
                found = []
            if found:
                return found[0]
            time.sleep(0.1)


def compared(engine: wire.EngineSummary) -> bool:
    """Whether the engine's own metrics have been held against its map."""
    return engine.metrics_comparison is not None and engine.metrics_comparison.compared


def test_it_serves_a_trace_and_the_engine_s_own_metrics_agree_with_its_map(demo: Demo) -> None:
    engine = await_engine(demo, compared)
    assert (engine.kind, engine.model, engine.total_blocks) == ("vllm", "smollm2-135m", BLOCKS)
    assert engine.metrics is not None
    assert engine.metrics.values["capacity_tokens"] == BLOCKS * BLOCK_TOKENS
    assert {"kv_usage_ratio", "running_requests", "waiting_requests", "preemptions", "prefix_query_tokens"} <= set(
        engine.metrics.values
    )
    assert engine.metrics.notes == []
    # Cached blocks are those of a request that ended; some steps later its answer has arrived, too.
    engine = await_engine(demo, lambda one: one.blocks.cached > 0 and compared(one))
    steps = engine.counters["steps"]
    await_engine(demo, lambda one: one.counters["steps"] > steps + 20 and compared(one))
    demo.process.send_signal(signal.SIGINT)
    out, err = demo.process.communicate(timeout=START_SECONDS)
    assert demo.process.returncode == 0, err
    summary = json.loads(out)
    assert summary["schema"] == "kvatlas.demo-vllm/v1"
    assert summary["requests_failed"] == 0
    assert summary["prompt_tokens"] > 0
    assert summary["repairs"] == 0
    assert 0 < summary["live_share_max"] <= 1
    assert summary["fragmentation_rate_p50"] is not None
    assert summary["metrics_disagreement_ratio"] == 0.0
    eventually(lambda: demo.leftovers() == [], f"nothing left, not {demo.leftovers()}")


def group_of_the_server(demo: Demo) -> int | None:
    """The process group of vLLM's server, which its engine core and worker are in."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"api_server" in command and int(fields_of(entry)[1]) == demo.process.pid:
                return int(entry.name)
    return None


def fields_of(entry: Path) -> list[str]:
    """Of /proc/PID/stat, from the state on; of a process that has ended, those of one that has."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0", "0"]


def members(group: int) -> list[int]:
    """Running processes of the group. Not by their environment, which those that set a title have overwritten."""
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    stats = {int(entry.name): fields_of(entry) for entry in entries}
    return [pid for pid, fields in stats.items() if fields[0] not in "ZX" and int(fields[2]) == group]


def test_killed_it_leaves_no_process_no_map_and_no_port(demo: Demo) -> None:
    eventually(demo.kvmaps, "vLLM's map")
    group = group_of_the_server(demo)
    assert group is not None
    assert len(members(group)) > 1  # what vLLM itself started, too, must go
    shared = set(Path("/dev/shm").glob("psm_*"))
    demo.process.kill()
    demo.process.wait()
    eventually(lambda: demo.leftovers() == [], f"nothing left, not {demo.leftovers()}")
    eventually(lambda: members(group) == [], f"no process of vLLM left, not {members(group)}")
    assert not set(Path("/dev/shm").glob("psm_*")) - shared
