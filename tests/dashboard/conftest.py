"""Wire models for tests of pure parts; and the real thing, each part a process: pool, agent, dashboard, browser."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from agent import wire
from agent.client import DEFAULT_URL, AgentClient

HERE = Path(__file__).parent
START_SECONDS = 120.0
CLIENT_SECONDS = 60.0
STATES: tuple[wire.BlockStateName, ...] = ("free", "cached", "used", "pinned", "reserved")


# ---- pure parts ------------------------------------------------------------------------------------------------------


def make_cells(states: NDArray[np.uint8], cells: int = 4096, **changes: Any) -> wire.MapCells:
    """The cells of a state column, counted block by block."""
    per_cell = max(1, -(-len(states) // cells))
    parts = [states[at : at + per_cell] for at in range(0, len(states), per_cell)]
    counts = {name: [int((part == value).sum()) for part in parts] for value, name in enumerate(STATES)}
    values: dict[str, Any] = {
        "id": "example.dp0.tp0.pp0.kv",
        "sequence": 4,
        "snapshot_age_seconds": 0.2,
        "total_blocks": len(states),
        "blocks_per_cell": per_cell,
        "cells": len(parts),
        "state": [int(np.bincount(part, minlength=5).argmax()) for part in parts],
        "counts": {name: column for name, column in counts.items() if any(column)},
        "references": [int((part == 2).any()) for part in parts],
        "age_seconds": [i % 90 + 0.5 for i in range(len(parts))],
        "owner": [i % 3 - 1 for i in range(len(parts))],
        "owners": ["request-a", "request-b"],
    }
    return wire.MapCells(**(values | changes))


def make_summary(**changes: Any) -> wire.EngineSummary:
    """A live pool of 1,000 blocks of 16 tokens and 1 MiB."""
    values: dict[str, Any] = {
        "id": "example.dp0.tp0.pp0.kv",
        "engine_id": "example",
        "incarnation": "00ff",
        "kind": "reference",
        "version": "1.2",
        "model": "example-8b",
        "pool": "kv",
        "policy": "vllm",
        "medium": "cpu",
        "gpu_uuids": [],
        "rank": "dp0.tp0.pp0",
        "pid": 4242,
        "state": "live",
        "reason": "",
        "degraded": False,
        "snapshot_age_seconds": 0.4,
        "heartbeat_age_seconds": 0.3,
        "last_step_age_seconds": 0.1,
        "running_requests": 5,
        "waiting_requests": 1,
        "total_blocks": 1000,
        "usable_blocks": 999,
        "headroom_blocks": 100,
        "block_tokens": 16,
        "block_bytes": 2**20,
        "blocks": wire.BlockCounts(free=200, cached=300, used=480, pinned=19, reserved=1),
        "fragmentation": wire.Fragmentation(
            rate=0.5,
            strict_rate=0.25,
            largest_allocatable_run=250,
            largest_free_run=150,
            allocatable_runs=7,
            run_length_histogram=[3, 0, 2, 0, 0, 0, 1, 1],
        ),
        "tail_waste_tokens": 800,
        "tail_waste_bytes": 52_428_800,
        "oldest_pinned_seconds": 2.0,
        "forecast": wire.Forecast(exhaustion_seconds=250.0, reason="falling by 2 blocks a second"),
        "counters": {},
    }
    return wire.EngineSummary(**(values | changes))


@pytest.fixture(scope="session")
def cells() -> Callable[..., wire.MapCells]:
    return make_cells


@pytest.fixture(scope="session")
def summary() -> Callable[..., wire.EngineSummary]:
    return make_summary


# ---- the real thing --------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> Any:
    """Poll until `condition` gives something true, and return it; fail with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    pytest.fail(f"not within {seconds:.0f} s: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    return False


@dataclass
class PoolProcess:
    """See pool_process.py."""

    folder: Path
    engine_id: str
    process: subprocess.Popen[str]

    @property
    def id(self) -> str:
        return f"{self.engine_id}.dp0.tp0.pp0.kv"

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@dataclass
class Stage:
    """Starts real processes in one folder and ends them all."""

    folder: Path
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def pool(self, engine_id: str, blocks: int, policy: str = "vllm") -> PoolProcess:
        process = self._start(
            [str(HERE / "pool_process.py"), str(self.folder), engine_id, str(blocks), policy],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return PoolProcess(self.folder, engine_id, process)

    def engine(self, engine_id: str, *flags: str) -> str:
        """Id of the pool of a reference engine that serves a recorded trace."""
        served = ["--engine-id", engine_id, "--map-folder", str(self.folder), "--loop", "--end-with-parent"]
        process = self._start(["-m", "engine_shim.reference", *served, *flags])
        name = f"{engine_id}.dp0.tp0.pp0.kv"
        self._await(process, (self.folder / f"{name}.kvmap").exists, "the engine has made its map")
        return name

    def mover(self, engine_id: str, **options: Any) -> PoolProcess:
        """A pool whose blocks can be moved and relocated; it serves at once. See tests/agent/pool_engine.py."""
        given = {"folder": str(self.folder), "engine_id": engine_id, "blocks": 2048, **options}
        script = HERE.parent / "agent" / "pool_engine.py"
        process = self._start([str(script), json.dumps(given)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["path"]
        return PoolProcess(self.folder, engine_id, process)

    def agent(self, port: int | None = None, **settings: str) -> tuple[str, subprocess.Popen[str]]:
        """Address and process of an agent that watches the folder."""
        port = port or free_port()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        process = self._start(
            ["-m", "engine_shim.launcher", "agent", f"--listen=127.0.0.1:{port}", f"--dir={self.folder}", *flags]
        )
        url = f"http://127.0.0.1:{port}"
        self._await(process, lambda: answers(url + "/readyz"), "the agent is ready")
        return url, process

    def replay(self, recording: Path, **settings: str) -> tuple[str, subprocess.Popen[str]]:
        """Address and process of a replay, which stands still at its beginning. `settings` are the agent's."""
        port = free_port()
        environment = {f"KVATLAS_{name.upper()}": value for name, value in settings.items()}
        process = self._start(
            ["-m", "engine_shim.launcher", "replay", str(recording), "--paused", f"--listen=127.0.0.1:{port}"],
            environment=environment,
        )
        url = f"http://127.0.0.1:{port}"
        self._await(process, lambda: answers(url + "/readyz"), "the replay is ready")
        return url, process

    def dashboard(self, agent_url: str, base_path: str = "") -> tuple[str, subprocess.Popen[str]]:
        """Address (with a slash at its end) and process of a dashboard."""
        port = free_port()
        process = self._start(
            ["-m", "dashboard", f"--listen=127.0.0.1:{port}", f"--agent={agent_url}", f"--base-path={base_path}"]
        )
        url = f"http://127.0.0.1:{port}/" + (f"{base_path}/" if base_path else "")
        self._await(process, lambda: answers(url + "_stcore/health"), "the dashboard is up")
        return url, process

    def end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait(timeout=60)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def _await(self, process: subprocess.Popen[str], ready: Callable[[], bool], what: str) -> None:
        """Until `ready`; a process that ended first fails the test with its own last words."""
        wait_until(lambda: ready() or process.poll() is not None, what, 2 * START_SECONDS)
        if process.poll() is not None:
            pytest.fail(f"exit {process.returncode}: {self._log(self._processes.index(process)).read_text()[-2000:]}")

    def _log(self, number: int) -> Path:
        return self.folder.parent / f"{self.folder.name}-process-{number}.log"

    def _start(
        self, arguments: list[str], environment: Mapping[str, str] | None = None, **streams: Any
    ) -> subprocess.Popen[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVATLAS_")}
        environment = inherited | dict(environment or {})
        environment["OMP_NUM_THREADS"] = "1"
        with self._log(len(self._processes)).open("w") as log:
            usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            command = [sys.executable, "-P", *arguments]
            process = subprocess.Popen(command, text=True, env=environment, **(usual | streams))
        self._processes.append(process)
        return process


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent is too slow for the page, on whichever machine; the page's own clients wait for two seconds."""
    monkeypatch.setattr(AgentClient.__init__, "__defaults__", (DEFAULT_URL, None, CLIENT_SECONDS))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """An empty folder for maps and a way to start the parts around it, for one test."""
    folder = tmp_path / "maps"
    folder.mkdir()
    built = Stage(folder)
    yield built
    built.end()


@pytest.fixture(scope="module")
def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """As `stage`, for a whole module."""
    built = Stage(tmp_path_factory.mktemp("maps"))
    yield built
    built.end()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    return wait_until
