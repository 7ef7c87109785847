"""The client against servers that do not behave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from agent.client import DEFAULT_URL, AgentClient, AgentRefused, AgentUnavailable, checked_address

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that gives one answer to everything."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"not json"),
        (200, b'{"engines": NaN}'),
        (200, b"{}"),
        (500, b"<html>"),
        (302, b""),
        (404, b'{"detail": 1}'),
    ],
)
def test_an_answer_that_is_not_an_agent_s(serve: Serve, status: int, body: bytes) -> None:
    with AgentClient(serve(status, body)) as client, pytest.raises(AgentUnavailable, match=f"HTTP {status} at"):
        client.engines()


def test_a_refusal_keeps_its_three_parts(serve: Serve) -> None:
    url = serve(400, b'{"error": "bad_request", "message": "no such metric", "action": "ask for another"}')
    with AgentClient(url) as client, pytest.raises(AgentRefused) as caught:
        client.history("a", "b", 60)
    assert (caught.value.status, caught.value.error, caught.value.action) == (400, "bad_request", "ask for another")
    assert str(caught.value) == "no such metric (ask for another)"


REPLAY: dict[str, object] = {
    "file": "a.kvrec", "id": "a", "recorded_from_unix": 900.0, "recorded_until_unix": 1100.0, "position_unix": 1000.0,
    "speed": 20.0, "paused": False, "at_end": False, "recording_ended": "", "samples": 1, "events": 1, "lost_events": 0,
    "gaps": [], "dropped": "", "notes": [], "fault": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("replay", "later"),
    [
        pytest.param(None, 7010.0, id="of a live engine the time is this host's"),
        pytest.param({}, 1200.0, id="of a replay, 20 seconds in one"),
        pytest.param({"paused": True}, 1000.0, id="paused"),
        pytest.param({"at_end": True}, 1000.0, id="at its end"),
    ],
)
def test_now_is_where_a_replay_stands(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, replay: dict[str, object] | None, later: float
) -> None:
    agent = {
        "version": "1", "started_unix": 0.0, "interval_seconds": 1.0, "threshold": 0.3, "folders": [],
        "unreadable": [], "writes_enabled": False, "replay": None if replay is None else REPLAY | replay,
    }  # fmt: skip
    body = {"schema": "kvatlas.engines/v1", "now_unix": 1000.0, "agent": agent, "engines": []}
    with AgentClient(serve(200, json.dumps(body).encode())) as client:
        monkeypatch.setattr("agent.client.time", SimpleNamespace(time=lambda: 7000.0))
        client.engines()
        monkeypatch.setattr("agent.client.time", SimpleNamespace(time=lambda: 7010.0))
        assert client.now_unix == later


NO_ADDRESSES = [
    "",
    "nonsense",
    "http://",
    "http://[",
    "http://[::1",
    "http://user:secret@[::1",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:-1",
    f"http://{'a' * 64}.x:1",
    "http://a..b",
    "http://\udcff",
    "http://x\n:1",
    "ftp://x",
]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://host.invalid:1", *NO_ADDRESSES])
def test_no_agent_there(url: str) -> None:
    with AgentClient(url, timeout_seconds=2) as client, pytest.raises(AgentUnavailable):
        client.engines()


def test_an_agent_that_does_not_answer_in_time() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with AgentClient(url, timeout_seconds=0.2) as client, pytest.raises(AgentUnavailable, match="no answer"):
            client.engines()


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_said_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="KVATLAS_AGENT_URL is no address of an agent") as caught:
        checked_address(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", [DEFAULT_URL, "http://[::1]:9477", "https://user:p%40ss@host/kvatlas", "http://\u00e4.de"]
)
def test_addresses_are_let_through_as_they_are(url: str) -> None:
    assert checked_address(url) == url
