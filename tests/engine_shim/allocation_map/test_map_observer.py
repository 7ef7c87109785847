"""The observer against a plain model, and what happens when it, or its caller, is at fault."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_shim import BlockState, MapObserver, MapReader, MapSpec
from engine_shim.allocation_map.map_observer import MAX_ENTRIES
from engine_shim.allocation_map.sequence import Compiler, look_over
from engine_shim.errors import MapUnavailable
from engine_shim.layout import OPTIONAL_COLUMNS, EventKind
from engine_shim.snapshot import MapSnapshot

BLOCKS = 12
FREE, CACHED, USED, PINNED, RESERVED = BlockState


def spec(**changes: object) -> MapSpec:
    facts: dict[str, object] = {
        "engine_id": "test",
        "kind": "reference",
        "model": "tiny",
        "pool": "kv",
        "total_blocks": BLOCKS,
        "block_tokens": 16,
        "block_bytes": 1024,
        "dtype": "float16",
        "owner_slots": 8,
        "events_per_second": 1000,
    }
    return MapSpec(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[MapObserver]:
    made = MapObserver.create(spec(), tmp_path)
    yield made
    made.close()


def read(observer: MapObserver) -> MapSnapshot:
    assert observer.path is not None, observer.reason
    reader = MapReader(observer.path)
    try:
        return reader.read()
    finally:
        reader.close()


@dataclass
class Plain:
    """A pool of blocks, told one at a time."""

    state: list[int] = field(default_factory=lambda: [int(FREE)] * BLOCKS)
    references: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    tokens: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    owner: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    position: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    counts: dict[str, int] = field(default_factory=dict)

    def set(self, block: int, state: int, references: int, owner: int) -> None:
        self.state[block], self.references[block], self.owner[block] = state, references, owner

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "release", "share", "reuse", "evict", "write", "pin", "unpin", "move", "publish"]),
        st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5, unique=True),
        st.integers(0, 3),
    ),
    max_size=40,
)


def play(observer: MapObserver, model: Plain, steps: list[tuple[str, list[int], int]], owners: list[int]) -> None:
    """Do what is possible of each step, to both."""
    for name, blocks, number in steps:
        owner = owners[number]
        inside = {state: [b for b in blocks if model.state[b] == state] for state in BlockState}
        if name == "allocate" and (free := inside[FREE]):
            observer.allocated(free, owner, number)
            for index, block in enumerate(free):
                model.set(block, USED, 1, owner)
                model.tokens[block], model.position[block] = 0, number + index
            model.count("blocks_allocated", len(free))
        elif name == "reuse" and (cached := inside[CACHED]):
            observer.reused(cached, owner, number)
            for index, block in enumerate(cached):
                model.set(block, USED, 1, owner)
                model.position[block] = number + index
            model.count("blocks_reused", len(cached))
        elif name == "share" and (used := inside[USED]):
            observer.shared(used, owner)
            for block in used:
                model.references[block] += 1
        elif name == "release" and (used := inside[USED]):
            many = [b for b in used if model.references[b] > 1]
            last = [b for b in used if model.references[b] == 1]
            if many:
                observer.unshared(many, owner)
                for block in many:
                    model.references[block] -= 1
            if last:
                (observer.cached if number % 2 else observer.freed)(last, owner)
                for block in last:
                    model.set(block, CACHED if number % 2 else FREE, 0, 0)
                    if not number % 2:
                        model.tokens[block] = 0
                model.count("blocks_freed", len(last))
        elif name == "evict" and (cached := inside[CACHED]):
            observer.evicted(cached)
            for block in cached:
                model.set(block, FREE, 0, 0)
                model.tokens[block] = 0
            model.count("blocks_evicted", len(cached))
        elif name == "write" and (used := inside[USED]):
            observer.wrote(used, [number + 1] * len(used), len(used))
            for block in used:
                model.tokens[block] = number + 1
            model.count("tokens_written", len(used))
        elif name == "pin" and (used := inside[USED]):
            observer.pinned(used)
            for block in used:
                model.state[block] = PINNED
        elif name == "unpin" and (pinned := inside[PINNED]):
            observer.unpinned(pinned, cached=False)
            for block in pinned:
                model.state[block] = USED
        elif name == "move" and inside[USED] + inside[CACHED]:
            free = [block for block in range(BLOCKS) if model.state[block] == FREE]
            pairs = list(zip(inside[USED] or inside[CACHED], free, strict=False))
            live = bool(inside[USED])
            observer.moved([s for s, _ in pairs], [d for _, d in pairs], live=live)
            for source, destination in pairs:
                for column in (model.state, model.references, model.tokens, model.owner, model.position):
                    column[destination], column[source] = column[source], 0
            model.count("live_moves" if live else "relocation_copies", len(pairs))
        elif name == "publish":
            observer.step_ended(number, 0)


def replayed_states(observer: MapObserver) -> list[int]:
    """The states that the event ring alone tells."""
    assert observer.path is not None
    reader = MapReader(observer.path)
    events = reader.events(0)
    reader.close()
    assert events.missed == 0
    state = [int(FREE)] * BLOCKS
    after = {
        EventKind.ALLOCATE: USED,
        EventKind.FREE: FREE,
        EventKind.CACHE: CACHED,
        EventKind.EVICT: FREE,
        EventKind.REUSE: USED,
        EventKind.PIN: PINNED,
        EventKind.RESERVE: RESERVED,
    }
    for event in events.events:
        kind = EventKind(int(event["kind"]))
        step = -1 if event["descending"] else 1
        for block in range(int(event["block"]), int(event["block"]) + step * int(event["count"]), step):
            if kind in after:
                state[block] = after[kind]
            elif kind is EventKind.UNPIN:
                state[block] = int(event["other"])
            elif kind in (EventKind.MOVE, EventKind.RELOCATE):
                state[block], state[int(event["other"])] = state[int(event["other"])], int(FREE)
    return state


def as_it_is(function: object) -> object:
    """A compiler that leaves the code that is to be compiled as it is."""
    return function


@pytest.mark.parametrize("one_by_one", [False, True], ids=["in bulk", "block by block"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_the_map_says_what_a_plain_model_says(
    tmp_path: Path, one_by_one: bool, steps: list[tuple[str, list[int], int]]
) -> None:
    observer = MapObserver.create(spec(), tmp_path)
    if one_by_one:
        assert observer.compile(as_it_is) == ""
    try:
        owners = [observer.open_owner(f"request-{number}") for number in range(4)]
        model = Plain()
        play(observer, model, steps, owners)
        observer.step_ended(0, 0)
        assert observer.reason == ""
        snapshot = read(observer)
        assert snapshot.states.tolist() == model.state
        assert snapshot.state_counts[:5] == tuple(model.state.count(state) for state in BlockState)
        assert sum(snapshot.state_counts) == BLOCKS
        assert snapshot.references is not None
        assert snapshot.references.tolist() == model.references
        assert snapshot.tokens is not None
        assert snapshot.tokens.tolist() == model.tokens
        assert snapshot.owner is not None
        assert snapshot.owner.tolist() == model.owner
        held = [block for block in range(BLOCKS) if model.state[block] in (USED, PINNED)]
        assert snapshot.position is not None
        assert [int(snapshot.position[b]) for b in held] == [model.position[b] for b in held]
        for name, count in model.counts.items():
            assert snapshot.counters[name] == count, name
        assert replayed_states(observer) == model.state
    finally:
        observer.close()


def told(observer: MapObserver) -> dict[str, object]:
    """All that a map says and a reader may rely on."""
    snapshot = read(observer)
    assert snapshot.owner is not None
    assert snapshot.position is not None
    assert observer.path is not None
    reader = MapReader(observer.path)
    events = reader.events(0)
    reader.close()
    happened = []
    for event in events.events:
        step = -1 if event["descending"] else 1
        same = [int(event[name]) for name in ("kind", "owner", "other", "time_ns")]
        happened += [
            (*same, int(event["block"]) + step * i, int(event["position"]) + i) for i in range(int(event["count"]))
        ]
    columns = {name: column.tolist() for name, column in observer.columns.items() if name != "position"}
    return {
        **columns,
        "position": np.where(snapshot.owner != 0, snapshot.position, 0).tolist(),
        "counts": snapshot.state_counts,
        "counters": {name: value for name, value in snapshot.counters.items() if name != "shim_cpu_ns"},
        "histograms": snapshot.histograms,
        "owners": snapshot.owners,
        "events": happened,
    }


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS, ticks=st.lists(st.integers(-(10**9), 10**11), min_size=40, max_size=40))
def test_block_by_block_a_step_is_stored_as_in_bulk(
    tmp_path: Path, steps: list[tuple[str, list[int], int]], ticks: list[int]
) -> None:
    """Whatever happens, and also where the clock goes backwards."""

    def play_with(name: str, compiler: Compiler | None) -> dict[str, object]:
        clock = [1_700_000_000_000_000_000]
        observer = MapObserver.create(spec(engine_id=name), tmp_path, clock_ns=lambda: clock[0])
        try:
            if compiler is not None:
                assert observer.compile(compiler) == ""
            owners = [observer.open_owner(f"request-{number}") for number in range(4)]
            model = Plain()
            for step, tick in zip(steps, ticks, strict=False):
                clock[0] += tick
                play(observer, model, [step], owners)
            observer.close_owner(owners[3])
            observer.step_ended(1, 2)
            assert observer.reason == ""
            return told(observer)
        finally:
            observer.close()

    def without_storing(function: Any) -> Any:
        return function if function is look_over else lambda *arguments: None

    in_bulk = play_with("bulk", None)
    assert play_with("sequence", as_it_is) == in_bulk
    if in_bulk["events"] and not any(name == "move" for name, *_ in steps):
        assert play_with("nothing", without_storing) != in_bulk


def test_a_compiler_that_fails_changes_nothing(observer: MapObserver, tmp_path: Path) -> None:
    def failing(function: object) -> object:
        raise RuntimeError("no such machine\nmore of it")

    def wrong(function: object) -> object:
        return lambda *arguments: 7

    assert observer.compile(failing) == "RuntimeError: no such machine"
    assert observer.compile(wrong) == "ValueError: compiled, an empty step is not empty"
    observer.allocated([1, 2])
    observer.step_ended(1, 0)
    assert read(observer).state_counts[USED] == 2
    narrow = MapObserver.create(spec(engine_id="narrow", columns=("state", "owner")), tmp_path)
    assert "the map has no references" in narrow.compile(as_it_is)
    narrow.close()
    assert narrow.compile(as_it_is) == "nothing is published"


def test_an_open_journal_is_named_in_order_and_emptied_where_nothing_is_published(observer: MapObserver) -> None:
    @dataclass
    class Block:
        block_id: int

    journal = observer.open_journal()
    journal.heads.extend((journal.clock_ns(), 2, 0, int(EventKind.ALLOCATE)))
    journal.unnamed.extend([Block(3), Block(5)])
    observer.freed([5])
    journal.heads.extend((journal.clock_ns(), 1, 0, int(EventKind.ALLOCATE)))
    journal.unnamed.append(Block(7))
    journal.full()
    assert [b for b in range(BLOCKS) if read(observer).states[b] == USED] == [3, 7]
    observer.turn_off("a test")
    journal.heads.extend((journal.clock_ns(), 1, 0, int(EventKind.ALLOCATE)))
    journal.unnamed.append(Block(8))
    journal.full()
    assert not journal.heads
    assert not journal.unnamed


def test_nothing_is_visible_before_the_step_ends(observer: MapObserver) -> None:
    observer.allocated([1, 2])
    assert read(observer).state_counts[USED] == 0
    observer.step_ended(1, 0)
    assert read(observer).state_counts[USED] == 2


def test_owners_come_with_their_blocks_and_tokens_and_go(observer: MapObserver) -> None:
    owner = observer.open_owner("request-1", lora="adapter", cache_salt="tenant")
    observer.allocated([1, 2, 3], owner)
    observer.progressed([owner], [40])
    observer.step_ended(1, 0)
    (entry,) = read(observer).owners
    assert (entry.request_id, entry.lora, entry.cache_salt, entry.tokens, entry.blocks) == (
        "request-1",
        "adapter",
        "tenant",
        40,
        3,
    )
    observer.freed([1, 2, 3], owner)
    observer.close_owner(owner)
    observer.step_ended(0, 0)
    assert read(observer).owners == ()
    assert observer.open_owner("request-2") != owner  # the slot again, another generation


def test_a_full_owner_table_gives_nobody_and_goes_on(observer: MapObserver) -> None:
    owners = [observer.open_owner(str(number)) for number in range(10)]
    assert owners[8:] == [0, 0]
    assert len(set(owners[:8])) == 8
    observer.allocated([1], owners[9])
    observer.step_ended(1, 0)
    assert len(read(observer).owners) == 8


def test_a_dropped_column_is_absent_and_the_rest_is_right(tmp_path: Path) -> None:
    observer = MapObserver.create(spec(columns=("state",)), tmp_path)
    observer.allocated([1, 2])
    observer.shared([1])
    observer.freed([2])
    observer.step_ended(0, 0)
    snapshot = read(observer)
    observer.close()
    assert snapshot.state_counts[USED] == 1
    assert [snapshot.references, snapshot.tokens, snapshot.owner, snapshot.touched_ms, snapshot.group] == [None] * 5
    assert sum(snapshot.histograms["lifetime"].counts) == 1
    assert len(OPTIONAL_COLUMNS) == 6


def test_lifetimes_idle_times_and_reuse_gaps_are_of_every_block_also_within_one_step(tmp_path: Path) -> None:
    now = [1_000_000_000]
    observer = MapObserver.create(spec(), tmp_path, clock_ns=lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += int(seconds * 1e9)

    observer.allocated([1, 2, 3])  # at 0 s
    observer.step_ended(1, 0)
    wait(4)
    observer.cached([1, 2])  # at 4 s
    observer.freed([3])  # lived 4 s
    observer.allocated([3])
    wait(2)
    observer.reused([1])  # gap of 2 s, same step
    observer.evicted([2])  # idle 2 s, lived 6 s, same step
    observer.freed([3])  # lived 2 s, within the step
    observer.step_ended(1, 0)
    histograms = read(observer).histograms
    observer.close()
    sums = {name: (histogram.sum_seconds, sum(histogram.counts)) for name, histogram in histograms.items()}
    assert sums == {"lifetime": (12.0, 3), "idle_before_evict": (2.0, 1), "reuse_gap": (2.0, 1)}


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("block outside the pool", lambda o: o.allocated([BLOCKS])),
        ("negative block", lambda o: o.freed([-1])),
        ("not a block", lambda o: o.allocated(["one"])),
        ("unknown counter", lambda o: o.counted("cosmic_rays")),
        ("token counts missing", lambda o: o.wrote([1, 2], [16], 17)),
        ("token counts for no owner", lambda o: o.progressed([1], [])),
        ("a fraction of a block", lambda o: o.allocated([1.5])),
        ("negative amount", lambda o: o.counted("preemptions", -1)),
        ("absurd amount", lambda o: o.counted("preemptions", 2**64)),
        ("no amount", lambda o: o.counted("preemptions", None)),
        ("a list as a counter", lambda o: o.counted([])),
        ("negative tokens", lambda o: o.wrote([1], [3], -3)),
        ("no tokens", lambda o: o.wrote([1], [3], None)),
        ("negative requests", lambda o: o.step_ended(-1, 0)),
        ("absurd requests", lambda o: o.step_ended(2**32, 0)),
        ("owner of no slot", lambda o: o.allocated([2], 5000)),
        ("negative owner", lambda o: o.allocated([2], -1)),
        ("progress of no slot", lambda o: o.progressed([5000], [1])),
        ("owner closed that is none", lambda o: o.close_owner(5000)),
        ("nothing closed", lambda o: o.close_owner(None)),
        ("negative position", lambda o: o.allocated([2], 0, -5)),
        ("no such group", lambda o: o.allocated([2], 0, 0, 256)),
        ("no policy", lambda o: o.set_policy(None)),
        ("devices that are no names", lambda o: o.set_gpu_uuids([1])),
        ("no such flag", lambda o: o.set_flag(upside_down=True)),
        ("move outside", lambda o: o.moved([1], [BLOCKS], live=False)),
        ("move twice", lambda o: o.moved([1, 1], [2, 3], live=False)),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["in bulk", "block by block"])
def test_a_fault_ends_observation_never_the_engine(
    observer: MapObserver, caplog: pytest.LogCaptureFixture, name: str, act: object, one_by_one: bool
) -> None:
    assert not one_by_one or observer.compile(as_it_is) == ""
    observer.allocated([1])
    observer.step_ended(1, 0)
    before = read(observer)
    with caplog.at_level(logging.INFO):
        act(observer)  # type: ignore[operator]
        for _ in range(3):
            observer.step_ended(1, 0)
            observer.allocated([2])
            observer.close_owner(observer.open_owner("later"))
    assert len(caplog.records) == 1, name
    after = read(observer)  # still whole: the fault was found before the map was touched
    assert after.flags.degraded
    assert not before.flags.degraded
    assert after.states.tolist() == before.states.tolist()
    assert observer.reason


def test_token_counts_that_a_column_cannot_hold_are_its_bounds(observer: MapObserver) -> None:
    observer.allocated([1, 2, 3])
    observer.wrote([1, 2, 3], [70_000, -2, 16], 3)
    observer.step_ended(1, 0)
    tokens = read(observer).tokens
    assert tokens is not None
    assert tokens[1:4].tolist() == [0xFFFF, 0, 16]


def test_a_block_that_lives_and_dies_in_one_step_is_timed_from_its_birth_in_it(tmp_path: Path) -> None:
    now = [1_000_000_000]
    observer = MapObserver.create(spec(), tmp_path, clock_ns=lambda: now[0])
    observer.allocated([1, 2])
    observer.cached([2])
    observer.step_ended(1, 0)
    now[0] += 8_000_000_000
    observer.freed([1])  # 8 s, and again from the next line on
    observer.allocated([1])
    observer.reused([2])  # 8 s after it was last touched
    now[0] += 1_000_000_000
    observer.freed([1])
    observer.shared([2])  # 1 s after it was
    observer.step_ended(1, 0)
    histograms = read(observer).histograms
    observer.close()
    assert (histograms["lifetime"].sum_seconds, sum(histograms["lifetime"].counts)) == (9.0, 2)
    assert (histograms["reuse_gap"].sum_seconds, sum(histograms["reuse_gap"].counts)) == (9.0, 2)


def test_ids_that_are_no_text_are_told_as_text(observer: MapObserver) -> None:
    observer.open_owner(123, None, None)  # type: ignore[arg-type]
    observer.step_ended(1, 0)
    (entry,) = read(observer).owners
    assert (entry.request_id, entry.lora) == ("123", "")


def test_an_interrupt_within_a_publish_is_the_engine_s_and_leaves_a_map_that_is_never_taken_for_whole(
    observer: MapObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    observer.allocated([1])
    with monkeypatch.context() as patch:
        patch.setattr("engine_shim.allocation_map.event_ring.EventRing.append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            observer.step_ended(1, 0)
    observer.allocated([2])
    observer.step_ended(1, 0)
    assert observer.path is not None
    reader = MapReader(observer.path)
    with pytest.raises(MapUnavailable):
        reader.read(timeout_seconds=0.01)
    assert reader.flags().degraded
    observer.close(keep=True)
    with pytest.raises(MapUnavailable):
        reader.read(timeout_seconds=0.01)
    assert reader.flags().closing


def test_a_clock_that_is_set_back_gives_no_lifetime_of_weeks(tmp_path: Path) -> None:
    now = [10_000_000_000]
    observer = MapObserver.create(spec(), tmp_path, clock_ns=lambda: now[0])
    observer.allocated([1, 2])
    observer.step_ended(1, 0)
    now[0] -= 2_000_000
    observer.freed([1, 2])
    observer.step_ended(1, 0)
    lifetime = read(observer).histograms["lifetime"]
    observer.close()
    assert (lifetime.sum_seconds, sum(lifetime.counts)) == (0.0, 2)


def test_the_journal_is_published_before_it_grows(observer: MapObserver) -> None:
    for _ in range(MAX_ENTRIES):
        observer.allocated([1])
        observer.freed([1])
    assert read(observer).counters["blocks_allocated"] > 0
    assert read(observer).counters["steps"] == 0


def test_more_events_than_the_ring_holds_are_a_counted_gap(tmp_path: Path) -> None:
    observer = MapObserver.create(spec(events_per_second=1), tmp_path)
    for _ in range(3):
        for _ in range(300):
            observer.allocated([1])
            observer.freed([1])
        observer.step_ended(0, 0)
    assert observer.path is not None
    reader = MapReader(observer.path)
    batch = reader.events(0)
    assert (len(batch.events), batch.missed, batch.next_head) == (1024, 1800 - 1024, 1800)
    assert len(reader.events(batch.next_head).events) == 0
    reader.close()
    observer.close()


def test_a_forked_child_of_the_writer_writes_nothing(observer: MapObserver) -> None:
    observer.allocated([1])
    observer.step_ended(1, 0)
    child = os.fork()
    if child == 0:
        observer.allocated([2, 3, 4])
        observer.step_ended(9, 9)
        observer.close()
        os._exit(0 if observer.reason else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    snapshot = read(observer)  # the child's close has not removed the map either
    assert snapshot.state_counts[USED] == 1
    assert snapshot.running_requests == 1


def test_flags_policy_and_devices_can_come_late(observer: MapObserver) -> None:
    observer.set_flag(sleeping=True)
    observer.set_policy("relocating")
    observer.set_gpu_uuids(["GPU-1", "GPU-2"])
    snapshot = read(observer)
    assert snapshot.flags.sleeping
    assert snapshot.identity.policy == "relocating"
    assert snapshot.identity.gpu_uuids == ("GPU-1", "GPU-2")
    observer.set_flag(sleeping=False)
    assert not read(observer).flags.sleeping


def test_closing_removes_the_map_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    for keep in (False, True):
        observer = MapObserver.create(spec(engine_id=f"keep-{keep}"), tmp_path)
        path = observer.path
        observer.allocated([1])
        observer.close(keep=keep)
        observer.close()
        observer.allocated([2])
        observer.step_ended(0, 0)
        assert path is not None
        assert path.exists() == keep
        if keep:
            reader = MapReader(path)
            assert reader.read().flags.closing
            assert reader.read().state_counts[USED] == 1  # what was journaled is not lost
            reader.close()


def test_snapshots_are_frozen(observer: MapObserver) -> None:
    snapshot = read(observer)
    with pytest.raises(ValueError, match="read-only"):
        snapshot.states[0] = 1
    assert isinstance(snapshot.states, np.ndarray)
