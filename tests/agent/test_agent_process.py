"""The agent as it really runs: a process, a socket, real engines beside it, and signals that end it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.client import AgentClient, AgentRefused, AgentUnavailable

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Any]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_shim.launcher", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin", **environment},
    )


def test_from_the_map_to_the_client(
    start_engine: Start, start_agent: Start, client_of: Callable[..., AgentClient], wait_until: Callable[..., Any]
) -> None:
    engine = start_engine(total_blocks=64)
    owner = engine.open_owner("request-1")
    engine.allocated([1, 2, 3], owner)
    engine.wrote([1, 2, 3], [16, 16, 1], 33)
    engine.progressed([owner], [33])
    engine.step_ended(1, 0)
    client = client_of(start_agent("--interval-seconds", "0.1"))
    (summary,) = wait_until(lambda: [one for one in client.engines().engines if one.blocks.used])
    assert summary.id == engine.id
    assert (summary.state, summary.blocks.used, summary.tail_waste_tokens) == ("live", 3, 15)
    assert client.engine(engine.id).pid == engine.process.pid
    assert client.map(engine.id, 16).blocks_per_cell == 4
    assert [block.owner for block in client.blocks(engine.id, 0, 3).blocks] == [None, "request-1", "request-1"]
    assert client.requests(engine.id).requests[0].tokens == 33
    wait_until(lambda: [p for p in client.history(engine.id, "used", 10).points if p.mean == 3])
    points = client.history(engine.id, "used", 60, points=100).points
    assert len(points) <= 100
    with pytest.raises(AgentRefused) as refused:
        client.engine("nobody")
    assert (refused.value.status, refused.value.error) == (404, "not_found")

    engine.allocated([10], owner)
    engine.step_ended(1, 0)
    wait_until(lambda: client.engine(engine.id).blocks.used == 4)
    engine.kill()
    wait_until(lambda: client.engine(engine.id).state == "gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(number: int, start_agent: Start, start_engine: Start) -> None:
    engine = start_engine()
    agent = start_agent()
    agent.process.send_signal(number)
    assert agent.process.wait(120) == 0
    assert agent.wait_for_event("stopped")
    assert engine.path.exists()
    assert engine.step_ended(0, 0) is None  # the engine goes on
    with pytest.raises(AgentUnavailable, match="no answer from the agent"):
        AgentClient(agent.url, timeout_seconds=1).engines()


def test_two_agents_on_one_map(
    start_engine: Start, start_agent: Start, client_of: Callable[..., AgentClient], wait_until: Callable[..., Any]
) -> None:
    engine = start_engine()
    first, second = start_agent(), start_agent()
    one, other = client_of(first), client_of(second)
    wait_until(lambda: one.engines().engines and other.engines().engines)
    assert one.engines().engines[0].incarnation == other.engines().engines[0].incarnation
    assert first.stop() == 0
    engine.allocated([1])
    engine.step_ended(1, 0)
    wait_until(lambda: other.engine(engine.id).blocks.used == 1)
    assert other.engine(engine.id).state == "live"


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = run("agent", "--listen", f"127.0.0.1:{port}", KVATLAS_DIR=str(folder))
    assert found.returncode == 1
    assert found.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use; ")
    assert "--listen HOST:PORT" in found.stderr


def test_wrong_settings_end_with_2(tmp_path: Path) -> None:
    found = run("agent", KVATLAS_INTERVAL_SECONDS="often")
    assert found.returncode == 2
    assert found.stderr.startswith("error: interval_seconds='often' in the environment")
    assert run("agent", "--token-file", str(tmp_path / "missing")).returncode == 2
    assert run("agent", "--listen", "192.0.2.1:1").returncode == 1  # not an address of this machine


def test_beyond_loopback_without_a_token_changes_are_off(
    start_agent: Start, client_of: Callable[..., AgentClient]
) -> None:
    agent = start_agent("--listen", "0.0.0.0:0")
    agent.url = agent.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
    assert not client_of(agent).engines().agent.writes_enabled
    assert agent.wait_for_event("changes are off: listening beyond loopback without a token")


def test_neither_torch_nor_a_client_is_loaded(start_agent: Start) -> None:
    """What an agent never uses must not cost its pod memory. Libraries with code of their own show as mapped files."""
    agent = start_agent()
    with urllib.request.urlopen(agent.url + "/metrics") as response:
        assert response.status == 200
    mapped = {mapping.path for mapping in psutil.Process(agent.process.pid).memory_maps()}
    assert any("numpy" in path for path in mapped)  # a control
    for name in ("torch", "pandas", "pyarrow"):
        assert not any(f"/{name}/" in path for path in mapped), name
    source = "import sys, agent.app; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "'uvicorn'" in loaded
    for name in ("torch", "pandas", "httpx", "streamlit", "plotly", "typer", "rich"):
        assert f"'{name}'" not in loaded, name


def test_a_real_scrape(start_engine: Start, start_agent: Start, wait_until: Callable[..., Any], promtool: Path) -> None:
    """Two ranks of one engine share three labels; the fourth keeps their series apart."""
    for rank in (0, 1):
        engine = start_engine(tensor_parallel=[rank, 2])
        engine.allocated([1, 2, 3])
        engine.freed([2])
        engine.step_ended(1, 0)
    agent = start_agent()

    def scrape() -> bytes:
        with urllib.request.urlopen(agent.url + "/metrics") as response:
            text: bytes = response.read()
        return text if text.count(b"kvatlas_engine_up{") == 2 else b""

    text = wait_until(scrape)
    series = [line.rpartition(b" ")[0] for line in text.splitlines() if not line.startswith(b"#")]
    assert len(series) == len(set(series))
    assert all(sum(rank in line for line in series) >= 100 for rank in (b'rank="dp0.tp0.pp0"', b'rank="dp0.tp1.pp0"'))
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_no_line_is_logged_twice(
    start_engine: Start,
    start_agent: Start,
    client_of: Callable[..., AgentClient],
    wait_until: Callable[..., Any],
    folder: Path,
) -> None:
    (folder / "foreign.kvmap").write_bytes(b"?")
    start_engine()
    agent = start_agent("--interval-seconds", "0.05")
    client = client_of(agent)
    wait_until(lambda: len([p for p in client.history("engine.dp0.tp0.pp0.kv", "free", 60, 600).points if p.mean]) > 5)
    for _ in range(20):
        client.engines()
    assert agent.stop() == 0
    events = [line["event"] for line in agent.lines]
    assert sorted(events) == ["engine", "listening", "stopped", "unreadable"]
