"""Asking engines over their control sockets: real engine processes, and what is said when one cannot be asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.compaction.control_client import EngineControl
from engine_shim.control.messages import (
    MAX_LINE_BYTES,
    SCHEMA,
    CompactRequest,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
)
from engine_shim.control.peer import socket_path
from engine_shim.errors import (
    ControlMalformed,
    ControlRefused,
    ControlTimeout,
    ControlUnavailable,
    KvatlasError,
)

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "tests" / "engine_shim" / "control" / "control_engine.py"
SOMEBODY = 65534
PATIENCE_SECONDS = 120.0


@pytest.fixture
def map_path(tmp_path: Path) -> Path:
    return tmp_path / "engine.dp0.tp0.pp0.kv.kvmap"


@pytest.fixture
def start(map_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts engines that offer control beside `map_path`, and kills them in the end."""
    running: list[subprocess.Popen[str]] = []

    def start_one(*flags: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ENGINE), str(map_path), *flags]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        stdout = running[-1].stdout
        assert stdout is not None
        assert json.loads(stdout.readline())["path"] == str(socket_path(map_path))
        return running[-1]

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def impostor(map_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Listens in an engine's place, answers any first message with given bytes, and hangs up."""
    threads: list[threading.Thread] = []

    def listen(answer: bytes) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(socket_path(map_path)))
        listener.listen()

        def serve() -> None:
            with listener:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()

    yield listen
    for thread in threads:
        thread.join(PATIENCE_SECONDS)


def is_running(control: EngineControl) -> bool:
    status = control.request(StatusRequest())
    assert isinstance(status, StatusReply)
    return status.running


def test_every_request_has_its_reply(start: Callable[..., Any], map_path: Path) -> None:
    start()
    control = EngineControl(map_path)
    status = control.request(StatusRequest())
    assert isinstance(status, StatusReply)
    assert (status.moving, status.relocation, status.running, status.last_report) == (True, False, False, None)
    plan = control.request(PlanRequest(target=0.2))
    assert isinstance(plan, RunReply)
    assert (plan.decision, plan.planned_moves, plan.moved_blocks) == ("planned", 3, 0)
    run = control.request(CompactRequest(max_moves=7))
    assert isinstance(run, RunReply)
    assert (run.decision, run.moved_blocks, run.moved_bytes) == ("compacted", 7, 7 * 4096)
    assert run.details == {"chunks": 7, "dropped": {"pinned": 0}}
    assert control.request(RelocationRequest(on=True)) == SwitchReply(on=True)
    assert control.request(MovingRequest(on=False)) == SwitchReply(on=False)
    status = control.request(StatusRequest())
    assert isinstance(status, StatusReply)
    assert (status.moving, status.relocation, status.last_report) == (False, True, run)


def test_the_kill_switch_ends_a_run_that_another_waits_for(
    start: Callable[..., Any], map_path: Path, wait_until: Callable[..., Any]
) -> None:
    start()
    control = EngineControl(map_path)
    replies: list[object] = []
    runner = threading.Thread(target=lambda: replies.append(control.request(CompactRequest(max_moves=10**9))))
    runner.start()
    wait_until(lambda: is_running(control))
    with pytest.raises(ControlRefused) as caught:
        control.request(CompactRequest())
    assert caught.value.error == "busy"
    control.request(MovingRequest(on=False))
    runner.join(PATIENCE_SECONDS)
    (reply,) = replies
    assert isinstance(reply, RunReply)
    assert reply.decision == "aborted"


def test_an_engine_without_a_socket_offers_no_control(map_path: Path) -> None:
    with pytest.raises(ControlUnavailable, match="offers no control") as caught:
        EngineControl(map_path).request(StatusRequest())
    assert not isinstance(caught.value, ControlTimeout)


def test_a_dead_engine_is_said_to_have_ended(start: Callable[..., Any], map_path: Path) -> None:
    engine = start()
    engine.kill()
    engine.wait()
    with pytest.raises(ControlUnavailable, match="has ended"):
        EngineControl(map_path).request(StatusRequest())


def test_an_engine_killed_in_mid_run_leaves_the_outcome_unknown(
    start: Callable[..., Any], map_path: Path, wait_until: Callable[..., Any]
) -> None:
    engine = start()
    control = EngineControl(map_path)
    faults: list[KvatlasError] = []

    def run() -> None:
        try:
            control.request(CompactRequest(max_moves=10**9))
        except KvatlasError as error:
            faults.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    wait_until(lambda: is_running(control))
    engine.kill()
    runner.join(PATIENCE_SECONDS)
    (fault,) = faults
    assert isinstance(fault, ControlTimeout)
    assert "not known" in str(fault)


def test_a_deaf_engine_is_a_timeout_at_the_callers_patience(start: Callable[..., Any], map_path: Path) -> None:
    start("--deaf")
    with pytest.raises(ControlTimeout, match="no reply in time"):
        EngineControl(map_path).request(StatusRequest(), timeout_seconds=0.2)


def test_a_deaf_engine_says_so_itself_to_the_patient(start: Callable[..., Any], map_path: Path) -> None:
    start("--deaf")
    with pytest.raises(ControlUnavailable, match="did not come to take") as caught:
        EngineControl(map_path).request(CompactRequest())
    assert not isinstance(caught.value, ControlTimeout)


def test_a_stopped_engine_is_a_timeout_and_then_full(start: Callable[..., Any], map_path: Path) -> None:
    engine = start()
    engine.send_signal(signal.SIGSTOP)
    control = EngineControl(map_path)
    with pytest.raises(ControlTimeout):
        control.request(StatusRequest(), timeout_seconds=0.2)
    waiting = []
    try:
        while True:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting[-1].setblocking(False)
            waiting[-1].connect(str(control.path))
    except BlockingIOError:
        pass
    with pytest.raises(ControlUnavailable, match="does not accept connections"):
        control.request(StatusRequest(), timeout_seconds=0.2)
    for one in waiting:
        one.close()
    engine.send_signal(signal.SIGCONT)
    assert isinstance(control.request(StatusRequest()), StatusReply)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"hello\n", ControlMalformed, "not JSON"),
        (b"{}\n", ControlMalformed, "schema"),
        (b'{"schema":"kvatlas.control/v1","reply":"switch","on":1}\n', ControlMalformed, "on is 1"),
        (b'{"schema":"kvatlas.control/v2","reply":"switch","on":true}\n', ControlMalformed, "v2"),
        (b"x" * (MAX_LINE_BYTES + 1), ControlMalformed, "longer than"),
        (b'{"schema":"kvatlas', ControlTimeout, "closed the connection"),
        (b"", ControlTimeout, "closed the connection"),
    ],
)
def test_an_answer_that_is_none(
    impostor: Callable[[bytes], None], map_path: Path, answer: bytes, error: type[Exception], text: str
) -> None:
    impostor(answer)
    with pytest.raises(error, match=text):
        EngineControl(map_path).request(StatusRequest())


def test_an_error_of_a_later_version_is_a_refusal(impostor: Callable[[bytes], None], map_path: Path) -> None:
    message = {
        "schema": SCHEMA,
        "reply": "error",
        "error": "tired",
        "message": "later",
        "action": "rest",
        "field": "on",
    }
    impostor(json.dumps(message).encode() + b"\n")
    with pytest.raises(ControlRefused, match=r"later \(rest\)") as caught:
        EngineControl(map_path).request(MovingRequest(on=True))
    assert (caught.value.error, caught.value.field) == ("tired", "on")


def test_a_request_that_cannot_be_said_is_not_sent(map_path: Path) -> None:
    with pytest.raises(ControlMalformed) as caught:
        EngineControl(map_path).request(CompactRequest(target=7))
    assert caught.value.field == "target"


STRANGER = f"""
import os, pathlib, sys
from agent.compaction.control_client import EngineControl
from engine_shim.control.messages import StatusRequest
from engine_shim.errors import KvatlasError
os.setgroups([]); os.setgid({SOMEBODY}); os.setuid({SOMEBODY})
try:
    print(EngineControl(pathlib.Path(sys.argv[1])).request(StatusRequest()))
except KvatlasError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user: run the tests as root")
def test_another_user_is_refused_by_the_file_and_by_the_engine() -> None:
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-") as name:
        Path(name).chmod(0o755)
        map_path = Path(name) / "engine.kvmap"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        engine = subprocess.Popen(
            [sys.executable, ENGINE, map_path], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert engine.stdout is not None
        engine.stdout.readline()

        def ask() -> str:
            command = [sys.executable, "-c", STRANGER, str(map_path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            return done.stdout

        try:
            assert ask().startswith("ControlRefused")
            assert "run as the engine's user" in ask()
            socket_path(map_path).chmod(0o666)
            assert ask().startswith(f"ControlRefused uid {SOMEBODY} may not control this engine")
            assert isinstance(EngineControl(map_path).request(StatusRequest()), StatusReply)
        finally:
            engine.kill()
            engine.communicate()
