"""Scenes: reference engines in this process, the agent's sampler, policy and alerts, and a time of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from agent.alerting.rule_files import default_rules
from agent.alerting.service import Alerting
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.model import PolicySettings
from agent.compaction.settings import DriverSettings, Scope
from agent.devices.model import NOTHING_READ
from agent.engine_metrics.model import EngineMetricsView
from agent.history import MemoryHistory
from agent.sampling.model import AgentView, Clock
from agent.sampling.sampler import Sampler, SamplerSettings
from alerts.grouping import Waiting, compose
from alerts.model import Alert, Change, ChangeKind, Phase
from alerts.rules import Rule
from alerts.sinks.base import Sink
from alerts.sinks.slack_message import full_message
from alerts.state import AlertState
from alerts.store import Store
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest
from tests.alerts.slack_receiver import Answer, Receiver, slack_judge

BEGAN = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
GOLDEN = Path(__file__).with_name("golden")
PREFIX_TOKENS = 512  # that one hash id of a trace's request stands for
# No real time is spent on waiting for a map that a scene has torn, and none is too long for one that it has not.
SETTINGS = SamplerSettings(torn_seconds=0.002, hung_seconds=60, all_hung_seconds=120)


class Served:
    """One reference engine with its map, in this process; a scene says when it makes its steps."""

    def __init__(self, scene: Scene, folder: Path, engine_id: str, **settings: Any) -> None:
        given: dict[str, Any] = {"blocks": 128, "model_geometry": "test-tiny", "device": "cpu", "control": True}
        self.settings = EngineSettings(engine_id=engine_id, **given | settings)
        wanted = self.settings
        spec = MapSpec(
            engine_id=engine_id,
            kind="reference",
            version="1.0",
            model="org/model",
            pool="kv",
            total_blocks=wanted.blocks,
            block_tokens=wanted.block_tokens,
            block_bytes=1 << 20,
            dtype="float16",
            headroom_blocks=int((wanted.blocks - 1) * wanted.headroom),
            policy=wanted.policy,
        )
        self._writer = MapWriter.create(spec, folder, clock_ns=lambda: int(scene.now * 1e9))
        self._writer._stop.set()  # its heart beats in real time, which a scene does not wait for: `step` does it
        self.observer = MapObserver(self._writer, clock_ns=lambda: int(scene.now * 1e9))
        assert self.observer.path is not None
        self.path = self.observer.path
        self.id = self.path.name.removesuffix(".kvmap")
        self.engine, _ = build_engine(wanted, VirtualClock(), observer=self.observer)
        self.steps: int = 1
        self.every: int = 1  # seconds in which it makes them
        self.closed = False
        self.stopped = False  # as by SIGSTOP
        self._numbers = count()

    def ask(self, prompt: int, output: int, *, prefix: int | None = None, number: int = 1) -> None:
        """Submit requests; those of one `prefix` share the first 512 tokens of it, and each further 512."""
        for _ in range(number):
            index = next(self._numbers)
            pieces = math.ceil(prompt / PREFIX_TOKENS)
            begin = 1_000_000 + index * 100 if prefix is None else prefix * 100
            request = TraceRequest(index, 0.0, prompt, output, tuple(begin + piece for piece in range(pieces)))
            assert self.engine.submit(sequence_of(request, self.settings.block_tokens))

    def step(self, now: float) -> None:
        """What the engine does in one second."""
        if self.stopped:
            return
        self._writer.live.heartbeat_unix_ns[0] = int(now * 1e9)
        for _ in range(0 if int(now) % self.every else self.steps):
            self.engine.step()

    def tear(self, torn: bool) -> None:
        """Leave the map as within a publish, or as after it."""
        self._writer.live.sequence[0] = int(self._writer.live.sequence[0]) + (1 if torn else -1)

    def answer(self) -> None:
        """A step boundary, at which the engine carries out what it is asked for, and computes nothing."""
        if not self.closed:
            self.engine.desk.serve()
            self.engine.compaction.step()

    def drain(self) -> None:
        """Serve what there is to the end."""
        for _ in range(5000):
            if not self.engine.scheduler.has_work:
                break
            self.engine.step()
        self.engine.step()

    def close(self, *, keep: bool = False) -> None:
        """In good order; once."""
        if not self.closed:
            self.closed, self.steps = True, 0
            self.engine.close()
            self.observer.close(keep=keep)


class Scene:
    """A second passes with each `tick`: engines step, the agent samples, decides and judges."""

    def __init__(self, folder: Path, rules: Sequence[Rule], driver: DriverSettings, sinks: Sequence[Sink] = ()) -> None:
        self.folder, self.now = folder, BEGAN
        self.metrics = EngineMetricsView()
        self.devices = NOTHING_READ
        self.clock = Clock(wall=lambda: self.now, monotonic=lambda: self.now - BEGAN + 1000.0)
        self.sampler = Sampler(lambda: [folder], self._open, MemoryHistory(), clock=self.clock, settings=SETTINGS)
        self.driver = CompactionDriver(driver, AuditLog(None), clock=self.clock)
        self.store = Store(None, [sink.name for sink in sinks], clock=self.clock)
        self.alerting = Alerting(
            rules,
            sinks,
            self.store,
            self.driver,
            metrics=lambda: self.metrics,
            devices=lambda: self.devices,
            clock=self.clock,
            pool_page="https://dashboard.example/?pool=",
            list_page="https://dashboard.example",
            runbook="https://docs.example/alerts",
            agent_name="node-1",
        )
        self.engines: list[Served] = []
        self.changes: list[Change] = []
        self.told: dict[str, Alert] = {}

    def _open(self, path: Path) -> MapReader:
        """A process does not see its own locks, so whether a writer is there is asked of the scene."""
        reader = MapReader(path)
        here = [one for one in self.engines if one.path == path]
        if here:
            reader.writer_alive = lambda: not here[-1].closed  # type: ignore[method-assign]
        return reader

    def engine(self, engine_id: str = "engine", **settings: Any) -> Served:
        self.engines.append(Served(self, self.folder, engine_id, **settings))
        return self.engines[-1]

    def tick(self, seconds: int = 1, *, sample: bool = True) -> list[Change]:
        """Let so many seconds pass; returns what happened to alerts. Not `sample`: the sampler hangs."""
        happened: list[Change] = []
        for _ in range(seconds):
            self.now += 1.0
            for one in self.engines:
                if not one.closed:
                    one.step(self.now)
            if sample:
                self.sampler.tick()
                self.driver.tick(self.sampler.view)
                while not self.driver.wait_idle(0.001):
                    for one in self.engines:
                        one.answer()
            step = self.alerting.evaluator.tick(self.sampler.view)
            happened += step.changes
        self.changes += happened
        return happened

    def until(self, rule: str, kind: ChangeKind, *, most: int = 600, each: Callable[[], None] = lambda: None) -> Change:
        """Tick until that happens to an alert of the rule."""
        for _ in range(most):
            each()
            for change in self.tick():
                if (change.alert.rule, change.kind) == (rule, kind):
                    return change
        raise AssertionError(f"{rule} never {kind}; {self.numbers()}; {[one.alert.rule for one in self.changes]}")

    def fires(self, rule: str, **how: Any) -> Change:
        return self.until(rule, ChangeKind.FIRED, **how)

    def ends(self, rule: str, **how: Any) -> Change:
        return self.until(rule, ChangeKind.RESOLVED, **how)

    @property
    def view(self) -> AgentView:
        return self.sampler.view

    @property
    def open(self) -> dict[str, AlertState]:
        """Firing alerts by rule."""
        states = self.alerting.evaluator.standing.open
        return {one.alert.rule: one for one in states if one.phase is Phase.FIRING}

    def numbers(self) -> dict[str, Mapping[str, float | None]]:
        """What the rules were judged by last, for a failing test."""
        return {one.source: one.numbers for one in self.alerting.evaluator.readings}

    def close(self) -> None:
        for one in self.engines:
            one.close()
        self.sampler.close()


class MakeScene(Protocol):
    def __call__(
        self, *, rules: Sequence[Rule] | None = None, sinks: Sequence[Sink] = (), scope: str = "all", **policy: Any
    ) -> Scene: ...


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[MakeScene]:
    """Scenes with the default rules; `policy` changes the compaction policy, whose patience is short here."""
    made: list[Scene] = []
    folder = tmp_path / "maps"
    folder.mkdir()

    def make(
        *,
        rules: Sequence[Rule] | None = None,
        sinks: Sequence[Sink] = (),
        scope: str = "all",
        consumers: tuple[str, ...] = (),
        **policy: Any,
    ) -> Scene:
        settings = DriverSettings(policy=PolicySettings(**policy), scope=Scope.parse(scope), consumers=consumers)
        made.append(Scene(folder, default_rules() if rules is None else rules, settings, sinks))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def slack() -> Iterator[Receiver]:
    """A receiver that holds to Slack's documented limits."""
    receiver = Receiver(slack_judge)
    yield receiver
    receiver.close()


def slack_payload(change: Change, now: float, told: Mapping[str, Alert]) -> dict[str, Any]:
    """What Slack is sent of one change."""
    notice = compose([Waiting(change, "", 0.0)], told, at=now, list_url="https://dashboard.example")
    return full_message(notice)


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[Change, Change], None]:
    """Compare a firing and its end, as Slack is sent them, with golden/RULE.json; one that is not there is written."""

    def compare(fired: Change, over: Change) -> None:
        alert = fired.alert
        assert over.alert.episode == alert.episode
        payloads = {
            "fired": slack_payload(fired, fired.at + 1, {}),
            "resolved": slack_payload(over, over.at + 1, {alert.fingerprint: alert}),
        }
        assert [slack_judge(payload) for payload in payloads.values()] == [Answer(), Answer()]  # Slack's own limits
        text = json.dumps(payloads, indent=1, ensure_ascii=False).replace(str(tmp_path), "/run") + "\n"
        path = GOLDEN / f"{alert.rule}.json"
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            pytest.fail(f"{path.name} was written; look whether it says the right thing")
        assert text == path.read_text(encoding="utf-8")

    return compare
