"""The book of vLLM's requests, with stand-ins that have the few attributes it reads; real vLLM is in tests/engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.adapters.vllm.requests import RequestBook

BLOCK = 16


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[MapObserver]:
    spec = MapSpec(
        engine_id="test",
        kind="vllm",
        model="none",
        pool="kv",
        total_blocks=2048,
        block_tokens=BLOCK,
        block_bytes=1,
        dtype="none",
        events_per_second=1000,
    )
    made = MapObserver.create(spec, tmp_path)
    yield made
    made.close()


def engine(requests: int) -> tuple[Any, Any]:
    """A scheduler with requests r0, r1, ... of two blocks each, and its one manager."""
    scheduler = SimpleNamespace(requests={}, deferred_frees=deque())
    manager = SimpleNamespace(req_to_blocks={}, block_size=BLOCK, kv_cache_group_id=0, kv_cache_spec=SimpleNamespace())
    for number in range(requests):
        name = f"r{number}"
        scheduler.requests[name] = SimpleNamespace(
            num_computed_tokens=BLOCK + 1, lora_request=None, cache_salt="salt" if number else None
        )
        manager.req_to_blocks[name] = [SimpleNamespace(block_id=1 + 2 * number + place) for place in range(2)]
    return scheduler, manager


def test_more_requests_than_there_is_room_for_at_first(observer: MapObserver) -> None:
    scheduler, manager = engine(500)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    owners = {name: book.owner_of(name) for name in scheduler.requests}
    assert len(set(owners.values())) == 500
    assert 0 not in owners.values()
    for name, owner in owners.items():
        observer.allocated([block.block_id for block in manager.req_to_blocks[name]], owner)
    book.scheduled(dict.fromkeys(scheduler.requests, BLOCK + 1))
    observer.step_ended(500, 0)
    assert observer.path is not None
    snapshot = MapReader(observer.path).read()
    assert observer.reason == ""
    assert snapshot.tokens is not None
    assert snapshot.tokens[1:1001].tolist() == [BLOCK, 1] * 500
    assert {entry.request_id: entry.tokens for entry in snapshot.owners} == dict.fromkeys(owners, BLOCK + 1)
    assert {entry.cache_salt for entry in snapshot.owners} == {"", "salt"}
    assert snapshot.counters["tokens_written"] == 500 * (BLOCK + 1)


def test_a_request_that_was_never_seen_to_allocate_is_opened_in_the_step(observer: MapObserver) -> None:
    scheduler, manager = engine(130)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    book.scheduled(dict.fromkeys(scheduler.requests, 1))
    observer.step_ended(130, 0)
    assert observer.path is not None
    assert len(MapReader(observer.path).read().owners) == 130


def test_rejected_tokens_are_taken_back(observer: MapObserver) -> None:
    """Speculative decoding: a request may have fewer computed tokens than it had."""
    scheduler, manager = engine(1)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    observer.allocated([1, 2], book.owner_of("r0"))
    book.scheduled({"r0": BLOCK + 1})
    scheduler.requests["r0"].num_computed_tokens = BLOCK - 3
    book.scheduled({"r0": 1})
    observer.step_ended(1, 0)
    assert observer.columns["tokens"][1:3].tolist() == [BLOCK - 3, 0]


def test_an_ended_request_is_named_until_its_blocks_have_gone_back(observer: MapObserver) -> None:
    scheduler, manager = engine(2)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    for name in ("r0", "r1"):
        book.owner_of(name)
    del scheduler.requests["r0"]
    book.ended("r0")
    scheduler.deferred_frees.append((1, []))
    book.close_ended()
    observer.step_ended(1, 0)
    assert observer.path is not None
    reader = MapReader(observer.path)
    assert {entry.request_id for entry in reader.read().owners} == {"r0", "r1"}
    scheduler.deferred_frees.clear()
    book.close_ended()
    observer.step_ended(1, 0)
    assert {entry.request_id for entry in reader.read().owners} == {"r1"}


def test_requests_that_ended_unseen_are_swept(observer: MapObserver) -> None:
    scheduler, manager = engine(3)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    for name in ("r0", "r1", "r2"):
        book.owner_of(name)
    del scheduler.requests["r1"]
    assert book.sweep() == 1
    assert book.sweep() == 0
    assert book.known_owner("r1") == 0
    assert book.known_owner("r2") != 0


def test_a_request_that_was_preempted_before_its_step_is_shown_fills_no_block(observer: MapObserver) -> None:
    """Another one has its blocks by then."""
    scheduler, manager = engine(2)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    for name, blocks in (("r0", [1, 2]), ("r1", [3, 4])):
        observer.allocated(blocks, book.owner_of(name))
    book.scheduled(dict.fromkeys(scheduler.requests, BLOCK + 1))
    observer.step_ended(2, 0)
    assert observer.columns["tokens"][:5].tolist() == [0, BLOCK, 1, BLOCK, 1]
    scheduler.requests["r0"].num_computed_tokens = 0
    manager.req_to_blocks["r1"] += manager.req_to_blocks.pop("r0")
    book.emptied("r0")
    scheduler.requests["r1"].num_computed_tokens += 1
    book.scheduled(dict.fromkeys(scheduler.requests, 1))
    observer.step_ended(1, 1)
    assert observer.columns["tokens"][:5].tolist() == [0, BLOCK, 1, BLOCK, 2]
    assert observer.path is not None
    tokens = {entry.request_id: entry.tokens for entry in MapReader(observer.path).read().owners}
    assert tokens == {"r0": 0, "r1": BLOCK + 2}


def test_each_ended_request_waits_for_its_own_step(observer: MapObserver) -> None:
    """With a KV consumer and two batches in flight blocks of some request wait in every step."""
    scheduler, manager = engine(50)
    scheduler.sched_step_seq = scheduler.processed_step_seq = 0
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    for name in list(scheduler.requests):
        book.owner_of(name)
    for name in list(scheduler.requests):
        scheduler.sched_step_seq += 1
        del scheduler.requests[name]
        scheduler.deferred_frees.append((scheduler.sched_step_seq, []))
        book.ended(name)
        scheduler.processed_step_seq = scheduler.sched_step_seq - 1
        while scheduler.deferred_frees[0][0] <= scheduler.processed_step_seq:
            scheduler.deferred_frees.popleft()
        book.close_ended()
        waiting = {request for request in book._rows if request not in scheduler.requests}
        assert name in waiting
        assert len(waiting) <= 2
        assert len(book._ending) <= 2
        assert book.sweep() == 0
    scheduler.deferred_frees.clear()
    book.close_ended()
    assert book._rows == {}


def test_an_id_that_came_back_stays_open(observer: MapObserver) -> None:
    scheduler, manager = engine(1)
    book = RequestBook(scheduler, [manager], observer, null=0, hash_ids=False)
    owner = book.owner_of("r0")
    request = scheduler.requests.pop("r0")
    book.ended("r0")
    scheduler.requests["r0"] = request
    book.close_ended()
    assert book.known_owner("r0") == owner
    assert book.sweep() == 0
