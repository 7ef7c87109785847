"""Real writer processes, real agents, and snapshots made by hand for what is pure."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from agent.client import AgentClient
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.model import Decision
from agent.compaction.record import DatedVerdict
from agent.compaction.settings import DriverSettings, Scope
from agent.history import MemoryHistory
from agent.log import FOREIGN
from agent.log import ROOT as ROOT_LOGGER
from agent.sampling.judgement import Limits
from agent.sampling.model import AgentView, Clock, PoolSample
from agent.sampling.sampler import Sampler, SamplerSettings
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import COUNTERS, HISTOGRAM_BOUNDS_SECONDS, HISTOGRAMS, NO_GROUP
from engine_shim.snapshot import EngineIdentity, Histogram, MapFlags, MapSnapshot

ROOT = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).with_name("writer_process.py")
POOL_ENGINE = Path(__file__).with_name("pool_engine.py")
CREATED_UNIX = 1_700_000_000
PATIENCE_SECONDS = 120.0
# For tests of something else than silence, on a machine that may leave a process without a core for seconds: a sampler
# in the test's own process, and an agent in one of its own.
PATIENT = SamplerSettings(
    hung_seconds=60, all_hung_seconds=120, limits=Limits(stall_seconds=900, stale_seconds=900, publish_seconds=900)
)
PATIENT_AGENT = {"KVATLAS_STALL_SECONDS": "900", "KVATLAS_STALE_SECONDS": "900"}


class Engine:
    """One writer process and the pipe that tells it what to do."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        settings: dict[str, Any] = {
            "engine_id": "engine",
            "kind": "reference",
            "model": "org/model",
            "pool": "kv",
            "total_blocks": 100,
            "block_tokens": 16,
            "block_bytes": 4096,
            "dtype": "float16",
        }
        settings.update(spec)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.path = Path(self._tell({"spec": settings, "folder": str(folder)}))
        self.id = self.path.name.removesuffix(".kvmap")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._tell({"call": name, "args": args, "kwargs": kwargs})

    def _tell(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End at once, as kill -9 does, also where it is stopped; and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def loggers() -> Iterator[None]:
    """Puts the loggers back after a test that sends them elsewhere, as the agent does at its start."""
    kept = [(one, one.handlers[:], one.propagate, one.level) for one in map(logging.getLogger, (ROOT_LOGGER, *FOREIGN))]
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


class StartEngine(Protocol):
    def __call__(self, where: Path | None = None, **spec: Any) -> Engine: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the maps of a test are."""
    path = tmp_path / "maps"
    path.mkdir()
    return path


@pytest.fixture
def start_engine(folder: Path) -> Iterator[StartEngine]:
    """Starts writer processes, in `folder` unless told otherwise, and kills them in the end."""
    engines: list[Engine] = []

    def start(where: Path | None = None, **spec: Any) -> Engine:
        engine = Engine(where or folder, **spec)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.kill()


class StartPool(Protocol):
    def __call__(self, **options: Any) -> PoolProcess: ...


class PoolProcess:
    """A process with a pool, its map and its control socket; `id` is what /v1/engines lists."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given = {"folder": str(folder), "blocks": 1024, **options}
        self.process = subprocess.Popen(
            [sys.executable, POOL_ENGINE, json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.path, self.live = Path(told["path"]), float(told["live"])
        self.id = self.path.name.removesuffix(".kvmap")

    def end(self) -> None:
        """Killed; fails where it had ended by itself, as it does when a block does not hold what it must."""
        status = self.process.poll()
        self.process.kill()
        self.process.communicate()
        assert status in (None, -9), f"the engine ended with {status}"


@pytest.fixture
def start_pool(folder: Path) -> Iterator[StartPool]:
    """Starts pool processes in `folder`, and ends them."""
    pools: list[PoolProcess] = []

    def start(**options: Any) -> PoolProcess:
        pools.append(PoolProcess(folder, **options))
        return pools[-1]

    yield start
    for pool in pools:
        pool.end()


class Agent:
    """A real agent process, started by the command and ended by SIGTERM."""

    def __init__(
        self, folder: Path, *flags: str, environment: dict[str, str] | None = None, open_files: int | None = None
    ) -> None:
        limit = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"]
        command = [*limit, sys.executable, "-m", "engine_shim.launcher", "agent", "--listen", "127.0.0.1:0", *flags]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**inherited, "KVATLAS_DIR": str(folder), **PATIENT_AGENT, **(environment or {})},
        )
        self.lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = str(self.wait_for_event("listening")["address"])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(json.loads(line))
                self._news.notify_all()

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """The first line of the log with this event, now or soon."""
        with self._news:
            found = self._news.wait_for(lambda: [one for one in self.lines if one["event"] == event], PATIENCE_SECONDS)
        assert found, f"no event {event!r} in {self.lines}"
        return found[0]

    def stop(self) -> int:
        """SIGTERM; returns the exit status, once the whole log is in `lines`."""
        self.process.terminate()
        status = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return status


class StartAgent(Protocol):
    def __call__(
        self, *flags: str, environment: dict[str, str] | None = None, open_files: int | None = None
    ) -> Agent: ...


@pytest.fixture
def start_agent(folder: Path) -> Iterator[StartAgent]:
    """Starts agents that look into `folder`, and ends them."""
    agents: list[Agent] = []

    def start(*flags: str, environment: dict[str, str] | None = None, open_files: int | None = None) -> Agent:
        agent = Agent(folder, *flags, environment=environment, open_files=open_files)
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.stop()
        assert agent.process.stderr is not None
        agent.process.stderr.close()


@pytest.fixture
def client_of() -> Iterator[Callable[[Agent], AgentClient]]:
    """Clients of agents, closed in the end."""
    clients: list[AgentClient] = []

    def make(agent: Agent) -> AgentClient:
        clients.append(AgentClient(agent.url, timeout_seconds=60.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """Asks until the answer is true, and returns it; fails after a deadline."""

    def wait(question: Callable[[], Any], *, within: float = PATIENCE_SECONDS) -> Any:
        deadline = time.monotonic() + within
        while not (answer := question()):
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.02)
        return answer

    return wait


class MakeSnapshot(Protocol):
    def __call__(self, states: Sequence[int], **changes: Any) -> MapSnapshot: ...


@pytest.fixture
def make_snapshot() -> MakeSnapshot:
    """Snapshots with every column, of a healthy engine that published at CREATED_UNIX + 100.

    Fields of the snapshot and of its identity are changed by name; columns may be given as lists.
    """
    columns = {
        "references": np.uint16,
        "tokens": np.uint16,
        "owner": np.uint32,
        "position": np.uint32,
        "touched_ms": np.uint32,
        "group": np.uint8,
    }

    def make(states: Sequence[int], **changes: Any) -> MapSnapshot:
        column = np.asarray(states, np.uint8)
        now_ns = (CREATED_UNIX + 100) * 10**9
        identity = EngineIdentity(
            engine_id="engine",
            incarnation=7,
            kind="reference",
            version="1.0",
            runner="",
            model="org/model",
            pool="kv",
            medium="cpu",
            gpu_uuids=(),
            data_parallel_rank=0,
            data_parallel_size=1,
            tensor_parallel_rank=0,
            tensor_parallel_size=1,
            pipeline_parallel_rank=0,
            pipeline_parallel_size=1,
            total_blocks=column.size,
            block_tokens=16,
            block_bytes=4096,
            dtype="float16",
            headroom_blocks=0,
            policy="vllm",
            pid=1,
            pid_start_ticks=1,
            created_unix_ns=CREATED_UNIX * 10**9,
        )
        names = set(EngineIdentity.__slots__)
        identity = replace(identity, **{name: value for name, value in changes.items() if name in names})
        snapshot = MapSnapshot(
            path="engine.dp0.tp0.pp0.kv.kvmap",
            identity=identity,
            flags=MapFlags(),
            sequence=2,
            published_unix_ns=now_ns,
            heartbeat_unix_ns=now_ns,
            last_step_unix_ns=now_ns,
            running_requests=0,
            waiting_requests=0,
            state_counts=tuple(int(np.count_nonzero(column == state)) for state in range(8)),
            counters=dict.fromkeys(COUNTERS, 0),
            states=column,
            references=np.zeros(column.size, np.uint16),
            tokens=np.zeros(column.size, np.uint16),
            owner=np.zeros(column.size, np.uint32),
            position=np.zeros(column.size, np.uint32),
            touched_ms=np.zeros(column.size, np.uint32),
            group=np.full(column.size, NO_GROUP, np.uint8),
            groups=(),
            owners=(),
            histograms={
                name: Histogram(HISTOGRAM_BOUNDS_SECONDS, (0,) * (len(HISTOGRAM_BOUNDS_SECONDS) + 1), 0.0)
                for name in HISTOGRAMS
            },
            event_head=0,
        )
        rest = {name: value for name, value in changes.items() if name not in names}
        for name, dtype in columns.items():
            if rest.get(name) is not None:
                rest[name] = np.asarray(rest[name], dtype)
        return replace(snapshot, **rest)

    return make


class Watch:
    """A sampler and a driver without threads: each `tick` is a fresh sample and, for the policy, one second more."""

    def __init__(self, folder: Path, settings: DriverSettings, audit: AuditLog) -> None:
        self.now = 1000.0
        clock = Clock(monotonic=lambda: self.now)
        self.sampler = Sampler(lambda: [folder], MapReader, MemoryHistory(), settings=PATIENT)
        self.driver = CompactionDriver(settings, audit, clock=clock)
        self.audit = audit

    def tick(self, seconds: float = 1.0) -> AgentView:
        """Decide with samples of now, and wait for what comes of it."""
        asked_ns, deadline = time.time_ns(), time.monotonic() + PATIENCE_SECONDS
        view = self.sampler.tick()
        while any(one.snapshot.published_unix_ns < asked_ns for one in view.samples.values() if one.state == "live"):
            assert time.monotonic() < deadline, "an engine publishes nothing"
            time.sleep(0.005)
            view = self.sampler.tick()
        self.now += seconds
        self.driver.tick(view)
        assert self.driver.wait_idle(PATIENCE_SECONDS)
        return view

    def sample(self, id: str) -> PoolSample:
        return self.sampler.view.samples[id]

    def last(self, id: str) -> DatedVerdict:
        """The decision that stands."""
        return self.driver.standing(self.sample(id)).verdicts[-1]

    def until(self, id: str, decision: Decision, most: int = 400) -> DatedVerdict:
        """Tick until this is decided."""
        for _ in range(most):
            self.tick()
            if (verdict := self.last(id)).decision is decision:
                return verdict
        raise AssertionError(f"never {decision}: {self.driver.standing(self.sample(id)).verdicts}")


class MakeWatch(Protocol):
    def __call__(self, settings: DriverSettings | None = None, audit: AuditLog | None = None) -> Watch: ...


@pytest.fixture
def watch(folder: Path) -> Iterator[MakeWatch]:
    """Watches over `folder`; engines of every kind are in their scope unless told otherwise."""
    made: list[Watch] = []

    def make(settings: DriverSettings | None = None, audit: AuditLog | None = None) -> Watch:
        made.append(Watch(folder, settings or DriverSettings(scope=Scope.parse("all")), audit or AuditLog(None)))
        return made[-1]

    yield make
    for one in made:
        one.sampler.close()
