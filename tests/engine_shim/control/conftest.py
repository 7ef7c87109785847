"""Raw peers, servers whose engine is the test, and engine processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    ControlReply,
    ErrorReply,
    encode_request,
    parse_reply,
)
from engine_shim.control.peer import socket_address
from engine_shim.control.server import ControlLimits, ControlServer

ENGINE = Path(__file__).with_name("control_engine.py")
ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 120.0


class Caller:
    """One raw connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = b""
        with socket_address(path) as address:
            self.socket.connect(address)  # without a timeout it waits where the backlog is full
        self.socket.settimeout(PATIENCE_SECONDS)

    def say(self, data: Any) -> Caller:
        """Bytes as they are, or a request."""
        self.socket.sendall(data if isinstance(data, bytes) else encode_request(data))
        return self

    def reply(self) -> ControlReply:
        while b"\n" not in self._received:
            data = self.socket.recv(65536)
            assert data, f"closed after {self._received!r}"
            self._received += data
        first, _, self._received = self._received.partition(b"\n")
        return parse_reply(first)

    def error(self) -> ErrorReply:
        reply = self.reply()
        assert isinstance(reply, ErrorReply), reply
        return reply

    def is_closed(self) -> bool:
        """Waits for the end of the connection; False where something else comes."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


class Call(Protocol):
    def __call__(self, path: Path | ControlServer) -> Caller: ...


@pytest.fixture
def call() -> Iterator[Call]:
    """Connects to a server or a socket; all are closed in the end."""
    callers: list[Caller] = []

    def connect(path: Path | ControlServer) -> Caller:
        callers.append(Caller(path.path if isinstance(path, ControlServer) else path))
        return callers[-1]

    yield connect
    for caller in callers:
        caller.socket.close()


class Serve(Protocol):
    def __call__(
        self, limits: ControlLimits | None = ..., *, max_queued: int = ..., path: Path | None = ...
    ) -> tuple[ControlServer, Mailbox]: ...


class Mailbox(ControlMailbox):
    """A mailbox that can be waited for; the test is the engine."""

    def __init__(self, max_queued: int) -> None:
        self.awake = threading.Semaphore(0)
        super().__init__(lambda: self.awake.release(), max_queued=max_queued)

    def next(self) -> ControlTicket:
        """Sleep until woken, then take."""
        assert self.awake.acquire(timeout=PATIENCE_SECONDS)
        ticket = self.take()
        assert ticket is not None
        return ticket


@pytest.fixture
def map_path(tmp_path: Path) -> Path:
    return tmp_path / "engine.dp0.tp0.pp0.kv.kvmap"


@pytest.fixture
def serve(map_path: Path) -> Iterator[Serve]:
    """Starts servers whose engine is the test, beside `map_path` unless told otherwise."""
    servers: list[ControlServer] = []

    def start(
        limits: ControlLimits | None = None, *, max_queued: int = 16, path: Path | None = None
    ) -> tuple[ControlServer, Mailbox]:
        mailbox = Mailbox(max_queued)
        servers.append(ControlServer.start(path or map_path, mailbox, limits=limits))
        return servers[-1], mailbox

    yield start
    for server in servers:
        server.close()


class StartEngine(Protocol):
    def __call__(self, *flags: str) -> tuple[subprocess.Popen[str], dict[str, Any]]: ...


@pytest.fixture
def start_engine(map_path: Path) -> Iterator[StartEngine]:
    """Starts engine processes beside `map_path`, and kills them and their children in the end."""
    running: list[tuple[subprocess.Popen[str], int]] = []

    def start(*flags: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = subprocess.Popen(
            [sys.executable, ENGINE, map_path, *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        running.append((process, told["child"]))
        return process, told

    yield start
    for process, child in running:
        process.kill()
        process.communicate()
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
