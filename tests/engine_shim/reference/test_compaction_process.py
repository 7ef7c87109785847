"""Compaction of an engine in a process of its own: asked for over its control socket, and killed in mid-run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_shim.allocation_map.reader import MapReader
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    ControlRequest,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
    TurnOffRequest,
    encode_request,
    parse_reply,
)
from engine_shim.control.peer import socket_address, socket_path
from engine_shim.layout import BlockState

DEADLINE_SECONDS = 120.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.01)
    return found


class EngineProcess:
    """An engine that serves a trace for ever, its map, and its control socket."""

    def __init__(self, folder: Path, *flags: str) -> None:
        trace = folder / "trace.csv"
        rows = [f"{index / 4},{60 + 40 * (index % 9)},{40 + 60 * (index % 4)}" for index in range(400)]
        trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
        arguments = ["--trace", str(trace), "--map-folder", str(folder), "--blocks", "400", "--loop", "--device", "cpu",
                     "--model-geometry", "test-tiny", "--speed", "8", "--verify-every", "5", *flags]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_shim.reference", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.map = eventually(lambda: next(folder.glob("*.kvmap"), None), "the map")
        self.reader = MapReader(self.map)
        eventually(lambda: self.reader.read(DEADLINE_SECONDS).counters["steps"] > 40, "forty steps")

    def ask(self, request: ControlRequest) -> ControlReply:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(DEADLINE_SECONDS)
            with socket_address(socket_path(self.map)) as address:
                connection.connect(address)
            connection.sendall(encode_request(request))
            received = b""
            while not received.endswith(b"\n"):
                data = connection.recv(65536)
                assert data, "the engine hung up"
                received += data
        return parse_reply(received)

    def stop_between_publishes(self) -> None:
        """Hold it where its map is whole: a kill within a publish leaves one that nobody takes for whole."""
        while True:
            self.process.send_signal(signal.SIGSTOP)
            os.waitpid(self.process.pid, os.WUNTRACED)
            if self.reader.sequence() % 2 == 0:
                return
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        report: dict[str, Any] = json.loads(output)
        return report


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def run(*flags: str) -> EngineProcess:
        started.append(EngineProcess(tmp_path, *flags))
        return started[-1]

    yield run
    for engine in started:
        engine.reader.close()
        engine.process.kill()
        engine.process.wait()


def test_every_request_is_answered_by_an_engine_that_serves(start: Callable[..., EngineProcess]) -> None:
    engine = start("--policy", "vllm")
    status = engine.ask(StatusRequest())
    assert isinstance(status, StatusReply)
    assert (status.moving, status.relocation, status.running, status.policy) == (True, False, False, "vllm")
    plan = engine.ask(PlanRequest(target=0.0))
    assert isinstance(plan, RunReply)
    assert plan.decision == "planned"
    assert plan.planned_moves > 0 == plan.moved_blocks
    run = engine.ask(CompactRequest(target=0.0, verify=True, max_seconds=20.0))
    assert isinstance(run, RunReply)
    assert run.decision in ("reached", "partial")
    assert run.moved_blocks > 0
    assert run.details["verified_blocks"] == run.moved_blocks
    assert isinstance(run.details["before"], dict)
    status = engine.ask(StatusRequest())
    assert isinstance(status, StatusReply)
    assert status.last_report == run
    assert engine.ask(MovingRequest(on=False)) == SwitchReply(on=False, reason="moving is switched off")
    refused = engine.ask(CompactRequest())
    assert isinstance(refused, RunReply)
    assert (refused.decision, refused.moved_blocks) == ("refused", 0)
    assert engine.ask(MovingRequest(on=True)) == SwitchReply(on=True)
    left = engine.ask(TurnOffRequest())
    assert isinstance(left, ErrorReply)
    assert left.error == "refused"
    assert engine.ask(RelocationRequest(on=True)) == SwitchReply(on=True)
    status = engine.ask(StatusRequest())
    assert isinstance(status, StatusReply)
    assert (status.relocation, status.policy) == (True, "relocating")
    eventually(lambda: engine.reader.read(DEADLINE_SECONDS).counters["relocation_copies"] > 0, "a relocation")
    assert engine.ask(RelocationRequest(on=False)) == SwitchReply(on=False)
    report = engine.end()
    assert report["mismatched_blocks"] == 0
    assert report["verified_tokens"] > 0


def test_an_engine_whose_policy_cannot_be_switched_says_so(start: Callable[..., EngineProcess]) -> None:
    engine = start("--policy", "fifo", "--no-moving")
    reply = engine.ask(RelocationRequest(on=True))
    assert isinstance(reply, SwitchReply)
    assert not reply.on
    assert "cannot go from policy fifo" in reply.reason
    status = engine.ask(StatusRequest())
    assert isinstance(status, StatusReply)
    assert (status.relocation, status.moving) == (None, False)
    assert status.reason == "this engine was started with moving off"
    assert not isinstance(engine.ask(PlanRequest()), ErrorReply)


def test_the_map_of_an_engine_killed_in_mid_run_stays_whole(start: Callable[..., EngineProcess]) -> None:
    """A run of single moves, one a step: the map is one that the engine published, between two of them."""
    engine = start("--policy", "fifo")
    with socket.socket(socket.AF_UNIX) as connection:
        with socket_address(socket_path(engine.map)) as address:
            connection.connect(address)
        connection.sendall(encode_request(CompactRequest(target=0.0, max_chunk_moves=1, max_step_seconds=1e-6)))
        eventually(lambda: engine.reader.read(DEADLINE_SECONDS).counters["live_moves"] >= 5, "five moves")
        engine.stop_between_publishes()
        engine.process.kill()
        engine.process.wait()
    assert not engine.reader.writer_alive()
    snapshot = engine.reader.read(DEADLINE_SECONDS)
    assert snapshot.counters["live_moves"] >= 5
    states = snapshot.states
    assert snapshot.state_counts[:5] == tuple(np.bincount(states, minlength=5).tolist())
    assert snapshot.references is not None
    assert snapshot.owner is not None
    live = (states == BlockState.USED) | (states == BlockState.PINNED)
    assert bool((snapshot.references[live] > 0).all())
    assert not snapshot.references[~live].any()
    assert bool((snapshot.owner[live] != 0).all())
