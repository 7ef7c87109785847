"""Whatever lies in a file, comes over a socket or is scraped: it is read, or refused with an error of ours.

Each input begins as a real one that is damaged, or as text that looks like one. KVATLAS_FUZZ_EXAMPLES sets how many
are tried of each kind (tests/conftest.py); the default takes seconds, 20000 an hour.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.alerting.rule_files import load_rules
from agent.allocator.snapshot import read_snapshot
from agent.compaction.audit import Asker, AuditEntry, AuditLog, read_entries
from agent.compaction.driver import CompactionDriver
from agent.compaction.settings import DriverSettings
from agent.config import load_settings
from agent.engine_metrics.exposition import parse_exposition, parse_ollama
from agent.exporter import Exporter
from agent.fragmentation import analyze
from agent.history import MemoryHistory
from agent.sampling.model import EMPTY_VIEW, Clock
from agent.web.api import ApiContext, create_app
from agent.web.gate import Gate, GateLimits
from agent.web.security import WriteGuard
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.control.messages import (
    CompactRequest,
    RunReply,
    StatusRequest,
    encode_request,
    parse_reply,
    parse_request,
)
from engine_shim.errors import KvatlasError
from engine_shim.workload import load_workload
from tests.conftest import FUZZ_EXAMPLES

fuzzed = settings(max_examples=FUZZ_EXAMPLES or 100, derandomize=not FUZZ_EXAMPLES)
Edit = tuple[str, float, bytes]

# Where an edit begins, as a share of the input: the head of a file is what decides how the rest is read.
PLACES = st.one_of(st.floats(0, 1), st.floats(0, 0.02))
EDITS = st.lists(
    st.tuples(st.sampled_from(("write", "write", "insert", "cut", "end")), PLACES, st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def damaged(whole: bytes, edits: list[Edit]) -> bytes:
    """`whole` with each edit made in turn."""
    content = bytearray(whole)
    for kind, place, data in edits:
        start = int(place * len(content))
        if kind == "write":
            content[start : start + len(data)] = data
        elif kind == "insert":
            content[start:start] = data
        elif kind == "cut":
            del content[start : start + 8 * len(data)]
        else:
            del content[start:]
    return bytes(content)


def survives(read: Callable[[], Any]) -> bool:
    """Was it read? False where it was refused as ours refuse; any other exception is a failure."""
    try:
        read()
    except KvatlasError:
        return False
    return True


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def whole_map(folder: Path) -> bytes:
    """A map with blocks in every state, owners and events."""
    spec = MapSpec(
        engine_id="engine",
        kind="mine",
        model="org/model",
        pool="kv",
        total_blocks=300,
        block_tokens=16,
        block_bytes=4096,
        dtype="float16",
        owner_slots=16,
        events_per_second=100,
    )
    (folder / "made").mkdir()
    observer = MapObserver.create(spec, folder / "made")
    owner = observer.open_owner("request-1")
    observer.allocated(list(range(100)), owner)
    observer.cached(list(range(50, 80)))
    observer.step_ended(running=1, waiting=2)
    (path,) = (folder / "made").glob("*.kvmap")
    content = path.read_bytes()
    observer.close()
    return content


def read_map(path: Path) -> None:
    reader = MapReader(path, sleep=lambda seconds: None)
    try:
        snapshot = reader.read(timeout_seconds=0.001)
        report = analyze(snapshot.states)
        counted = report.free_blocks + report.cached_blocks + report.used_blocks + report.pinned_blocks
        assert counted + report.reserved_blocks + report.unknown_blocks == report.total_blocks == snapshot.states.size
        assert reader.identity.total_blocks == report.total_blocks
        reader.events(0)
        reader.writer_alive()
    finally:
        reader.close()


@fuzzed
@given(edits=EDITS)
def test_a_damaged_map(edits: list[Edit], whole_map: bytes, folder: Path) -> None:
    path = folder / "damaged.kvmap"
    path.write_bytes(damaged(whole_map, edits))
    survives(lambda: read_map(path))


def test_a_whole_map_is_read(whole_map: bytes, folder: Path) -> None:
    """The control of the one above: without damage it is no refusal that is seen."""
    path = folder / "whole.kvmap"
    path.write_bytes(whole_map)
    assert survives(lambda: read_map(path))
    path.write_bytes(whole_map[:1000])
    assert not survives(lambda: read_map(path))


# Over the control socket

REQUEST = encode_request(CompactRequest(target=0.1, max_moves=10, max_seconds=1.0))
REPLY = json.dumps({"schema": "kvatlas.control/v1", "reply": RunReply.kind, "decision": "compact"}).encode()


@fuzzed
@given(edits=EDITS)
def test_a_damaged_message(edits: list[Edit]) -> None:
    survives(lambda: parse_request(damaged(REQUEST, edits)))
    survives(lambda: parse_reply(damaged(REPLY, edits)))


@fuzzed
@given(message=JSON, fields=st.dictionaries(st.sampled_from(("target", "max_moves", "max_seconds", "on", "x")), JSON))
def test_a_message_with_anything_in_it(message: Any, fields: dict[str, Any]) -> None:
    for content in (message, {**json.loads(REQUEST), **fields}, {**json.loads(REPLY), **fields}):
        line = json.dumps(content).encode()
        survives(lambda line=line: parse_request(line))  # type: ignore[misc]
        survives(lambda line=line: parse_reply(line))  # type: ignore[misc]


def test_a_right_message_is_read() -> None:
    assert survives(lambda: parse_request(REQUEST))
    assert survives(lambda: parse_request(encode_request(StatusRequest())))


# Scrapes

EXPOSITION = b"""# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="300"} 1.0
"""
OLLAMA = b'{"models": [{"name": "m", "model": "m", "size": 100, "size_vram": 50, "context_length": 4096}]}'


@fuzzed
@given(edits=EDITS)
def test_a_damaged_scrape(edits: list[Edit]) -> None:
    survives(lambda: parse_exposition(damaged(EXPOSITION, edits).decode("utf-8", errors="replace")))
    survives(lambda: parse_ollama(damaged(OLLAMA, edits).decode("utf-8", errors="replace")))


@fuzzed
@given(content=JSON)
def test_a_scrape_with_anything_in_it(content: Any) -> None:
    survives(lambda: parse_ollama(json.dumps(content)))
    survives(lambda: parse_ollama(json.dumps({"models": [content]})))
    survives(lambda: parse_exposition(f"vllm:num_requests_running {json.dumps(content)}\n"))


def test_a_right_scrape_is_read() -> None:
    assert survives(lambda: parse_exposition(EXPOSITION.decode()))
    assert survives(lambda: parse_ollama(OLLAMA.decode()))


# Files

SEGMENT = {
    "device": 0,
    "address": 1 << 40,
    "total_size": 4 << 20,
    "allocated_size": 1 << 20,
    "active_size": 1 << 20,
    "requested_size": 1 << 20,
    "stream": 0,
    "segment_type": "large",
    "is_expandable": False,
    "segment_pool_id": (0, 0),
    "blocks": [
        {"address": 1 << 40, "size": 1 << 20, "requested_size": 1 << 20, "state": "active_allocated", "frames": []},
        {"address": (1 << 40) + (1 << 20), "size": 3 << 20, "requested_size": 0, "state": "inactive", "frames": []},
    ],
}
SNAPSHOT = {"segments": [SEGMENT], "device_traces": [], "allocator_settings": {}}
TRACE = b'{"arrival_s": 0.5, "prompt_tokens": 700, "output_tokens": 20, "hash_ids": [1, 2]}\n' * 3
RULES = b"""disable: [tail-waste]
rules:
  - name: queue-long
    number: engine_waiting_requests
    above: 100
    exit: 20
    for: 1m
    severity: warning
    summary: "{value} requests wait at {engine_id}"
    meaning: "The pool is {pool_used_ratio} full."
    action: "Send traffic elsewhere."
"""
SETTINGS = b"interval_seconds: 0.5\ncompaction: off\nlisten: 127.0.0.1:0\nstate_max_mib: 64\n"


def packed(content: bytes) -> bytes:
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as archive:
        archive.write(content)
    return file.getvalue()


FILES: dict[str, tuple[tuple[bytes, ...], Callable[[Path], Any]]] = {
    "snapshot": ((pickle.dumps(SNAPSHOT), pickle.dumps(SNAPSHOT, 0), json.dumps(SNAPSHOT).encode()), read_snapshot),
    "trace": ((TRACE, packed(TRACE), b"arrival_s,prompt_tokens,output_tokens\n0.5,3,4\n1.5,5,6\n"), load_workload),
    "rules": ((RULES,), load_rules),
    "settings": ((SETTINGS,), lambda path: load_settings({}, file=path, environment={})),
}


@pytest.mark.parametrize("kind", FILES)
@fuzzed
@given(edits=EDITS, which=st.integers(0, 2))
def test_a_damaged_file(kind: str, edits: list[Edit], which: int, folder: Path) -> None:
    wholes, read = FILES[kind]
    path = folder / kind
    path.write_bytes(damaged(wholes[which % len(wholes)], edits))
    survives(lambda: read(path))


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_is_read(kind: str, folder: Path) -> None:
    wholes, read = FILES[kind]
    for whole in wholes:
        path = folder / f"whole-{kind}"
        path.write_bytes(whole)
        assert survives(lambda path=path: read(path))  # type: ignore[misc]


@fuzzed
@given(content=JSON, key=st.sampled_from((*SEGMENT, "blocks")))
def test_a_snapshot_with_anything_in_it(content: Any, key: str, folder: Path) -> None:
    path = folder / "anything"
    for segment in ({**SEGMENT, key: content}, {**SEGMENT, "blocks": [{**SEGMENT["blocks"][0], key: content}]}):  # type: ignore[index]
        path.write_bytes(json.dumps({"segments": [segment]}).encode())
        survives(lambda: read_snapshot(path))


@fuzzed
@given(edits=EDITS)
def test_a_damaged_audit_log_costs_the_lines_that_are_damaged_and_no_more(edits: list[Edit], folder: Path) -> None:
    who = Asker(route="cli", access="local")
    entry = AuditEntry(time_unix=1.7e9, asker=who, action="compact", engine="e", outcome="compact", reason="asked")
    line = json.dumps(entry.to_json()).encode() + b"\n"
    path = folder / "audit.jsonl"
    path.write_bytes(line + damaged(line, edits) + b"\n" + line)
    found = list(read_entries(path))
    assert found.count(entry) >= 2
    log = AuditLog(path)
    assert log.record(entry)
    log.close()


# Over HTTP

SEGMENTS = st.sampled_from(
    ("v1", "engines", "engine.dp0.tp0.pp0.kv", "map", "blocks", "requests", "history", "frames", "marks", "compaction",
     "compactions", "devices", "alerts", "mutes", "plan", "advice", "metrics", "docs", "..", "%00", "%2e%2e", "")
)  # fmt: skip
QUERIES = st.dictionaries(
    st.sampled_from(
        ("cells", "start", "count", "limit", "metric", "from", "to", "step", "at", "plan", "target", "engine")
    ),
    st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str)),
    max_size=4,
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    guard = WriteGuard(token="right", listens_on_loopback=False)
    context = ApiContext(
        view=lambda: EMPTY_VIEW,
        exporter=Exporter(lambda: EMPTY_VIEW, clock=Clock()),
        history=MemoryHistory(),
        guard=guard,
        gate=Gate(guard, limits=GateLimits(changes_burst=10**9, refusals_burst=10**9)),
        compaction=CompactionDriver(DriverSettings(), AuditLog(None)),
        version="0",
        interval_seconds=1.0,
        threshold=0.3,
        started_unix=0.0,
    )
    return TestClient(create_app(context), raise_server_exceptions=True)


@fuzzed
@given(
    method=st.sampled_from(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")),
    path=st.lists(SEGMENTS, min_size=1, max_size=5),
    query=QUERIES,
    body=st.one_of(st.binary(max_size=40), JSON.map(lambda one: json.dumps(one).encode())),
    token=st.sampled_from(("", "Bearer right", "Bearer wrong", "Bearer \u00fc", "Basic right")),
)
def test_no_request_is_a_fault_of_ours(
    client: TestClient, method: str, path: list[str], query: dict[str, str], body: bytes, token: str
) -> None:
    """503 is of a part that is not ready; anything else from 500 on would be a fault that was not foreseen."""
    headers = {"content-type": "application/json", **({"authorization": token.encode("latin-1")} if token else {})}
    reply = client.request(method, "http://agent/" + "/".join(path), params=query, content=body, headers=headers)
    assert reply.status_code < 500 or reply.status_code == 503, reply.text
    if method in ("POST", "PUT", "DELETE") and token != "Bearer right":
        assert reply.status_code == 401
