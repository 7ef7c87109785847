"""The processes of a soak: engines that come and go, an agent with small disks, a dashboard; and their clock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 60.0
AGENT_SETTINGS = {
    "KVATLAS_STATE_MAX_MIB": "128",
    "KVATLAS_GONE_SECONDS": "120",
    "KVATLAS_COMPACTION_FOR_SECONDS": "5",
    "KVATLAS_COMPACTION_COOLDOWN_SECONDS": "10",
    "KVATLAS_ALERT_LOG": "false",
}


class SoakBroken(Exception):
    """The soak itself could not go on: nothing is said of what it tests."""


@dataclass
class Engine:
    """One engine: how it is started, and what is known of its process."""

    name: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    speaks: bool = True  # a line once it serves
    wanted: bool = True  # it is meant to run now
    died: str = ""
    figures: dict[str, float] = field(default_factory=lambda: {"steps": 0, "waited_ms": 0.0, "longest_ms": 0.0})

    @property
    def pool(self) -> str:
        """The id that the agent gives it."""
        return f"{self.name}.dp0.tp0.pp0.kv"


class Clock:
    """Seconds since the soak began, and the shift that all of its processes see."""

    def __init__(self, work: Path) -> None:
        self.library, self.file = work / "clock.so", work / "clock"
        self.file.write_bytes(struct.pack("=q", 0))
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise SoakBroken("no C compiler for the library that steps the clock: install gcc")
        built = [compiler, "-shared", "-fPIC", "-O2", "-o", str(self.library), str(HERE / "_clock_shift.c"), "-ldl"]
        subprocess.run(built, check=True)
        self._began, self.began_unix = time.monotonic(), time.time()

    def now(self) -> float:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        return monotonic - self._began

    def step(self, seconds: float) -> None:
        """Set the clocks of all processes so far off."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "KVATLAS_SOAK_CLOCK": str(self.file)}


class World:
    """Everything that runs. `faults` and `record` lists are appended to from several threads; each append is whole."""

    def __init__(self, work: Path, receivers: Mapping[str, str]) -> None:
        self.work, self.maps, self.state = work, work / "maps", work / "state"
        self.unwatched = self.maps / "unwatched"  # the agent does not look there
        self.unwatched.mkdir()
        self.clock = Clock(work)
        self.faults: list[dict[str, Any]] = []
        self.expected: list[dict[str, Any]] = []
        self.kills: list[dict[str, float]] = []
        self.surprises: list[str] = []  # what answered a fault otherwise than promised
        self.engines: dict[str, Engine] = {}
        self.agent: psutil.Popen | None = None
        self.dashboard: psutil.Popen | None = None
        self.agent_port, self.dashboard_port = free_port(), free_port()
        self._agent_settings = {**AGENT_SETTINGS, **receivers}
        self._logs: list[IO[str]] = []

    # ---- engines --------------------------------------------------------------------------------------------------

    def add(self, name: str, command: list[str], *, speaks: bool = True) -> None:
        """Start an engine of that name."""
        self.engines[name] = Engine(name, command, speaks=speaks)
        self.start_engine(name)

    def start_engine(self, name: str) -> None:
        engine = self.engines[name]
        process = subprocess.Popen(
            engine.command, stdout=subprocess.PIPE, stderr=self._log(f"{name}.log"), text=True, env=self._environment()
        )
        self._wait_for_map(engine, process)
        engine.process, engine.wanted = process, True
        threading.Thread(target=self._follow, args=(engine, process), daemon=True).start()

    def _wait_for_map(self, engine: Engine, process: subprocess.Popen[str]) -> None:
        """Until a line says that it serves; the reference engine says none, and has its map then."""
        assert process.stdout is not None
        if engine.speaks and not process.stdout.readline():
            raise SoakBroken(f"engine {engine.name} did not start; see its log in {self.work}")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(self.maps.rglob(f"{engine.name}.*.kvmap")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SoakBroken(f"engine {engine.name} made no map; see its log in {self.work}")
            time.sleep(0.1)

    def _follow(self, engine: Engine, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"steps"'):
                told = json.loads(line)
                engine.figures["steps"] += told["steps"]
                for name in ("waited_ms", "longest_ms"):
                    engine.figures[name] = max(engine.figures[name], told[name])
        status = process.wait()
        if engine.wanted and engine.process is process:
            engine.died = f"exit {status} at {self.clock.now():.0f} s"

    def end_engine(self, name: str, number: int) -> None:
        """Send it a signal that ends it, and wait until it is gone."""
        engine = self.engines[name]
        assert engine.process is not None
        engine.wanted = False
        engine.process.send_signal(number)
        engine.process.wait(PATIENCE_SECONDS)

    # ---- agent and dashboard --------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start it on the port that it always has; returns when it answers."""
        command = [sys.executable, "-m", "engine_shim.launcher", "agent", "--listen", f"127.0.0.1:{self.agent_port}"]
        settings = {**self._agent_settings, "KVATLAS_STATE_DIR": str(self.state)}
        log = self._log("agent.log")
        self.agent = psutil.Popen(command, stdout=log, stderr=log, env=self._environment(settings))
        self._wait_for_port(self.agent, self.agent_port)

    def start_dashboard(self) -> None:
        flags = ["--listen", f"127.0.0.1:{self.dashboard_port}", "--agent", self.agent_url]
        log = self._log("dashboard.log")
        command = [sys.executable, "-P", "-m", "dashboard", *flags]
        self.dashboard = psutil.Popen(command, stdout=log, stderr=log, env=self._environment())
        self._wait_for_port(self.dashboard, self.dashboard_port)

    @property
    def agent_url(self) -> str:
        return f"http://127.0.0.1:{self.agent_port}"

    def close(self) -> None:
        """End whatever still runs."""
        running = [engine.process for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.wanted = False
        for process in [*running, self.agent, self.dashboard]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in [*running, self.agent, self.dashboard]:
            if process is not None:
                try:
                    process.wait(20)
                except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                    process.kill()
        for log in self._logs:
            log.close()

    def _wait_for_port(self, process: psutil.Popen, port: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SoakBroken(f"{process.args[3]} does not serve; see the logs in {self.work}") from None
                time.sleep(0.1)

    def _environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        own = {"KVATLAS_DIR": str(self.maps), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return {**plain, **own, **self.clock.environment, **(more or {})}

    def _log(self, name: str) -> IO[str]:
        log = (self.work / name).open("a")
        self._logs.append(log)
        return log


def free_port() -> int:
    """One that nobody listened on a moment ago: agent and dashboard must keep theirs over a restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def counted_engine(folder: Path, number: int, blocks: int, rate: float) -> list[str]:
    """A pool that is written at `rate` steps a second, 0 for as fast as it goes; its name is engine-`number`."""
    return [sys.executable, str(HERE / "_soak_engine.py"), str(folder), str(number), str(blocks), str(rate)]


def moving_engine(folder: Path, name: str, seed: int) -> list[str]:
    """A pool whose blocks are moved, each of them followed by what it must hold."""
    options = {"folder": str(folder), "engine_id": name, "policy": "vllm", "blocks": 4096, "churn": 20, "seed": seed}
    return [sys.executable, str(HERE / "_soak_mover.py"), json.dumps(options)]


def reference_engine(folder: Path, name: str) -> list[str]:
    """The reference engine with real tensors, which relocates and moves."""
    command = [sys.executable, "-m", "engine_shim.reference", "--engine-id", name, "--map-folder", str(folder)]
    return [*command, "--blocks", "4096", "--model-geometry", "test-tiny", "--speed", "5", "--loop"]
