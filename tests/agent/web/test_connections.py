"""A bounded number of connections and of open files, however many come and ask for nothing."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from agent.descriptors import MAX_CONNECTIONS, RESERVE, raise_limit, share_out
from agent.sampling.discovery import MAX_MAPS
from agent.web.connections import bounded_protocol
from engine_shim import MapSpec
from engine_shim.allocation_map.writer import MapWriter

Serve = Callable[[int, float], tuple[str, int]]


@pytest.fixture
def serve(wait_until: Callable[..., Any]) -> Iterator[Serve]:
    """A real server with at most so many connections, each with so many seconds for its first request."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(most: int, seconds: float) -> tuple[str, int]:
        app = FastAPI()
        app.get("/")(lambda: "fine")
        listener = socket.create_server(("127.0.0.1", 0))
        bounded = bounded_protocol(most, seconds)
        config = uvicorn.Config(app, http=bounded, log_config=None, lifespan="off", timeout_keep_alive=600)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))
        wait_until(lambda: server.started)
        address: tuple[str, int] = listener.getsockname()
        return address

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def test_idle_connections_make_room_for_those_that_ask(serve: Serve) -> None:
    address = serve(4, 600.0)
    idle = [socket.create_connection(address, 60) for _ in range(12)]
    try:
        for one in idle[:8]:
            assert one.recv(1) == b""  # closed by the server, the oldest first
        for _ in range(3):
            with httpx.Client(timeout=60.0, trust_env=False) as client:
                assert client.get("http://{}:{}/".format(*address)).json() == "fine"
    finally:
        for one in idle:
            one.close()


def test_a_connection_that_asks_for_nothing_is_closed_and_one_that_asks_is_kept(serve: Serve) -> None:
    address = serve(100, 1.0)  # which a client that asks at once must not exceed, on a busy machine too
    with httpx.Client(timeout=60.0, trust_env=False) as client, socket.create_connection(address, 60) as silent:
        url = "http://{}:{}/".format(*address)
        assert client.get(url).json() == "fine"
        port = client.get(url).extensions["network_stream"].get_extra_info("client_addr")
        assert silent.recv(1) == b""
        with socket.create_connection(address, 60) as slow:
            slow.sendall(b"GET / HTT")  # half a request is none
            assert slow.recv(1) == b""
        assert client.get(url).extensions["network_stream"].get_extra_info("client_addr") == port


@pytest.mark.parametrize("limit", [0, 20, 64, 256, 1024, 20_000, 2**20])
def test_files_are_shared_out_within_the_limit(limit: int) -> None:
    shares = share_out(limit)
    assert 1 <= shares.maps <= MAX_MAPS
    assert 1 <= shares.connections <= MAX_CONNECTIONS
    if limit >= RESERVE + 2:
        assert shares.maps + shares.connections + RESERVE <= limit


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, kept[1]), kept[1]))
        assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(kept[1], 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)


def test_an_agent_with_few_files_serves_and_names_what_it_leaves_out(
    folder: Path, start_agent: Callable[..., Any], client_of: Callable[[Any], Any], wait_until: Callable[..., Any]
) -> None:
    """More maps and more idle connections than it may open files: it answers, and says so once."""
    spec = MapSpec(
        engine_id="e",
        kind="test",
        model="m",
        pool="kv",
        total_blocks=10,
        block_tokens=16,
        block_bytes=1024,
        dtype="float16",
        owner_slots=8,
        events_per_second=10,
    )
    writers = [MapWriter.create(replace(spec, engine_id=f"e{index:02}"), folder) for index in range(40)]
    agent = start_agent("--interval-seconds", "0.1", open_files=64)
    host, port = agent.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), 60) for _ in range(100)]
    try:
        client = client_of(agent)
        listed = wait_until(lambda: (found := client.engines()).engines and found)
        assert len(listed.engines) == share_out(64).maps
        assert len(listed.agent.unreadable) == 40 - share_out(64).maps
        assert all("ulimit -n" in line for line in listed.agent.unreadable)
        assert httpx.get(agent.url + "/healthz", timeout=60.0, trust_env=False).status_code == 200
    finally:
        for one in idle:
            one.close()
        for writer in writers:
            writer.close()
    assert agent.stop() == 0
    assert len(agent.lines) < 150
    assert not [line for line in agent.lines if line["level"] == "error"]
