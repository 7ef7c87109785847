"""What was recorded, run once more: exactly what the engine did, and other policies and pool sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cli import main
from agent.recording.chunks import ChunkFile, ChunkKind, ChunkWriter
from agent.recording.contents import decode_events, encode_events
from agent.recording.reading import Recording
from agent.recording.recorder import Recorder
from agent.recording.rerun import most_used_blocks, recorded_figures, rerun
from agent.sampling.model import Clock
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import EventKind
from engine_shim.simulator import PolicyResult
from tests.agent.recording.support import SteppingEngine

BLOCKS = 400
SECONDS = 30


@dataclass(frozen=True, slots=True)
class Case:
    """A recording that began after the engine had run so many steps under a policy."""

    path: Path
    policy: str


@pytest.fixture(
    scope="module", params=[("vllm", 0), ("vllm", 300), ("relocating", 300)], ids=["fresh", "later", "relocating"]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    policy, before = request.param
    folder = tmp_path_factory.mktemp("maps")
    engine = SteppingEngine(folder, blocks=BLOCKS, policy=policy, seed=3)
    reader = MapReader(engine.path)
    now = 2_000_000_000.0
    clock = Clock(lambda: now, lambda: now)
    recorder = Recorder(reader, ChunkWriter(folder / "engine.kvrec"), engine.id, 1.0, clock)
    try:
        engine.step(before, round((now - 100) * 1e9))
        recorder.begin()
        for _ in range(SECONDS):
            engine.step(20, round(now * 1e9))
            now += 1.0
            recorder.poll()
        recorder.end("the test has seen enough")
        recorder.writer.finish()
    finally:
        reader.close()
        engine.kill()
    return Case(folder / "engine.kvrec", policy)


@pytest.fixture
def recording(case: Case) -> Iterator[Recording]:
    opened = Recording(case.path)
    yield opened
    opened.close()


def figures(result: PolicyResult) -> tuple[int, int, int]:
    return result.prefix_hit_tokens, result.evictions, result.allocated_blocks


def test_the_recorded_policy_does_once_more_what_the_engine_did(case: Case, recording: Recording) -> None:
    """Hits, evictions and allocations, to the block; also where the recording begins in the middle."""
    recorded = recorded_figures(recording)
    report = rerun(recording, policies=(case.policy,))
    result = report.policies[case.policy]
    assert recorded.prefix_hit_tokens > 10_000
    assert recorded.evictions > 100
    assert figures(result) == (recorded.prefix_hit_tokens, recorded.evictions, recorded.allocated_blocks)
    assert result.prefix_query_tokens == recorded.prefix_query_tokens
    assert result.preemptions == 0
    assert (report.blocks, report.block_tokens, result.steps) == (BLOCKS, 16, 2 * SECONDS)


def test_relocating_has_the_hits_of_the_stock_order_and_less_fragmentation(recording: Recording) -> None:
    report = rerun(recording, policies=("vllm", "relocating", "lowest-any"))
    stock, relocating, lowest = report.policies.values()
    assert figures(relocating) == figures(stock)
    assert lowest.prefix_hit_tokens < stock.prefix_hit_tokens
    assert relocating.descriptors_per_block is not None
    assert stock.descriptors_per_block is not None
    assert relocating.descriptors_per_block < stock.descriptors_per_block
    assert relocating.settled_fragmentation_rate.p50 is not None
    assert stock.settled_fragmentation_rate.p50 is not None
    assert relocating.settled_fragmentation_rate.p50 < stock.settled_fragmentation_rate.p50


def test_a_smaller_pool_evicts_more_and_a_larger_one_less(recording: Recording) -> None:
    sizes = (most_used_blocks(recording), BLOCKS, 4 * BLOCKS)
    small, same, large = (rerun(recording, policies=("vllm",), blocks=size).policies["vllm"] for size in sizes)
    assert small.evictions > same.evictions > large.evictions
    assert small.prefix_hit_tokens < same.prefix_hit_tokens == large.prefix_hit_tokens
    tiny = rerun(recording, policies=("vllm",), blocks=20).policies["vllm"]
    assert tiny.preemptions
    assert tiny.prefix_hit_tokens < small.prefix_hit_tokens


def test_without_a_prefix_cache_nothing_is_found(recording: Recording) -> None:
    result = rerun(recording, policies=("vllm",), prefix_cache=False).policies["vllm"]
    assert (result.prefix_hit_tokens, result.evictions, result.prefix_query_tokens) == (0, 0, 0)


def test_a_hit_that_was_not_recorded_is_missed(case: Case, recording: Recording, tmp_path: Path) -> None:
    """The negative control of exactness: another sequence of events has other figures."""
    chunks, writer = ChunkFile(case.path), ChunkWriter(tmp_path / "other.kvrec")
    changed = 0
    for place in chunks.places():
        payload = chunks.read(place)
        if place.kind == ChunkKind.EVENTS and not changed:
            first, rows = decode_events(payload)
            hits = (rows["kind"] == EventKind.REUSE) | (rows["kind"] == EventKind.SHARE)
            changed = int(hits.sum())
            rows["kind"][hits] = EventKind.PIN
            payload = encode_events(first, rows)
        writer.append(ChunkKind(place.kind), place.time_ns, payload)
    writer.finish()
    chunks.close()
    assert changed
    other = Recording(tmp_path / "other.kvrec")
    result = rerun(other, policies=(case.policy,)).policies[case.policy]
    other.close()
    assert result.prefix_hit_tokens < recorded_figures(recording).prefix_hit_tokens


def test_the_command_has_the_keys_that_traces_have(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(case.path), "--json", "--policy", "vllm"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "kvatlas.simulate/v1"
    assert {"trace", "requests", "rejected_requests", "policies"} <= told.keys()
    wanted = {"fragmentation_rate", "live_share_mean", "prefix_query_tokens", "prefix_hit_tokens", "preemptions",
              "evictions", "copies_per_allocated_block", "descriptors_per_block"}  # fmt: skip
    assert wanted <= told["policies"]["vllm"].keys()
    assert told["recording"]["policy"] == case.policy
    assert told["recording"]["evictions"] == told["policies"]["vllm"]["evictions"]


def test_what_was_recorded_is_not_given_again(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--block-size", "--max-seqs", "--requests"):
        assert main(["simulate", str(case.path), flag, "7"]) == 2
        assert "are of traces" in capsys.readouterr().err
