"""Nothing of a request is read before it is known that it may change something, and each one leaves its trace."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.types import Message, Scope

from agent.compaction.audit import Asker, AuditEntry, AuditLog, read_entries
from agent.web.audit_queue import AuditQueue
from agent.web.body_limit import BodyLimit
from agent.web.errors import add_error_handlers
from agent.web.gate import ACTION, OUTCOMES, Buckets, Gate, GateLimits, WriteGate, gate_families, peer_of
from agent.web.security import WriteGuard

TOKEN = "f3a9c07d5be84126"  # nothing else says so
SENT = {"Authorization": f"Bearer {TOKEN}"}


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class World:
    """An application behind a gate, with one route that changes something and one that fails."""

    def __init__(self, path: Path, *, token: str | None = TOKEN, loopback: bool = False) -> None:
        self.now, self.path = Now(), path
        self.entries: list[AuditEntry] = []
        self.audit = AuditLog(path, listener=self.entries.append)
        limits = GateLimits(changes_burst=5, changes_per_second=0.5, refusals_burst=3, refusals_per_second=0.1)
        guard = WriteGuard(token=token, listens_on_loopback=loopback)
        self.gate = Gate(guard, self.audit, limits=limits, clock=self.now)
        self.app = FastAPI()
        self.app.add_middleware(BodyLimit)
        self.app.add_middleware(WriteGate, gate=self.gate)
        add_error_handlers(self.app)

        @self.app.post("/change")
        async def change(request: Request) -> int:
            return len(await request.body())

        @self.app.delete("/broken")
        async def broken() -> None:
            raise RuntimeError("on purpose")

    def client(self, peer: str = "192.0.2.7") -> TestClient:
        return TestClient(self.app, client=(peer, 50_000), raise_server_exceptions=False)

    def settled(self) -> list[AuditEntry]:
        """The entries, once all that were handed to the disk are there."""
        assert self.gate.settle(60)
        return list(read_entries(self.path)) if self.path.exists() else []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "audit.jsonl")
    yield made
    made.audit.close()


async def ask(app: Any, method: str, headers: dict[str, str]) -> tuple[int, int]:
    """The status, and how often the application read the body, of which there is no end."""
    reads, status = 0, 0

    async def receive() -> Message:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": reads < 50}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    raw = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": "/change",
        "raw_path": b"/change",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": raw,
        "client": ("192.0.2.7", 50_000),
        "server": ("127.0.0.1", 9477),
    }
    await app(scope, receive, send)
    return status, reads


def test_no_body_is_read_before_the_token_is_known_to_be_right(world: World) -> None:
    assert asyncio.run(ask(world.app, "POST", {"Authorization": "Bearer wrong"})) == (401, 0)
    assert asyncio.run(ask(world.app, "POST", {})) == (401, 0)
    status, reads = asyncio.run(ask(world.app, "POST", SENT))  # the negative control
    assert (status, reads) == (200, 50)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "PROPFIND"])
def test_every_other_method_counts_as_a_change(world: World, method: str) -> None:
    assert world.client().request(method, "/nowhere").status_code == 401


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_reading_is_open(world: World, method: str) -> None:
    assert world.client().request(method, "/nowhere").status_code == 404
    assert world.settled() == []


def test_what_was_changed_and_what_was_refused_is_audited_without_the_token(world: World) -> None:
    world.client().post("/change", content=b"secret body", headers=SENT)
    world.client().post("/change", headers={"Authorization": f"Bearer {TOKEN}x"})
    world.client().delete("/broken", headers=SENT)
    found = {(one.asker.route, one.outcome): one for one in world.settled()}
    assert set(found) == {("POST /change", "200"), ("POST /change", "unauthorized"), ("DELETE /broken", "no answer")}
    allowed, refused = found["POST /change", "200"], found["POST /change", "unauthorized"]
    assert (allowed.asker.access, allowed.asker.address, allowed.action) == ("token", "192.0.2.7", ACTION)
    assert allowed.seconds is not None
    assert refused.asker.access == "none"
    text = world.path.read_text(encoding="utf-8")
    assert TOKEN not in text
    assert "secret body" not in text
    assert TOKEN not in repr(world.gate.guard)


def test_a_path_of_any_length_and_kind_is_cut_in_the_audit(world: World) -> None:
    world.client().post("/" + "a%0A" * 2000, headers=SENT)
    (entry,) = world.settled()
    assert len(entry.asker.route) < 400
    assert len(world.path.read_text(encoding="utf-8").splitlines()) == 1


def test_guessing_is_limited_and_a_right_guess_is_not_told_from_a_wrong_one_then(world: World) -> None:
    guesser, other = world.client("198.51.100.1"), world.client("198.51.100.2")
    statuses = [guesser.post("/change", headers={"Authorization": f"Bearer {n}"}).status_code for n in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    held = guesser.post("/change", headers=SENT)
    assert (held.status_code, held.json()["error"]) == (429, "limited")
    assert int(held.headers["retry-after"]) >= 10
    assert other.post("/change", headers=SENT).status_code == 200  # another's guesses cost nobody else anything
    assert len([one for one in world.settled() if one.outcome == "unauthorized"]) == 3
    world.now.seconds += 11
    assert guesser.post("/change", headers=SENT).status_code == 200


def test_changes_are_limited_too(world: World) -> None:
    client = world.client()
    statuses = [client.post("/change", headers=SENT).status_code for _ in range(7)]
    assert statuses == [200] * 5 + [429] * 2
    world.now.seconds += 2
    assert client.post("/change", headers=SENT).status_code == 200
    assert world.gate.counts() == {"allowed": 6, "unauthorized": 0, "forbidden": 0, "limited": 2}


def test_without_a_token_beyond_loopback_all_is_forbidden_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path / "audit", token=None)
    assert world.client().post("/change").status_code == 403
    assert world.client("127.0.0.1").post("/change").status_code == 403
    assert world.gate.counts()["forbidden"] == 2
    assert {one.asker.access for one in world.settled()} == {"none"}
    world.audit.close()


def test_the_metric_has_a_closed_set_of_outcomes(world: World) -> None:
    (family,) = gate_families(world.gate.counts(), "kvatlas_")
    assert family.name == "kvatlas_api_changes"
    assert {sample.labels["outcome"]: sample.value for sample in family.samples} == dict.fromkeys(OUTCOMES, 0)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),  # one host has all of these
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "unknown"),
        (None, "unknown"),
    ],
)
def test_peer_of(address: str | None, peer: str) -> None:
    assert peer_of(address) == peer


def test_peers_without_number_take_no_memory_without_end() -> None:
    now = Now()
    buckets = Buckets(1, 0.1, 100, now)
    for number in range(1000):
        buckets.take(str(number))
    assert len(buckets._known) == 100
    assert buckets.wait_seconds("999") == pytest.approx(10.0)
    assert buckets.wait_seconds("0") == 0.0


@pytest.mark.parametrize("burst", [1, 3])
def test_a_bucket_fills_again_up_to_its_size(burst: int) -> None:
    now = Now()
    buckets = Buckets(burst, 2.0, 10, now)
    for _ in range(burst):
        assert buckets.wait_seconds("a") == 0.0
        buckets.take("a")
    assert buckets.wait_seconds("a") == pytest.approx(0.5)
    now.seconds += 100
    for _ in range(burst):
        buckets.take("a")
    assert buckets.wait_seconds("a") > 0.0


class Held(AuditLog):
    """A disk that hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go, self.kept = threading.Event(), list[str]()

    def record(self, entry: AuditEntry) -> bool:
        assert self.go.wait(60)
        self.kept.append(entry.outcome)
        return True


def an_entry(outcome: str) -> AuditEntry:
    who = Asker(route="POST /x", access="token")
    return AuditEntry(time_unix=0.0, asker=who, action=ACTION, engine="", outcome=outcome, reason="")


def test_a_disk_that_hangs_holds_nobody_up_and_loses_nothing_that_was_taken() -> None:
    held = Held()
    queue = AuditQueue(held, most=3)
    taken = [number for number in range(10) if queue.put(an_entry(str(number)))]
    assert 3 <= len(taken) < 10
    assert not queue.wait_empty(0.0)
    held.go.set()
    assert queue.close(60)
    assert held.kept == [str(number) for number in taken]
    assert not queue.put(an_entry("late"))


def test_where_no_thread_can_be_started_an_entry_is_refused_and_the_next_one_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = Held()
    held.go.set()
    queue = AuditQueue(held)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        assert not queue.put(an_entry("lost"))
    assert queue.put(an_entry("kept"))
    assert queue.close(60)
    assert held.kept == ["kept"]


# The real agent


def test_no_route_of_the_agent_is_forgotten(start_agent: Any) -> None:
    """Each one that its own description lists with another method than GET is refused without a token."""
    agent = start_agent(environment={"KVATLAS_TOKEN": TOKEN})
    with httpx.Client(base_url=agent.url, timeout=60) as client:
        paths = client.get("/openapi.json").json()["paths"]
        listed = [(method.upper(), path) for path, methods in paths.items() for method in methods if method != "get"]
        assert {path for _, path in listed} >= {"/v1/mutes", "/v1/plan", "/v1/engines/{id}/compaction"}
        # Fewer than are let in at once: the ones after those are refused too, as limited.
        statuses = {(method, path): client.request(method, path).status_code for method, path in listed[:9]}
    assert set(statuses.values()) == {401}


def test_a_real_agent_keeps_its_token_to_itself(start_agent: Any, tmp_path: Path, wait_until: Any) -> None:
    """In its log, its audit log, its answers and its metrics, whatever is tried."""
    audit = tmp_path / "audit.jsonl"
    agent = start_agent("--audit-log", str(audit), environment={"KVATLAS_TOKEN": TOKEN})
    said = []
    with httpx.Client(base_url=agent.url, timeout=60) as client:
        for headers in (SENT, {}, {"Authorization": f"Bearer {TOKEN}?"}, {"Authorization": f"Basic {TOKEN}"}):
            for method, path in (("POST", "/v1/mutes"), ("DELETE", "/v1/mutes/none"), ("PUT", "/metrics")):
                reply = client.request(method, path, headers=headers, content=b'{"rule": 1}')
                said.append(f"{reply.status_code} {reply.text} {dict(reply.headers)}")
        paths = ("/metrics", "/docs", "/v1/engines", "/v1/compactions", "/healthz")
        said += [client.get(path).text for path in paths]
    assert [one[:3] for one in said[:3]] == ["400", "404", "405"]
    assert {one[:3] for one in said[3:12]} == {"401"}
    assert 'kvatlas_api_changes_total{outcome="unauthorized"}' in "".join(said)
    assert '"action":"request"' not in "".join(said)  # not among what was decided about compaction

    def asked() -> list[dict[str, Any]]:
        lines = audit.read_text(encoding="utf-8").splitlines() if audit.exists() else []
        return [one for one in map(json.loads, lines) if one["action"] == ACTION]

    wait_until(lambda: len(asked()) == 12, within=60)
    assert agent.stop() == 0
    assert {one["outcome"] for one in asked()} == {"400", "404", "405", "unauthorized"}
    assert {one["asker"]["address"] for one in asked()} == {"127.0.0.1"}
    for text in (*said, audit.read_text(encoding="utf-8"), json.dumps(agent.lines)):
        assert TOKEN not in text


def test_a_header_does_not_make_another_peer_of_who_asks(start_agent: Any, tmp_path: Path, wait_until: Any) -> None:
    """Neither for the limits nor in the audit log: the address of a header is whatever its sender likes."""
    audit = tmp_path / "audit.jsonl"
    agent = start_agent("--audit-log", str(audit), environment={"KVATLAS_TOKEN": TOKEN})
    with httpx.Client(base_url=agent.url, timeout=60) as client:
        guesses = [client.post("/v1/plan", headers={"X-Forwarded-For": f"10.0.0.{one}"}) for one in range(40)]
    assert {one.status_code for one in guesses} == {401, 429}
    wait_until(lambda: audit.exists() and ACTION in audit.read_text(encoding="utf-8"), within=60)
    assert agent.stop() == 0
    entries = [json.loads(line) for line in audit.read_text(encoding="utf-8").splitlines()]
    assert {one["asker"]["address"] for one in entries if one["action"] == ACTION} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP"])
def test_a_proxy_s_loopback_is_nobody_s(tmp_path: Path, name: str) -> None:
    open_to_loopback = World(tmp_path / "audit.jsonl", token=None, loopback=True).client("127.0.0.1")
    assert open_to_loopback.post("/change").status_code == 200
    refused = open_to_loopback.post("/change", headers={name: "127.0.0.1"})
    assert (refused.status_code, "proxy" in refused.json()["message"]) == (403, True)
    with_token = World(tmp_path / "other.jsonl", token=TOKEN).client("127.0.0.1")
    assert with_token.post("/change", headers={name: "127.0.0.1", **SENT}).status_code == 200


def test_a_short_token_is_warned_of(start_agent: Any) -> None:
    agent = start_agent(environment={"KVATLAS_TOKEN": "short"})
    agent.wait_for_event("the token is short: take 16 characters or more at random")


def test_a_refused_connection_is_closed_before_its_body_comes(start_agent: Any) -> None:
    """Four megabytes that nobody asked for are not taken in."""
    agent = start_agent(environment={"KVATLAS_TOKEN": TOKEN})
    at = urlsplit(agent.url)
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/plan HTTP/1.1\r\nHost: a\r\nContent-Length: 4000000\r\n\r\n")
        got = b""
        while piece := connection.recv(65_536):
            got += piece
    assert got.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in got.lower()
