"""A live agent on a clock of the test's, and devices that change beneath it: the real reader over a stand-in driver."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from agent.alerting.rule_files import load_rules
from agent.alerting.service import Alerting
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.settings import DriverSettings, Scope
from agent.config import AgentSettings
from agent.devices.model import DevicesView, NvmlReading
from agent.devices.monitor import DeviceMonitor, MonitorSettings
from agent.exporter import Exporter
from agent.history import MemoryHistory
from agent.history.keeper import HistoryKeeper
from agent.recording.chunks import ChunkWriter
from agent.recording.device_contents import _made
from agent.recording.recorder import Recorder
from agent.sampling.model import AgentView, Clock
from agent.sampling.sampler import Sampler
from agent.web.api import ApiContext, create_app
from agent.web.security import WriteGuard
from alerts.store import Store
from engine_shim import __version__
from engine_shim.allocation_map.reader import MapReader
from engine_shim.control.messages import AllocatorReply
from tests.agent.devices.conftest import GIB, Reader, compile_driver, gpu
from tests.agent.recording.support import Answers, SteppingEngine, ask_all, further_questions, questions

MIB = 2**20
BLOCKS = 600
SAMPLES = 60
COMPARED = tuple(range(SAMPLES // 20 - 1, SAMPLES, SAMPLES // 20))  # twenty instants
DEVICES_READ = 4  # samples from one reading of devices to the next
TAKEN_BYTES = 8 * MIB  # far more than what a kernel keeps back of its counts for each processor
GPU = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
RULES = """
rules:
  - name: pool-nearly-full
    above: 11%
    exit: 9%
    for: 1s
"""
GUARD = WriteGuard(token=None, listens_on_loopback=True)
PATIENCE_SECONDS = 120.0


class SteadyClock:
    """Stands still until it is set, so that the agent and the recorder look at one instant."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Process:
    """What the monitor reads through: the agent's NVML reader, in the process that has the stand-in's library."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, say: Any) -> NvmlReading:
        self._reader("advance", seconds=60)  # so that NVML is tried again after a failure
        reading: NvmlReading = _made(NvmlReading, self._reader("read"), 0)
        return reading


class ChangingDevices:
    """A host of two GPUs: `set` changes what the driver says, `read` has it read, and `view` is what was read last.

    NVML is the agent's reader over a compiled stand-in for the driver's library, in a process of its own; host and
    control group are this machine's, of which each reading takes some memory more: on a machine that does nothing else
    the host's figures would stand still. Only the engine's torch is made up: it has no GPU.
    """

    def __init__(self, driver: Path, folder: Path, clock: Clock, engine_pid: int) -> None:
        self.pools = AgentView(0, 0.0, {}, (), (), 0.0)
        self._pid, self._steps = engine_pid, 0
        self._held: list[bytes] = []
        (folder / "proc").mkdir()
        self.process = Reader(folder / "script", driver, folder, folder / "proc")
        self.set()
        self._monitor = DeviceMonitor(
            lambda: self.pools,
            MonitorSettings(interval_seconds=0.05),
            clock=clock,
            reader=_Process(self.process),  # type: ignore[arg-type]
            control_of=lambda path: self,
        )
        self._monitor.start()
        self.view = self._monitor.view()

    def set(self, used_gib: int = 4, **keys: object) -> None:
        """From the next reading on; `keys` are those of the stand-in, with __ for a dot."""
        used = used_gib * GIB
        holders = f"{self._pid}:{used - GIB}"
        self.process.script(
            {"count": 2},
            gpu(0, used=used, free=24 * GIB - used - GIB // 2, processes=holders),
            gpu(1, processes=f"{os.getpid()}:{GIB}"),
            {key.replace("__", "."): value for key, value in keys.items()},
        )

    def read(self, pools: AgentView) -> DevicesView:
        """A whole new reading, for which the clock must stand still."""
        self.pools, self._steps = pools, self._steps + 1
        self._held.append(b"\1" * TAKEN_BYTES)  # not zeros, which take no memory until they are written
        watchers = (self._monitor._allocators, self._monitor._nvml, self._monitor._local)
        for one in watchers:
            wanted = one.rounds + 2  # one may be under way
            assert one.wait(wanted, PATIENCE_SECONDS)
        self.view = self._monitor.view()
        return self.view

    def allocator(self, *, snapshot: bool = False, timeout_seconds: float | None = None) -> AllocatorReply:
        told = {"reserved_bytes": 60 * MIB, "live_bytes": (20 + self._steps) * MIB, "active_bytes": 50 * MIB}
        told |= {"stuck_bytes": 4 * MIB, "requested_bytes": 19 * MIB, "retries": 0, "ooms": self._steps // 7}
        return AllocatorReply(available=True, backend="native", devices={"0": told})

    def close(self) -> None:
        self._monitor.stop(PATIENCE_SECONDS)
        assert self.process.end() == 0


class LiveAgent:
    """The agent's parts, wired as for a live engine, on a clock of the test's."""

    def __init__(
        self, folder: Path, state_folder: Path, clock: Clock, settings: AgentSettings, devices: ChangingDevices,
        scope: str = "off",
    ) -> None:  # fmt: skip
        memory = MemoryHistory(seconds=settings.history_seconds, interval_seconds=1.0)
        self._keeper = HistoryKeeper(state_folder, 2**26, memory, clock)
        history = self._keeper.history
        self.sampler = Sampler(lambda: (folder,), MapReader, history, settings=settings.sampler(), clock=clock)
        audit = AuditLog(None, listener=self._keeper.note_decision)
        self._driver = CompactionDriver(DriverSettings(scope=Scope.parse(scope)), audit, clock=clock)
        rules = load_rules(settings.alert_rules)
        store = Store(None, [], clock=clock)
        self._alerting = Alerting(rules, (), store, self._driver, devices=lambda: devices.view, clock=clock)
        self._alerting.evaluator.subscribe(self._keeper.recorder.notice_alerts)
        context = ApiContext(
            view=lambda: self.sampler.view,
            exporter=Exporter(lambda: self.sampler.view, clock=clock),
            history=history,
            guard=GUARD,
            compaction=self._driver,
            alerting=self._alerting,
            devices=lambda: devices.view,
            version=__version__,
            interval_seconds=1.0,
            threshold=settings.threshold,
            started_unix=clock.wall(),
            clock=clock,
            past=self._keeper.reader,
        )
        self.client = TestClient(create_app(context))

    def tick(self) -> None:
        view = self.sampler.tick()
        self._keeper.recorder.notice(view)
        self._driver.tick(view)
        self._alerting.evaluator.tick(view)

    def ask(self, path: str) -> tuple[int, Any]:
        """What it answers, once what is kept of the past is on the disk."""
        self._keeper.writer.step()
        answer = self.client.get(path)
        return answer.status_code, answer.json()

    def close(self) -> None:
        self._keeper.stop()
        self._alerting.stop()
        self.sampler.close()
        self.client.close()


def keys_of(sample: int) -> dict[str, Any]:
    """What the stand-in says at a sample of a minute: figures move, a device is lost, and NVML fails for a while."""
    keys = {"used_gib": 4 + sample // 3 % 7}
    if 15 <= sample < 36:
        keys["nvmlDeviceGetHandleByIndex_v2__gpu1"] = 15  # lost
    if 45 <= sample < 51:
        keys["nvmlDeviceGetCount_v2"] = 999
    return keys


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording of a live engine, and what the live agent answered at some of its samples."""

    path: Path
    id: str
    settings: AgentSettings
    live: dict[int, Answers]  # by the number of the sample

    def answers(self, path: str) -> list[Any]:
        """What was answered to a question with this in it, oldest first."""
        return [next(told[1] for name, told in one.by_path.items() if path in name) for one in self.live.values()]


def record_live(
    folder: Path,
    rules: str = "",
    *,
    samples: int = SAMPLES,
    asked: Iterable[int] = COMPARED,
    scope: str = "off",
    began_unix: int | None = None,
) -> Recorded:
    """An engine process that runs, an agent that watches it on the agent's own devices, and a recorder beside it."""
    for name in ("maps", "state", "devices"):
        (folder / name).mkdir()
    (folder / "rules.yml").write_text(rules)
    # No silence of an engine that is told when to step means anything.
    settings = AgentSettings(
        stall_seconds=3600,
        stale_seconds=3600,
        compaction="off",
        interval_seconds=1.0,
        alert_rules=folder / "rules.yml" if rules else None,
    )
    engine = SteppingEngine(folder / "maps", blocks=BLOCKS, medium="cuda", gpu_uuids=[GPU])
    # Far enough from a whole millisecond that rounding to one is the same everywhere.
    now = SteadyClock((int(time.time()) if began_unix is None else began_unix) + 0.0003)
    clock, dice = Clock(now, now), random.Random(4)
    devices = ChangingDevices(compile_driver(folder / "driver"), folder / "devices", clock, engine.process.pid)
    agent = LiveAgent(folder / "maps", folder / "state", clock, settings, devices, scope)
    reader, path = MapReader(engine.path), folder / "engine.kvrec"
    recorder = Recorder(reader, ChunkWriter(path), engine.id, 1.0, clock, devices=lambda: devices.view)
    live: dict[int, Answers] = {}
    more: list[str] = []
    try:
        for sample in range(samples):
            if sample == samples // 2:
                engine.switch("relocating")
            for part in range(dice.randrange(4)):
                engine.step(dice.randrange(1, 12), round((now.now + 0.1 * part) * 1e9))
                if sample:
                    recorder.poll()  # events alone: no sample is due
            now.now += 1.0
            if sample % DEVICES_READ == 0:
                devices.set(**keys_of(sample))
                devices.read(agent.sampler.view)
            if sample:
                recorder.poll()
            else:
                recorder.begin()
            agent.tick()
            if sample in asked:
                more = more or further_questions(agent.ask, engine.id)
                live[sample] = ask_all(agent.ask, [*questions(engine.id, BLOCKS, now.now), *more], now.now)
        recorder.end("the test has seen enough")
        recorder.writer.finish()
        assert recorder.tally.samples == samples
        assert recorder.tally.mixed_samples == recorder.tally.gaps == 0
        return Recorded(path, engine.id, settings, live)
    finally:
        agent.close()
        devices.close()
        reader.close()
        engine.kill()
