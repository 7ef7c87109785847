"""`kvatlas replay` as a process, and the player that goes along a recording by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from agent.cli import main
from agent.client import AgentClient
from agent.commands.replay import place_of
from agent.config import AgentSettings
from agent.recording.chunks import ChunkWriter, RecordingError
from agent.recording.player import Player
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.recording.session import Session
from agent.sampling.model import Clock
from agent.web.security import WriteGuard
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import SettingsError
from tests.agent.conftest import StartAgent
from tests.agent.recording.conftest import StartStepping
from tests.agent.recording.support import (
    CLOCKS,
    OWN,
    ROOT,
    Answers,
    SteppingEngine,
    ask_all,
    differences,
    further_questions,
    questions,
    rewrite,
    without,
)

PATIENCE_SECONDS = 120.0
BLOCKS = 400
# What an agent makes of several samples depends on when it took them, and the two took them at different times.
TRENDS = {"forecast"}
SINCE = {"since_unix", "time_unix"}  # when each of them came to hold what it says: they began at different times
AGES = ("_seconds", "_second")  # since something happened, or a rate: the two looked at different times
KEPT = ("/history", "/alerts", "/frames", "/marks")  # over several samples, or in a folder that this agent has not
FIGURES = "/v1/devices"  # of the host's memory, which both looked at in their own time
QUIET = {"KVATLAS_STALL_SECONDS": "3600", "KVATLAS_STALE_SECONDS": "3600", "KVATLAS_COMPACTION": "off"}


def finished(folder: Path, samples: int = 8) -> tuple[Path, str]:
    """A recording of some seconds of an engine, made in less."""
    engine = SteppingEngine(folder, blocks=BLOCKS)
    reader = MapReader(engine.path)
    now = 2_000_000_000.0
    clock = Clock(lambda: now, lambda: now)
    recorder = Recorder(reader, ChunkWriter(folder / "engine.kvrec"), engine.id, 1.0, clock)
    try:
        recorder.begin()
        for _ in range(samples - 1):
            engine.step(15, round(now * 1e9))
            now += 1.0
            recorder.poll()
        recorder.end("enough")
        recorder.writer.finish()
    finally:
        reader.close()
        engine.kill()
    return folder / "engine.kvrec", engine.id


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return finished(tmp_path_factory.mktemp("maps"))


@pytest.fixture
def recording(made: tuple[Path, str]) -> Iterator[Recording]:
    opened = Recording(made[0])
    yield opened
    opened.close()


@pytest.fixture
def play(recording: Recording) -> Iterator[Callable[..., Player]]:
    players: list[Player] = []

    def make(token: str | None = None, **options: Any) -> Player:
        players.append(Player(recording, AgentSettings(), WriteGuard(token, True), **options))
        return players[-1]

    yield make
    for one in players:
        one.stop()


def steps_of(client: TestClient, id: str) -> int:
    return int(client.get(f"/v1/engines/{id}").json()["counters"]["steps"])


def test_a_player_comes_to_the_end_by_itself_and_stays_there(
    made: tuple[Path, str], recording: Recording, play: Callable[..., Player], wait_until: Callable[..., Any]
) -> None:
    player = play(speed=1000.0)
    with TestClient(player) as client:
        assert steps_of(client, made[1]) == 0
        player.start()
        wait_until(lambda: client.get("/v1/replay").json()["at_end"], within=PATIENCE_SECONDS)
        wait_until(lambda: steps_of(client, made[1]) == 15 * 7, within=PATIENCE_SECONDS)
        status = client.get("/v1/replay").json()
    assert status["position_unix"] == pytest.approx(recording.end_ns / 1e9)
    assert (status["recording_ended"], status["fault"], status["samples"]) == ("enough", "", 8)


def test_a_replay_is_never_taken_for_a_live_engine(made: tuple[Path, str], play: Callable[..., Player]) -> None:
    with TestClient(play(paused=True)) as client:
        for path in ("/v1/engines", "/healthz", "/nothing", f"/v1/engines/{made[1]}/map"):
            assert client.get(path).headers["kvatlas-replay"] == "engine.kvrec"
        listing = client.get("/v1/engines").json()
        assert listing["agent"]["replay"]["file"] == "engine.kvrec"
        assert [one["replay"] for one in listing["engines"]] == [True]
        refused = client.get("/metrics")
        assert refused.status_code == 404
        assert refused.json()["error"] == "replay"
        moved = client.post(f"/v1/engines/{made[1]}/compaction", json={"dry_run": True})
        assert moved.status_code in (403, 409)


def test_where_it_goes_and_how_fast_can_be_changed(
    made: tuple[Path, str], recording: Recording, play: Callable[..., Player]
) -> None:
    player = play(paused=True)
    with TestClient(player, client=("127.0.0.1", 1)) as client:
        for sample in (5, 2, 7, 0):
            place = recording.sample_times_ns[sample] / 1e9 + 0.001
            status = client.post("/v1/replay", json={"position_unix": place}).json()
            assert status["position_unix"] == pytest.approx(place, abs=1e-3)
            assert status["paused"]
            assert steps_of(client, made[1]) == 15 * sample
        assert client.post("/v1/replay", json={"speed": 20, "paused": False}).json()["speed"] == 20
        assert client.post("/v1/replay", json={"speed": 0}).status_code == 400
        assert client.post("/v1/replay", json={"speeed": 1}).status_code == 400
        beyond = client.post("/v1/replay", json={"position_unix": 1.0, "paused": True}).json()
        assert beyond["position_unix"] == pytest.approx(recording.start_ns / 1e9, abs=1e-3)


@pytest.fixture
def damaged(made: tuple[Path, str], tmp_path: Path) -> Iterator[Recording]:
    """A recording that lacks an event after its fourth sample."""
    rewrite(made[0], tmp_path / "damaged.kvrec", lambda number, rows: rows[:-1] if number == 3 else rows)
    opened = Recording(tmp_path / "damaged.kvrec")
    yield opened
    opened.close()


def test_a_replay_stops_where_the_recording_is_damaged_and_says_so(
    made: tuple[Path, str], damaged: Recording, wait_until: Callable[..., Any]
) -> None:
    player = Player(damaged, AgentSettings(), WriteGuard(None, True), speed=1000.0)
    try:
        with TestClient(player, client=("127.0.0.1", 1)) as client:
            player.start()
            wait_until(lambda: player.status().fault, within=PATIENCE_SECONDS)
            status = client.get("/v1/replay").json()
            assert "not whole" in status["fault"]
            assert status["paused"]
            assert steps_of(client, made[1]) == 15 * 3
            beyond = client.post("/v1/replay", json={"position_unix": damaged.end_ns / 1e9})
            assert (beyond.status_code, beyond.json()["error"]) == (409, "unreadable")
            assert steps_of(client, made[1]) == 15 * 3
            back = client.post("/v1/replay", json={"position_unix": damaged.sample_times_ns[1] / 1e9 + 1e-3}).json()
            assert back["fault"] == ""
            assert steps_of(client, made[1]) == 15
    finally:
        player.stop()


def test_a_cursor_that_met_damage_is_right_again_elsewhere(damaged: Recording) -> None:
    cursor, other = damaged.cursor(), damaged.cursor()
    other.seek(damaged.sample_times_ns[1])
    for _ in range(2):
        with pytest.raises(RecordingError, match="not whole"):
            cursor.seek(damaged.end_ns)
        cursor.seek(damaged.sample_times_ns[1])
        assert cursor.state().snapshot.sequence == other.state().snapshot.sequence
        assert np.array_equal(cursor.state().snapshot.states, other.state().snapshot.states)


def test_frames_of_a_replay_end_at_its_place(
    made: tuple[Path, str], recording: Recording, play: Callable[..., Player]
) -> None:
    player = play(paused=True)
    times = [time_ns / 1e9 for time_ns in recording.sample_times_ns]
    of = f"/v1/engines/{made[1]}/frames"
    with TestClient(player) as client:
        player.go(position_ns=recording.sample_times_ns[4])
        listed = client.get(f"{of}/times?from={times[0] - 1}&to={times[-1] + 1}").json()
        assert listed["times_unix"] == pytest.approx(times[:5], abs=1e-3)
        frame = client.get(f"{of}?at={times[2] + 0.5}&cells=10").json()
        assert frame["time_unix"] == pytest.approx(times[2], abs=1e-3)
        assert (frame["previous_unix"], frame["next_unix"]) == pytest.approx((times[1], times[3]), abs=1e-3)
        newest = client.get(f"{of}?at={times[-1] + 9}").json()
        assert newest["time_unix"] == pytest.approx(times[4], abs=1e-3)
        assert newest["next_unix"] is None
        before = client.get(f"{of}?at={times[0] - 1}")
        assert before.status_code == 404


def test_who_may_not_change_things_may_not_change_the_place(play: Callable[..., Player]) -> None:
    with TestClient(play("secret", paused=True)) as client:
        assert client.post("/v1/replay", json={"paused": False}).status_code == 401
        told = client.post("/v1/replay", json={"paused": True}, headers={"Authorization": "Bearer secret"})
        assert told.status_code == 200


def test_between_two_samples_the_replay_is_exact_to_the_event(
    made: tuple[Path, str], recording: Recording, play: Callable[..., Player]
) -> None:
    """The steps of a second come in its first 15 milliseconds: after the seventh the pool is between two samples."""
    first, second = recording.sample_times_ns[3], recording.sample_times_ns[4]
    player = play(paused=True)
    used = []
    with TestClient(player) as client:
        for place in (first, first + 7_500_000, second - 1, second):
            player.go(position_ns=place)
            used.append(client.get(f"/v1/engines/{made[1]}").json()["blocks"])
    assert used[0] != used[1] != used[2]
    assert used[2] == used[3]


def test_a_live_engine_recorded_and_replayed_by_processes_gives_the_same_answers(
    start_stepping: StartStepping, start_agent: StartAgent, folder: Path, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    """The commands as they are run, each in its own process with its own clock."""
    engine = start_stepping(blocks=BLOCKS)
    agent = start_agent("--interval-seconds", "0.1", environment=QUIET)
    part = tmp_path / "live.kvrec.part"
    recorder = subprocess.Popen(
        [sys.executable, "-m", "engine_shim.launcher", "record", str(engine.path), "-o", str(tmp_path / "live.kvrec"),
         "--interval-seconds", "0.1"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    live: list[tuple[int, Answers]] = []
    more: list[str] = []
    try:
        assert recorder.stderr is not None
        assert recorder.stderr.readline().startswith("recording ")
        with httpx.Client(base_url=agent.url, timeout=PATIENCE_SECONDS, trust_env=False) as http:

            def ask(path: str) -> tuple[int, Any]:
                answer = http.get(path)
                return answer.status_code, answer.json()

            wait_until(lambda: ask(FIGURES)[1]["nvml"] != "starting", within=PATIENCE_SECONDS)
            wait_until(lambda: _recorded_nvml(part) != "starting", within=PATIENCE_SECONDS)
            for count in (40, 25, 60, 10):
                steps = engine.step(count)
                wait_until(lambda steps=steps: _steps(ask, engine.id) == steps, within=PATIENCE_SECONDS)
                wait_until(lambda steps=steps: _recorded_steps(part) == steps, within=PATIENCE_SECONDS)
                recorded = Recording(part)
                place = recorded.sample_times_ns[-1]
                recorded.close()
                more = more or further_questions(ask, engine.id)
                paths = [*questions(engine.id, BLOCKS, place / 1e9), *more]
                live.append((place, ask_all(ask, paths, place / 1e9)))
            engine.close()
            wait_until(lambda: ask(f"/v1/engines/{engine.id}")[1]["state"] == "gone", within=PATIENCE_SECONDS)
            ended = ask(f"/v1/engines/{engine.id}")
        assert recorder.wait(PATIENCE_SECONDS) == 0
    finally:
        if recorder.poll() is None:
            recorder.kill()
        recorder.communicate()
    replay = subprocess.Popen(
        [sys.executable, "-m", "engine_shim.launcher", "replay", str(tmp_path / "live.kvrec"), "--paused",
         "--listen", "127.0.0.1:0"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **QUIET},
    )  # fmt: skip
    try:
        assert replay.stderr is not None
        url = next(line["address"] for line in map(json.loads, replay.stderr) if line["event"] == "replaying")
        left_out = CLOCKS | OWN | TRENDS | SINCE | {"engine"}
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as http:

            def ask_replay(path: str) -> tuple[int, Any]:
                answer = http.get(path)
                assert answer.headers["kvatlas-replay"] == "live.kvrec"
                return answer.status_code, answer.json()

            for place, answers in live:
                http.post("/v1/replay", json={"position_unix": place / 1e9 + 1e-6}).raise_for_status()
                for path, answer in answers.by_path.items():
                    if path == FIGURES:
                        now, then = answer[1], ask_replay(path)[1]
                        assert [then[key] for key in ("nvml", "nvml_reason", "driver_version", "devices")] == [
                            now[key] for key in ("nvml", "nvml_reason", "driver_version", "devices")
                        ]
                        assert then["host"]["total_bytes"] == now["host"]["total_bytes"]
                        assert [one["pid"] for one in then["engines"]] == [engine.process.pid]
                    elif not any(word in path for word in KEPT):
                        replayed = ask_replay(path)
                        assert differences(without(answer, left_out, AGES), without(replayed, left_out, AGES)) == [], (
                            path
                        )
            http.post("/v1/replay", json={"position_unix": 9e9}).raise_for_status()
            replayed = ask_replay(f"/v1/engines/{engine.id}")
            assert replayed[1]["reason"] == "the engine ended in good order"
            assert differences(without(ended, left_out, AGES), without(replayed, left_out, AGES)) == []
        with AgentClient(url, timeout_seconds=PATIENCE_SECONDS) as client:
            status = client.engines().agent.replay
            assert status is not None
            assert status.recording_ended == "the engine ended in good order"
            assert status.lost_events == 0
    finally:
        replay.terminate()
        assert replay.wait(PATIENCE_SECONDS) == 0
        replay.communicate()


def _steps(ask: Callable[[str], tuple[int, Any]], id: str) -> int | None:
    status, told = ask(f"/v1/engines/{id}")
    return int(told["counters"]["steps"]) if status == 200 else None


def _recorded_nvml(part: Path) -> str:
    recording = Recording(part)
    cursor = recording.cursor()
    cursor.seek(recording.sample_times_ns[-1])
    devices = cursor.state().devices
    recording.close()
    return "starting" if devices is None else devices.nvml.state.value


def _recorded_steps(part: Path) -> int:
    recording = Recording(part)
    cursor = recording.cursor()
    cursor.seek(recording.sample_times_ns[-1])
    steps = cursor.state().snapshot.counters["steps"]
    recording.close()
    return int(steps)


def test_places_on_the_command_line() -> None:
    first, last = 1_700_000_000 * 10**9, 1_700_000_100 * 10**9
    assert place_of("+30", first, last) == first + 30 * 10**9
    assert place_of("1700000050.5", first, last) == first + 50_500_000_000
    moment = datetime.fromtimestamp(1_700_000_060, UTC)
    assert place_of(moment.isoformat(), first, last) == first + 60 * 10**9
    for text, why in (
        ("noon", "give"),
        ("+1e400", "give"),
        ("+101", "100.000 s"),
        ("0", "outside"),
        ("+-1", "outside"),
    ):
        with pytest.raises(SettingsError, match=why):
            place_of(text, first, last)


@pytest.mark.parametrize(
    ("flags", "status", "why"),
    [(["--speed", "0"], 2, "speed=0"), (["--from", "+900"], 2, "outside"), (["--speed", "nan"], 2, "speed=nan")],
)
def test_what_cannot_be_replayed_is_refused(
    made: tuple[Path, str], capsys: pytest.CaptureFixture[str], flags: list[str], status: int, why: str
) -> None:
    assert main(["replay", str(made[0]), "--listen", "127.0.0.1:0", *flags]) == status
    assert why in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello")
    assert main(["replay", str(tmp_path / "x")]) == 1
    assert "wrong magic" in capsys.readouterr().err


def test_a_replay_that_jumps_keeps_one_session(folder: Path) -> None:
    """FastAPI keeps every function that it has served from: each jump would keep its samples for good."""
    path, id = finished(folder)
    recording = Recording(path)
    player = Player(recording, AgentSettings(), WriteGuard(token=None, listens_on_loopback=True), paused=True)
    steps: list[int] = []
    sessions: weakref.WeakSet[Session] = weakref.WeakSet([player._session])
    try:
        with TestClient(player) as client:
            for jump in range(6):
                place = recording.sample_times_ns[jump]
                player.go(position_ns=place)
                sessions.add(player._session)
                steps.append(client.get(f"/v1/engines/{id}").json()["counters"]["steps"])
                assert client.get("/v1/alerts").status_code == client.get(f"/v1/engines/{id}/marks").status_code == 200
                assert len(sessions) == 1
        assert steps == sorted(set(steps))  # what answers is the session of the place
    finally:
        player.stop()
        recording.close()
