"""What a replay answers is what the live agent answered: at every instant, on every path, its trends and alerts too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from agent.alerting.rule_files import default_rules
from agent.alerting.service import Alerting
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.settings import DriverSettings, Scope
from agent.config import AgentSettings
from agent.exporter import Exporter
from agent.history import MemoryHistory
from agent.history.keeper import HistoryKeeper
from agent.recording.chunks import ChunkKind, ChunkWriter, RecordingError
from agent.recording.player import Player
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.sampling.model import Clock
from agent.sampling.sampler import Sampler
from agent.web.api import ApiContext, create_app
from agent.web.security import WriteGuard
from alerts.store import Store
from engine_shim import __version__
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import EventKind
from tests.agent.recording.support import (
    CLOCKS,
    OWN,
    Answers,
    SteppingEngine,
    ask_all,
    differences,
    further_questions,
    questions,
    rewrite,
    without,
)

BLOCKS = 600
SAMPLES = 60
COMPARED = tuple(range(SAMPLES // 20 - 1, SAMPLES, SAMPLES // 20))  # twenty instants
# No silence of an engine that is told when to step means anything.
SETTINGS = AgentSettings(stall_seconds=3600, stale_seconds=3600, compaction="off", interval_seconds=1.0)
GUARD = WriteGuard(token=None, listens_on_loopback=True)
# Compaction asks the engine itself, and there is none behind a recording; who asks is told so.
ASKED_OF_THE_ENGINE = {"engine"}


class SteadyClock:
    """Stands still until it is set, so that the agent and the recorder look at one instant."""

    def __init__(self) -> None:
        # Far enough from a whole millisecond that rounding to one is the same everywhere.
        self.now = int(time.time()) + 0.0003

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording of a live engine, and what the live agent answered at some of its samples."""

    path: Path
    id: str
    live: dict[int, Answers]  # by the number of the sample


class LiveAgent:
    """The agent's parts, wired as for a live engine, on a clock of the test's."""

    def __init__(self, folder: Path, state_folder: Path, clock: Clock) -> None:
        memory = MemoryHistory(seconds=SETTINGS.history_seconds, interval_seconds=1.0)
        self._keeper = HistoryKeeper(state_folder, 2**26, memory, clock)
        history = self._keeper.history
        self.sampler = Sampler(lambda: (folder,), MapReader, history, settings=SETTINGS.sampler(), clock=clock)
        self._driver = CompactionDriver(DriverSettings(scope=Scope.parse("off")), AuditLog(None), clock=clock)
        self._alerting = Alerting(default_rules(), (), Store(None, [], clock=clock), self._driver, clock=clock)
        context = ApiContext(
            view=lambda: self.sampler.view,
            exporter=Exporter(lambda: self.sampler.view, clock=clock),
            history=history,
            guard=GUARD,
            compaction=self._driver,
            alerting=self._alerting,
            version=__version__,
            interval_seconds=1.0,
            threshold=SETTINGS.threshold,
            started_unix=clock.wall(),
            clock=clock,
            past=self._keeper.reader,
        )
        self.client = TestClient(create_app(context))

    def tick(self) -> None:
        view = self.sampler.tick()
        self._driver.tick(view)
        self._alerting.evaluator.tick(view)
        self._keeper.recorder.notice(view)

    def settle(self) -> None:
        """Have what is kept of the past on the disk."""
        self._keeper.writer.step()

    def close(self) -> None:
        self._keeper.stop()
        self._alerting.stop()
        self.sampler.close()
        self.client.close()


def asking(client: TestClient) -> Callable[[str], tuple[int, Any]]:
    def ask(path: str) -> tuple[int, Any]:
        answer = client.get(path)
        return answer.status_code, answer.json()

    return ask


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """An engine process that runs, an agent that watches it, and a recorder beside it."""
    folder = tmp_path_factory.mktemp("maps")
    engine = SteppingEngine(folder, blocks=BLOCKS)
    now = SteadyClock()
    clock, dice = Clock(now, now), random.Random(4)
    agent, reader = LiveAgent(folder, tmp_path_factory.mktemp("state"), clock), MapReader(engine.path)
    path = folder / "engine.kvrec"
    recorder = Recorder(reader, ChunkWriter(path), engine.id, 1.0, clock)
    live: dict[int, Answers] = {}
    more: list[str] = []
    try:
        for sample in range(SAMPLES):
            if sample == SAMPLES // 2:
                engine.switch("relocating")
            for part in range(dice.randrange(4)):
                engine.step(dice.randrange(1, 12), round((now.now + 0.1 * part) * 1e9))
                if sample:
                    recorder.poll()  # events alone: no sample is due
            now.now += 1.0
            if sample:
                recorder.poll()
            else:
                recorder.begin()
            agent.tick()
            if sample in COMPARED:
                agent.settle()
                more = more or further_questions(asking(agent.client), engine.id)
                paths = [*questions(engine.id, BLOCKS, now.now), *more]
                live[sample] = ask_all(asking(agent.client), paths, now.now)
        recorder.end("the test has seen enough")
        recorder.writer.finish()
        assert recorder.tally.samples == SAMPLES
        assert recorder.tally.mixed_samples == recorder.tally.gaps == 0
        assert recorder.tally.events > 500
        yield Recorded(path, engine.id, live)
    finally:
        agent.close()
        reader.close()
        engine.kill()


def compare(recorded: Recorded, path: Path, samples: Iterable[int] = COMPARED) -> list[str]:
    """Where the answers of a replay differ from the live ones; no answer may be missing."""
    recording = Recording(path)
    player = Player(recording, SETTINGS, GUARD, paused=True)
    found: list[str] = []
    try:
        with TestClient(player) as client:
            for sample in samples:
                live = recorded.live[sample]
                player.go(position_ns=recording.sample_times_ns[sample])
                replayed = ask_all(asking(client), live.by_path, live.now_unix)
                for question, answer in live.by_path.items():
                    left_out = CLOCKS | OWN | (ASKED_OF_THE_ENGINE if "compaction?" in question else set())
                    pair = (without(answer, left_out), without(replayed.by_path[question], left_out))
                    found += [f"sample {sample}, {question}{line}" for line in differences(*pair)]
    finally:
        player.stop()
        recording.close()
    return found


def test_at_twenty_instants_every_answer_of_a_replay_is_the_live_one(recorded: Recorded) -> None:
    assert len(recorded.live) == 20
    assert compare(recorded, recorded.path) == []


def test_a_replay_has_no_devices_and_waits_for_none(recorded: Recorded) -> None:
    recording = Recording(recorded.path)
    player = Player(recording, SETTINGS, GUARD, paused=True)
    try:
        with TestClient(player) as client:
            found = client.get("/v1/devices").json()
    finally:
        player.stop()
        recording.close()
    assert (found["nvml"], found["nvml_reason"]) == ("recording", "a recording has no devices")
    assert found["devices"] == []
    assert "not read yet" not in (found["host_reason"], found["cgroup_reason"])


def test_the_traffic_that_is_compared_has_everything_in_it(recorded: Recorded) -> None:
    """A comparison of empty answers would prove nothing."""
    instants = list(recorded.live.values())
    first, last = instants[0], instants[-1]
    summaries = [one.by_path[f"/v1/engines/{recorded.id}"][1] for one in instants]
    assert len({one["counters"]["steps"] for one in summaries}) > 15
    for state in ("free", "cached", "used", "reserved"):
        assert any(one["blocks"][state] for one in summaries), state
    for counter in ("blocks_evicted", "blocks_reused", "relocation_copies"):
        assert summaries[-1]["counters"][counter], counter
    assert summaries[-1]["forecast"]["known"]
    assert last.by_path[f"/v1/engines/{recorded.id}/requests"][1]["total"] > 2
    history = last.by_path[next(one for one in last.by_path if "metric=fragmentation" in one)]
    assert sum(point["mean"] is not None for point in history[1]["points"]) > 10
    assert differences(first.by_path["/v1/engines"], last.by_path["/v1/engines"])
    asked = {path.partition("?")[0].replace(recorded.id, "{id}") for path in last.by_path}
    assert asked >= {"/v1/engines/{id}/advice", "/v1/engines/{id}/frames/times", "/v1/compactions", "/v1/mutes"}
    frame = last.by_path[next(path for path in last.by_path if "/frames?" in path)]
    assert frame[0] == 200
    assert frame[1]["previous_unix"] is not None
    assert any(one.by_path["/v1/alerts"][1]["open"] for one in instants)


def test_a_recording_that_lacks_one_event_is_not_taken_for_whole(recorded: Recorded, tmp_path: Path) -> None:
    rewrite(recorded.path, tmp_path / "short.kvrec", lambda number, rows: rows[:-1] if number == 3 else rows)
    with pytest.raises(RecordingError, match="not whole"):
        compare(recorded, tmp_path / "short.kvrec", COMPARED[-1:])


def test_one_event_that_is_another_one_shows_in_the_answers(recorded: Recorded, tmp_path: Path) -> None:
    """The numbers are all there, so that only the comparison of the answers can tell."""
    recording = Recording(recorded.path)
    last = sum(place.kind == ChunkKind.EVENTS for place in recording.places()) - 1
    recording.close()
    changed = []

    def lose(number: int, rows: np.ndarray) -> np.ndarray:
        allocations = np.flatnonzero(rows["kind"] == EventKind.ALLOCATE)
        if number != last:
            return rows
        changed.append(int(allocations[-1]))
        rows[changed[0]] = rows[changed[0] - 1]
        return rows

    rewrite(recorded.path, tmp_path / "other.kvrec", lose)
    assert compare(recorded, tmp_path / "other.kvrec", COMPARED[-1:])
    assert changed
    assert compare(recorded, tmp_path / "other.kvrec", COMPARED[-2:-1]) == []
