"""Blocks in use that change their holder, queue lengths between steps, and turning an observer off from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim import BlockState, MapObserver, MapReader, MapSpec


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[MapObserver]:
    spec = MapSpec(
        engine_id="test",
        kind="test",
        model="none",
        pool="kv",
        total_blocks=16,
        block_tokens=16,
        block_bytes=1,
        dtype="none",
        events_per_second=1000,
    )
    made = MapObserver.create(spec, tmp_path)
    yield made
    made.close()


def read(observer: MapObserver) -> MapReader:
    assert observer.path is not None
    return MapReader(observer.path)


def test_a_new_holder_changes_the_name_alone(observer: MapObserver) -> None:
    first, second = observer.open_owner("first"), observer.open_owner("second")
    observer.allocated([3, 4], first, position=0, group=1)
    observer.wrote([3, 4], [16, 9], 25)
    observer.shared([3], second)
    observer.step_ended(2, 0)
    reader = read(observer)
    before = reader.read()
    observer.unshared([3], first)
    observer.held_by([3], second, position=7, group=1)
    observer.step_ended(1, 0)
    after = reader.read()
    assert after.owner is not None
    assert after.position is not None
    assert after.tokens is not None
    assert after.references is not None
    assert after.group is not None
    assert [int(after.owner[block]) for block in (3, 4)] == [second, first]
    assert [int(after.position[block]) for block in (3, 4)] == [7, 1]
    assert [int(after.tokens[block]) for block in (3, 4)] == [16, 9]
    assert [int(after.references[block]) for block in (3, 4)] == [1, 1]
    assert [int(after.group[block]) for block in (3, 4, 5)] == [1, 1, 255]
    assert after.states.tolist() == before.states.tolist()
    assert after.event_head - before.event_head == 1  # the unshare; a new holder is no event
    assert {entry.request_id: entry.blocks for entry in after.owners} == {"first": 1, "second": 1}


def test_queue_lengths_are_told_without_a_step(observer: MapObserver) -> None:
    observer.step_ended(2, 5)
    reader = read(observer)
    step = reader.read()
    observer.allocated([1])
    observer.queues_changed(0, 4)
    after = reader.read()
    assert (after.running_requests, after.waiting_requests) == (0, 4)
    assert after.counters["steps"] == step.counters["steps"] == 1
    assert after.last_step_unix_ns == step.last_step_unix_ns
    assert after.states[1] == BlockState.USED


def test_an_observer_turned_off_says_so_and_follows_no_more(observer: MapObserver) -> None:
    observer.turn_off("somebody else's fault")
    reader = read(observer)
    observer.allocated([1])
    observer.step_ended(1, 0)
    snapshot = reader.read()
    assert observer.reason == "somebody else's fault"
    assert snapshot.flags.degraded
    assert snapshot.states[1] == BlockState.FREE
    assert snapshot.counters["steps"] == 0


def test_the_columns_are_those_that_were_published(observer: MapObserver) -> None:
    observer.allocated([2])
    assert observer.columns["state"][2] == BlockState.FREE
    observer.publish()
    assert observer.columns["state"][2] == BlockState.USED
    observer.close()
    assert observer.columns == {}
