"""Relocation in the engine: its copies are made in one batch before the forward pass, and nothing else shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine_identity import POLICIES, difference
from benchmarks.engine_identity import serve as serve_recorded
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import SettingsError
from engine_shim.reference.build import EngineSettings, arrivals, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.engine import Engine
from engine_shim.reference.sequence import Sequence as Served
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest, Workload, load_workload

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]
Copies = Sequence[tuple[int, int]]
MODEL: dict[str, Any] = {"content": "model", "dtype": "float32", "blocks": 170}


@pytest.fixture
def returning() -> list[TraceRequest]:
    """Four long prompts that come back again and again, between others of their own: hits far up in the pool."""
    requests = []
    for index in range(40):
        again = index % 2 == 0
        prompt = 512 if again else 90 + 16 * (index % 5)
        hash_ids = (index // 2 % 4,) if again else (1000 + index,)
        requests.append(TraceRequest(index, 0.4 * index, prompt, 6 + index % 7, hash_ids))
    return requests


def seen(engine: Engine) -> tuple[int, ...]:
    """What must not depend on where blocks lie."""
    report = engine.report()
    return (report.served_requests, report.preemptions, report.prefix_query_tokens, report.prefix_hit_tokens,
            report.computed_tokens, report.output_tokens, report.steps)  # fmt: skip


@pytest.mark.parametrize("blocks", [64, 150])
def test_contents_hold_and_hits_are_stocks(
    make_engine: EngineMaker, serve: Server, crowd: list[TraceRequest], returning: list[TraceRequest], blocks: int
) -> None:
    for requests, samples in ((crowd, 2), (returning, 1)):
        engines = [
            make_engine(policy=policy, blocks=blocks, headroom=0.0, verify_every=1, samples=samples)
            for policy in ("vllm", "relocating")
        ]
        for engine in engines:
            serve(engine, requests, samples=samples)
            assert engine.verify_all() == []
            assert engine.report().mismatched_blocks == 0
        stock, relocating = engines
        assert seen(relocating) == seen(stock)
        assert relocating.report().relocation_copies > 50
        assert stock.report().relocation_copies == 0


def test_a_step_makes_its_copies_in_one_batch_before_it_computes(
    make_engine: EngineMaker, serve: Server, returning: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy="relocating", blocks=80, headroom=0.0)
    happened: list[str] = []
    copy, run = engine.cache.copy_blocks, engine.runner.run

    def copy_blocks(copies: Copies) -> None:
        happened.append("copy")
        copy(copies)

    def compute(batch: Any) -> Any:
        happened.append("compute")
        return run(batch)

    monkeypatch.setattr(engine.cache, "copy_blocks", copy_blocks)
    monkeypatch.setattr(engine.runner, "run", compute)
    serve(engine, returning)
    assert happened.count("copy") > 10
    assert all(b == "compute" for a, b in zip(happened, [*happened[1:], ""], strict=True) if a == "copy")


def test_left_out_copies_are_seen_in_the_contents(
    make_engine: EngineMaker, serve: Server, returning: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(policy="relocating", blocks=80, headroom=0.0, verify_every=1)
    copy = engine.cache.copy_blocks
    left_out: list[Copies] = []

    def leave_one_out(copies: Copies) -> None:
        if not left_out:
            left_out.append(copies[:1])
            copies = copies[1:]
        copy(copies)

    monkeypatch.setattr(engine.cache, "copy_blocks", leave_one_out)
    serve(engine, returning)
    assert len(left_out) == 1
    assert engine.report().mismatched_blocks > 0


def tokens_of(engine: Engine, requests: list[TraceRequest], before_step: Callable[[int], None]) -> list[list[int]]:
    """Serve the requests a few at a time; their output tokens."""
    queued: list[Served] = []
    feed = iter(requests)
    step = 0
    while True:
        if step % 3 == 0 and (request := next(feed, None)) is not None:
            queued.append(sequence_of(request, 16, vocabulary=engine.cache.geometry.vocabulary))
            assert engine.submit(queued[-1])
        before_step(step)
        if not engine.step() and len(queued) == len(requests):
            return [sequence.tokens[sequence.prompt_tokens :].tolist() for sequence in queued]
        step += 1


def test_the_model_says_the_same_and_another_thing_without_the_copies(
    make_engine: EngineMaker, returning: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = returning[:20]
    stock, relocating, broken = (
        make_engine(**MODEL, headroom=0.0, policy=policy) for policy in ("vllm", "relocating", "relocating")
    )
    monkeypatch.setattr(broken.cache, "copy_blocks", lambda copies: None)
    said = [tokens_of(engine, requests, lambda step: None) for engine in (stock, relocating, broken)]
    assert relocating.report().relocation_copies > 30
    assert relocating.report().prefix_hit_tokens == stock.report().prefix_hit_tokens > 0
    assert said[1] == said[0]
    assert said[2] != said[0]


def test_switched_at_run_time_nothing_changes_but_the_places(
    make_engine: EngineMaker, serve: Server, returning: list[TraceRequest]
) -> None:
    stock = make_engine(blocks=80, headroom=0.0)
    serve(stock, returning)
    switched = make_engine(blocks=80, headroom=0.0, verify_every=1)
    step = switched.step

    def switch_and_step() -> bool:
        if switched.report().steps % 5 == 0:
            switched.set_policy("relocating" if switched.pool.policy == "vllm" else "vllm")
        return step()

    switched.step = switch_and_step  # type: ignore[method-assign]
    serve(switched, returning)
    assert seen(switched) == seen(stock)
    assert switched.verify_all() == []
    assert switched.report().mismatched_blocks == 0
    assert switched.report().relocation_copies > 20


@pytest.mark.parametrize("most", [0, 3])
def test_a_step_copies_no_more_than_its_budget(
    make_engine: EngineMaker, serve: Server, returning: list[TraceRequest], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    stock = make_engine(blocks=80, headroom=0.0)
    serve(stock, returning)
    engine = make_engine(
        policy="relocating", blocks=80, headroom=0.0, verify_every=1, relocation_bytes=most * stock.cache.block_bytes
    )
    sizes: list[int] = []
    copy = engine.cache.copy_blocks

    def measured(copies: Copies) -> None:
        sizes.append(len(copies))
        copy(copies)

    monkeypatch.setattr(engine.cache, "copy_blocks", measured)
    serve(engine, returning)
    assert max(sizes, default=0) == most
    assert seen(engine) == seen(stock)
    assert engine.verify_all() == []
    with pytest.raises(SettingsError, match="relocation_bytes=-1"):
        make_engine(relocation_bytes=-1)


@pytest.mark.parametrize(
    ("trace", "blocks", "seconds"), [("mooncake-conversation", 30_000, 25.0), ("azure-conv", 5_000, 60.0)]
)
def test_recorded_traffic_is_served_as_stock_serves_it(trace: str, blocks: int, seconds: float) -> None:
    """Request by request the same hits, and the same evictions in order; the benchmark does it with whole traces."""
    workload = load_workload(trace)
    stock, relocating = (serve_recorded(workload, blocks, policy, seconds=seconds) for policy in POLICIES)
    assert difference(stock, relocating) == ""
    assert len(stock.admissions) > 50
    assert stock.last[0] > 500
    same = ("served", "rejected", "preemptions", "hit_share", "live_share_p50")
    assert [stock.facts[name] for name in same] == [relocating.facts[name] for name in same]
    assert relocating.facts["relocation_copies"] > 500
    for served in (stock, relocating):
        assert served.facts["verified_tokens"] > 10_000
        assert served.facts["mismatched_blocks"] == 0
    assert relocating.facts["fragmentation_p50"] < stock.facts["fragmentation_p50"]


def test_another_policy_is_told_apart_in_the_engine() -> None:
    """The negative control: one that hands out the same addresses, and evicts otherwise."""
    workload = load_workload("mooncake-conversation")
    stock, other = (serve_recorded(workload, 30_000, policy, seconds=20.0) for policy in ("vllm", "lowest-any"))
    assert difference(stock, other).startswith("admission ")


def test_the_map_says_which_policy_places(tmp_path: Path) -> None:
    engine, observer = build_engine(
        EngineSettings(engine_id="map", blocks=64, model_geometry="test-tiny", device="cpu", policy="relocating"),
        VirtualClock(),
        map_folder=tmp_path,
    )
    assert isinstance(observer, MapObserver)
    assert observer.path is not None
    reader = MapReader(observer.path)
    said = []
    for policy in ("relocating", "vllm", "relocating"):
        engine.set_policy(policy)
        engine.step()
        snapshot = reader.read()
        said.append((snapshot.identity.policy, snapshot.flags.relocating))
    reader.close()
    engine.close()
    observer.close()
    assert said == [("relocating", True), ("vllm", False), ("relocating", True)]


def test_the_map_follows_relocations(tmp_path: Path, returning: list[TraceRequest]) -> None:
    """Swaps of two cached blocks as well; the counter is that of the pool."""
    settings = EngineSettings(
        engine_id="map", blocks=150, headroom=0.0, model_geometry="test-tiny", device="cpu", policy="relocating"
    )
    engine, observer = build_engine(settings, VirtualClock(), map_folder=tmp_path)
    assert isinstance(observer, MapObserver)
    assert observer.path is not None
    reader = MapReader(observer.path)
    step = engine.step

    def compared() -> bool:
        worked = step()
        assert observer.reason == ""
        assert np.array_equal(reader.read().states, engine.pool.states())
        return worked

    engine.step = compared  # type: ignore[method-assign]
    exchanges: list[int] = []
    counted = observer.counted

    def count(name: str, amount: int = 1) -> None:
        if name == "relocation_copies":
            exchanges.append(amount)
        counted(name, amount)

    observer.counted = count  # type: ignore[method-assign]
    engine.serve(arrivals(Workload("test", tuple(returning), 0), settings), settings.pace, until_idle=True)
    snapshot = reader.read()
    reader.close()
    engine.close()
    observer.close()
    assert sum(exchanges) > 10
    assert snapshot.counters["relocation_copies"] == engine.pool.relocation_copies > 50
    assert snapshot.counters["relocation_bytes"] == engine.pool.relocation_copies * engine.cache.block_bytes
