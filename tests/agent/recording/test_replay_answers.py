"""What a replay answers is what the live agent answered: at every instant, on every path, its trends and alerts too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from agent.recording.chunks import ChunkKind, RecordingError
from agent.recording.player import Player
from agent.recording.reading import Recording
from engine_shim.layout import EventKind
from tests.agent.recording.support import (
    CLOCKS,
    OWN,
    ask_all,
    differences,
    rewrite,
    rewrite_chunks,
    without,
)
from tests.agent.recording.world import COMPARED, GUARD, RULES, Recorded, record_live

# Compaction asks the engine itself, and there is none behind a recording; who asks is told so.
ASKED_OF_THE_ENGINE = {"engine"}
# What an agent's policy decides, and what it was asked for, is of that agent: no map holds it. A replay has a policy of
# its own, which is off and says so once. Where the live one is off too, these marks are compared like all others.
DECIDED_BY_THE_AGENT = "decision"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_live(tmp_path_factory.mktemp("recorded"), RULES)


def asking(client: TestClient) -> Callable[[str], tuple[int, Any]]:
    def ask(path: str) -> tuple[int, Any]:
        answer = client.get(path)
        return answer.status_code, answer.json()

    return ask


def compare(recorded: Recorded, path: Path, samples: Iterable[int] = COMPARED) -> list[str]:
    """Where the answers of a replay differ from the live ones; no answer may be missing."""
    recording = Recording(path)
    player = Player(recording, recorded.settings, GUARD, paused=True)
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


def test_on_another_machine_alerts_are_still_of_the_recorded_one(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.alerting.service.socket.gethostname", lambda: "elsewhere")
    assert "device-lost" in {one["rule"] for one in recorded.answers("/v1/alerts")[9]["open"]}
    assert compare(recorded, recorded.path, COMPARED[9:10]) == []


def test_a_seek_back_is_not_held_against_who_asks(recorded: Recorded) -> None:
    """The limits of changes go by time, and that of the replay goes back."""
    recording = Recording(recorded.path)
    player = Player(recording, recorded.settings, GUARD, paused=True)
    try:
        with TestClient(player, client=("127.0.0.1", 1)) as client:
            for place in (recording.end_ns, recording.start_ns, recording.end_ns, recording.start_ns):
                assert client.post("/v1/replay", json={"position_unix": place / 1e9}).status_code == 200
            assert client.post("/v1/replay", json={"speed": 2}).status_code == 200
    finally:
        player.stop()
        recording.close()


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
    assert asked >= {"/v1/devices", "/v1/engines/{id}/marks", "/v1/engines/{id}/compaction", "/v1/plan"}
    frame = last.by_path[next(path for path in last.by_path if "/frames?" in path)]
    assert frame[0] == 200
    assert frame[1]["previous_unix"] is not None
    assert any(one.by_path["/v1/alerts"][1]["open"] for one in instants)


def test_the_devices_that_are_compared_change(recorded: Recorded) -> None:
    told = recorded.answers("/v1/devices")
    assert [one["nvml"] for one in told].count("degraded") == 1
    first, second = ([one["devices"][gpu] for one in told] for gpu in (0, 1))
    assert {one["state"] for one in second} == {"ok", "lost", "degraded"}
    rows = [{row["kind"]: row["bytes"] for row in one["rows"] or ()} for one in first]
    assert len({row.get("engine_other") for row in rows}) > 5
    assert any(one["engine_id"] == "engine" for one in first[-1]["processes"])
    assert {one["age_seconds"] for one in told} == {0.0, 1.0, 2.0, 3.0}
    assert len({one["host"]["free_bytes"] for one in told}) > 5
    assert len({str(one["allocators"]) for one in told}) > 5
    assert {one["engines"][0]["engine_id"] for one in told[1:]} == {"engine"}
    alerts = recorded.answers("/v1/alerts")
    assert any(alert["rule"] == "device-lost" for one in alerts for alert in one["open"])
    assert any(alert["rule"] == "device-lost" for alert in alerts[-1]["recent"])


def test_the_marks_that_are_compared_tell_of_alerts_that_fire_and_are_over(recorded: Recorded) -> None:
    first, last = (recorded.answers("/marks?")[at]["marks"] for at in (0, -1))
    kinds = {one["kind"] for one in last}
    texts = [one["text"] for one in last]
    assert kinds == {"engine", "alert", "decision"}
    assert any("pool-nearly-full fires" in one for one in texts)
    assert any("pool-nearly-full is over" in one for one in texts)
    assert len(first) < len(last)
    assert len(recorded.answers("limit=2")[-1]["marks"]) == 2


def test_one_figure_of_a_device_that_is_another_one_shows_in_the_answers(recorded: Recorded, tmp_path: Path) -> None:
    def other(number: int, payload: bytes) -> bytes:
        told = json.loads(payload)
        if number == len(devices) - 1:
            told["devices"]["0"]["sample"]["memory"]["used_bytes"] += 1
        return json.dumps(told).encode()

    recording = Recording(recorded.path)
    devices = [place for place in recording.places() if place.kind == ChunkKind.DEVICES]
    recording.close()
    rewrite_chunks(recorded.path, tmp_path / "other.kvrec", {ChunkKind.DEVICES: other})
    (line,) = compare(recorded, tmp_path / "other.kvrec", COMPARED[-1:])
    assert ".devices[0].memory.used_bytes: " in line
    assert compare(recorded, tmp_path / "other.kvrec", COMPARED[:-2]) == []


def test_one_mark_that_is_at_another_time_shows_in_the_answers(recorded: Recorded, tmp_path: Path) -> None:
    """The sample at which an alert fired is said to be of a twentieth of a second later."""
    marks = recorded.answers("/marks?")[-1]["marks"]
    fired = next(one["time_unix"] for one in marks if "pool-nearly-full fires" in one["text"])
    changed = []

    def later(number: int, payload: bytes) -> bytes:
        size = int.from_bytes(payload[:4], "little")
        told = json.loads(payload[4 : 4 + size])
        if abs(told["facts"]["taken_unix"] - fired) < 0.01:
            told["facts"]["taken_unix"] += 0.05
            changed.append(number)
        text = json.dumps(told).encode()
        return len(text).to_bytes(4, "little") + text + payload[4 + size :]

    rewrite_chunks(recorded.path, tmp_path / "other.kvrec", {ChunkKind.SAMPLE: later})
    assert len(changed) == 1
    found = [line for line in compare(recorded, tmp_path / "other.kvrec", COMPARED[-1:]) if "/marks" in line]
    assert found
    assert all("time_unix" in line for line in found)


def test_a_recording_without_devices_says_so_and_answers_all_else(recorded: Recorded, tmp_path: Path) -> None:
    """As an older recorder wrote it; and as an older reader reads a newer one, which skips chunks of kinds unknown."""
    rewrite_chunks(recorded.path, tmp_path / "old.kvrec", {ChunkKind.DEVICES: lambda number, payload: None})
    other = compare(recorded, tmp_path / "old.kvrec", COMPARED[-1:])
    assert {line.partition(", ")[2][:11] for line in other} == {"/v1/devices", "/v1/alerts["}
    recording = Recording(tmp_path / "old.kvrec")
    player = Player(recording, recorded.settings, GUARD, paused=True)
    try:
        with TestClient(player) as client:
            found = client.get("/v1/devices").json()
    finally:
        player.stop()
        recording.close()
    assert (found["nvml"], found["nvml_reason"]) == ("recording", "a recording has no devices")
    assert found["devices"] == []
    assert "not read yet" not in (found["host_reason"], found["cgroup_reason"])


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


def test_of_an_agent_whose_policy_is_on_the_decisions_alone_are_not_replayed(tmp_path: Path) -> None:
    recorded = record_live(tmp_path, RULES, samples=30, asked=[29], scope="all")
    recording = Recording(recorded.path)
    player = Player(recording, recorded.settings, GUARD, paused=True)
    try:
        with TestClient(player) as client:
            player.go(position_ns=recording.sample_times_ns[29])
            marks = [one for one in recorded.live[29].by_path if "/marks?from" in one and "holds" not in one]
            live, replayed = recorded.live[29].by_path[marks[0]][1]["marks"], client.get(marks[0]).json()["marks"]
    finally:
        player.stop()
        recording.close()
    assert {one["kind"] for one in live} == {"engine", "alert", DECIDED_BY_THE_AGENT}
    decisions = [one["text"] for one in replayed if one["kind"] == DECIDED_BY_THE_AGENT]
    assert len(decisions) == 1
    assert "setting compaction: off" in decisions[0]
    happened, again = ([one for one in told if one["kind"] != DECIDED_BY_THE_AGENT] for told in (live, replayed))
    assert differences(happened, again) == []


def test_a_replay_that_begins_amid_a_recording_marks_nothing_that_stood_so_before(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.recording.session.WARM_UP_SECONDS", 20.0)
    recording = Recording(recorded.path)
    player = Player(recording, recorded.settings, GUARD, paused=True)
    try:
        with TestClient(player) as client:
            player.go(position_ns=recording.end_ns)
            told = client.get(f"/v1/engines/{recorded.id}/marks").json()["marks"]
    finally:
        player.stop()
        recording.close()
    began = recording.sample_times_ns[-1] / 1e9 - 20.0
    live = [one for one in recorded.answers("/marks?")[-1]["marks"] if one["time_unix"] > began + 2.0]
    assert live
    assert [one for one in live if one not in told] == []
    assert {one["kind"] for one in told} == {"alert"}
    assert all(one["time_unix"] > began for one in told)
