"""Scheduling: order, budget, headroom, preemption, rejection; and what observers are told is what the pool holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import SettingsError
from engine_shim.layout import BlockState
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.sequence import Sequence, Status, sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]


def queue(engine: Engine, *requests: TraceRequest) -> list[Sequence]:
    sequences = [sequence_of(request, 16) for request in requests]
    assert all(engine.submit(sequence) for sequence in sequences)
    return sequences


def test_prompts_are_cut_to_the_step_budget(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=128, limits=Limits(8, 100))
    first, second = queue(engine, TraceRequest(0, 0.0, 250, 5), TraceRequest(1, 0.0, 60, 5))
    computed = []
    for _ in range(4):
        engine.step()
        computed.append((first.computed, second.computed))
    assert computed == [(100, 0), (200, 0), (250, 50), (251, 60)]


def test_a_running_sequence_decodes_one_token_a_step(make_engine: EngineMaker) -> None:
    engine = make_engine()
    (sequence,) = queue(engine, TraceRequest(0, 0.0, 20, 10))
    lengths = []
    while engine.scheduler.has_work:
        engine.step()
        lengths.append(sequence.length)
    assert lengths == list(range(21, 31))
    assert sequence.status is Status.FINISHED
    assert engine.report().computed_tokens == 29  # the last token's keys and values are never needed


def test_new_sequences_leave_the_headroom_and_running_ones_take_it(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=41, headroom=0.25, prefix_cache=False)  # 40 usable, 10 held back
    first, second, third = queue(
        engine, TraceRequest(0, 0.0, 240, 90), TraceRequest(1, 0.0, 240, 90), TraceRequest(2, 0.0, 16, 2)
    )
    engine.step()
    assert (first.status, second.status, third.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    assert engine.pool.num_used == 30
    for _ in range(60):
        engine.step()
    assert engine.pool.num_used > 30
    assert third.status is Status.WAITING


def test_a_refused_admission_is_counted_once_a_step(
    make_engine: EngineMaker, state_observer: Callable[[int], Any]
) -> None:
    observer = state_observer(41)
    engine = make_engine(blocks=41, headroom=0.25, prefix_cache=False, observer=observer)
    queue(engine, TraceRequest(0, 0.0, 240, 90))
    engine.step()
    assert "allocation_failures" not in observer.counts
    queue(engine, TraceRequest(1, 0.0, 320, 2), TraceRequest(2, 0.0, 320, 2))
    for step in (1, 2, 3):
        engine.step()
        assert observer.counts["allocation_failures"] == step


def test_the_latest_arrival_is_preempted_and_computed_anew(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=21, headroom=0.0, prefix_cache=False)  # 20 usable
    first, second = queue(engine, TraceRequest(0, 0.0, 150, 60), TraceRequest(1, 0.0, 150, 60))
    while second.status is not Status.WAITING or not second.preemptions:
        engine.step()
    known = second.tokens[: second.length].copy()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert not second.table
    assert second.computed == 0
    while engine.scheduler.has_work:
        engine.step()
    assert (second.tokens[: len(known)] == known).all()
    report = engine.report()
    assert (report.served_requests, report.preemptions) == (2, 1)
    assert engine.pool.num_free == 20


def test_a_prefix_is_computed_once(make_engine: EngineMaker) -> None:
    engine = make_engine(blocks=128)
    (first,) = queue(engine, TraceRequest(0, 0.0, 600, 3, (4, 5)))
    engine.step()
    (second,) = queue(engine, TraceRequest(1, 0.0, 700, 3, (4, 6)))
    engine.step()
    assert second.table[:32] == first.table[:32]
    assert not set(second.table[32:]) & set(first.table)
    report = engine.report()
    assert (report.prefix_query_tokens, report.prefix_hit_tokens) == (1300, 512)
    assert report.computed_tokens == 600 + 1 + (700 - 512)


def test_a_whole_hit_still_computes_its_last_block(make_engine: EngineMaker) -> None:
    """The last known token must be computed, or there is no next one."""
    engine = make_engine(blocks=128)
    (first,) = queue(engine, TraceRequest(0, 0.0, 512, 3, (4,)))
    engine.step()
    (second,) = queue(engine, TraceRequest(1, 0.0, 512, 3, (4,)))
    engine.step()
    assert second.table[:31] == first.table[:31]
    assert second.table[31] != first.table[31]
    assert second.length == 513


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (TraceRequest(0, 0.0, 100, 2000), "2100 tokens need 132 blocks; the pool has 63"),
        (TraceRequest(0, 0.0, 950, 2), "a prompt of 950 tokens needs 60 blocks; new sequences may take 57"),
    ],
)
def test_what_never_fits_is_rejected_with_the_reason(
    make_engine: EngineMaker, request_: TraceRequest, reason: str
) -> None:
    engine = make_engine()
    sequence = sequence_of(request_, 16)
    assert engine.scheduler.refusal(sequence) == reason
    assert not engine.submit(sequence)
    assert engine.report().rejected_requests == 1
    assert not engine.scheduler.has_work


def test_observers_see_all_five_states_as_the_pool_has_them(
    make_engine: EngineMaker, crowd: list[TraceRequest], state_observer: Callable[[int], Any], tmp_path: Path
) -> None:
    observer = state_observer(64)
    engine = make_engine(observer=observer, samples=2, transfer_folder=tmp_path, transfer_every=2)
    for request in crowd:
        assert engine.submit(sequence_of(request, 16, samples=2))
    while engine.scheduler.has_work:
        engine.step()
        assert observer.states == engine.pool.states().tolist()
    assert observer.seen == set(BlockState)
    report = engine.report()
    assert observer.tokens == report.computed_tokens
    assert observer.counts["preemptions"] == report.preemptions > 0
    assert observer.counts["prefix_hit_tokens"] == report.prefix_hit_tokens > 0
    assert observer.counts["prefix_query_tokens"] == report.prefix_query_tokens
    assert observer.counts["copy_on_write"] > 0
    assert observer.counts["allocation_failures"] > 0
    engine.close()
    assert observer.live_owners == set()
    assert set(observer.states) == {BlockState.FREE, BlockState.CACHED, BlockState.RESERVED}


def test_references_equal_what_tables_hold(make_engine: EngineMaker, crowd: list[TraceRequest]) -> None:
    engine = make_engine(samples=2)
    for request in crowd:
        assert engine.submit(sequence_of(request, 16, samples=2))
    while engine.scheduler.has_work:
        engine.step()
        held: dict[int, int] = {}
        for sequence in engine.scheduler.running:
            for block in sequence.table:
                held[block] = held.get(block, 0) + 1
        assert held == {block: engine.pool.references(block) for block in held}
        assert len(held) == engine.pool.num_used


def test_a_trace_is_served_in_its_own_time(make_engine: EngineMaker, serve: Server) -> None:
    """Decoding at 30 tokens/s: 61 output tokens take about two seconds of trace time, whatever the computer does."""
    engine = make_engine()
    serve(engine, [TraceRequest(0, 0.0, 20, 61), TraceRequest(1, 10.0, 20, 61)])
    report = engine.report()
    assert report.served_requests == 2
    assert report.seconds == pytest.approx(12.0, abs=0.4)


def test_an_idle_engine_still_ends_steps(make_engine: EngineMaker, state_observer: Callable[[int], Any]) -> None:
    observer = state_observer(64)
    engine = make_engine(observer=observer)
    turns = iter(range(10))
    engine.serve(iter(()), Pace(), stop=lambda: next(turns, None) is None)
    assert observer.steps == 10
    assert engine.report().seconds == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 1}, "block 0 is reserved"),
        ({"content": "noise"}, "use pattern or model"),
        ({"samples": 0}, "samples=0"),
        ({"headroom": float("nan")}, "headroom=nan"),
        ({"seed": 10**23}, "below 2"),
        ({"seed": -1}, "seed=-1"),
        ({"blocks": 10**12}, "blocks=1000000000000: a pool has at most"),
        ({"transfer_every": 0}, "transfer_every=0"),
        ({"content": "model", "verify_every": 1}, "in pattern mode only"),
        ({"policy": "best"}, "no allocation policy is named 'best'"),
        ({"transfer_peer": "nowhere"}, "neither host:port nor unix:/path"),
    ],
)
def test_wrong_settings_are_named(make_engine: EngineMaker, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_engine(**settings)


def test_a_wrong_pace_is_named() -> None:
    with pytest.raises(SettingsError, match="speed=0"):
        Pace(speed=0)
    with pytest.raises(SettingsError, match="tokens_per_second=-1"):
        Pace(tokens_per_second=-1)
    with pytest.raises(SettingsError, match="speed=1e-320"):
        Pace(speed=1e-320)
    with pytest.raises(SettingsError, match="tokens_per_second=1e-320"):
        Pace(tokens_per_second=1e-320)
    assert Pace(tokens_per_second=0).step_seconds == 0
    with pytest.raises(SettingsError, match="step_tokens=0"):
        Limits(step_tokens=0)


def test_a_request_that_waits_takes_no_slot_of_the_owners(
    make_engine: EngineMaker, state_observer: Callable[[int], Any]
) -> None:
    """The map's table is of those that hold blocks: a long queue must not leave the running ones without a name."""
    observer = state_observer(64)
    engine = make_engine(observer=observer, limits=Limits(2, 8192))
    sequences = queue(engine, *(TraceRequest(index, 0.0, 20, 10) for index in range(50)))
    assert observer.live_owners == set()
    engine.step()
    running = [one for one in sequences if one.status is Status.RUNNING]
    assert len(running) == 2
    assert {one.owner for one in running} == observer.live_owners
    assert {one.owner for one in sequences} - observer.live_owners == {0}


@pytest.mark.parametrize("settings", [{"policy": "best"}, {"transfer_peer": "nowhere"}, {"relocation_bytes": -1}])
def test_an_engine_that_could_not_start_leaves_no_map(tmp_path: Path, settings: dict[str, Any]) -> None:
    wanted = EngineSettings(engine_id="test", blocks=64, model_geometry="test-tiny", device="cpu", **settings)
    with pytest.raises(SettingsError):
        build_engine(wanted, VirtualClock(), map_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("handed", [True, False], ids=["handed over", "control"])
def test_a_shared_block_names_a_sequence_that_runs(
    tmp_path: Path, crowd: list[TraceRequest], monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    if not handed:
        monkeypatch.setattr(MapObserver, "held_by", lambda *_: None)
    settings = EngineSettings(engine_id="test", blocks=64, model_geometry="test-tiny", device="cpu", samples=2)
    engine, observer = build_engine(settings, VirtualClock(), map_folder=tmp_path)
    assert isinstance(observer, MapObserver)
    assert observer.path is not None
    astray = 0
    reader = MapReader(observer.path)
    for request in crowd:
        assert engine.submit(sequence_of(request, 16, samples=2))
    while engine.scheduler.has_work:
        engine.step()
        snapshot = reader.read()
        assert snapshot.owner is not None
        assert snapshot.position is not None
        tables = {one.owner: one.table for one in engine.scheduler.running}
        for block in {block for table in tables.values() for block in table}:
            table, place = tables.get(int(snapshot.owner[block])), int(snapshot.position[block])
            astray += table is None or table[place] != block
    reader.close()
    engine.close()
    observer.close()
    assert (astray == 0) == handed
