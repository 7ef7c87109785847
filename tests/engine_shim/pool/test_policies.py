"""Allocation policies one by one: the order in which blocks come back out, and the search for low addresses."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.errors import SettingsError
from engine_shim.observer import NullObserver
from engine_shim.pool import block_pool
from engine_shim.pool.address_map import AddressMap
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import POLICIES, StockPolicy, Taken, make_policy


def aged(name: str) -> tuple[list[int], list[int]]:
    """A pool of 8 after: 0-5 allocated; 1 and 4 released without a hash, 5, 0 and 2 as prefixes, in that order."""
    policy = make_policy(name, range(8))
    assert policy.take(6) == Taken([0, 1, 2, 3, 4, 5], [], [])
    policy.give_free([1, 4])
    policy.give_cached([5, 0])
    policy.give_cached([2])
    assert (policy.num_free, policy.num_cached) == (4, 3)
    assert [policy.is_cached(block) for block in range(8)] == [block in {0, 2, 5} for block in range(8)]
    assert sorted(policy.cached_blocks()) == [0, 2, 5]
    blocks, evicted, copies = policy.take(7)
    assert copies == []
    assert (policy.num_free, policy.num_cached) == (0, 0)
    return blocks, evicted


@pytest.mark.parametrize(
    ("name", "order", "evicted"),
    [
        ("vllm", [1, 4, 6, 7, 5, 0, 2], [5, 0, 2]),
        ("fifo", [6, 7, 1, 4, 5, 0, 2], [5, 0, 2]),
        ("lowest-free", [1, 4, 6, 7, 5, 0, 2], [5, 0, 2]),
        ("lowest-any", [0, 1, 2, 4, 5, 6, 7], [0, 2, 5]),
    ],
)
def test_order(name: str, order: list[int], evicted: list[int]) -> None:
    assert aged(name) == (order, evicted)


@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_any_number_of_removed_blocks_may_lie_above_what_is_taken(name: str, count: int) -> None:
    """5,000 blocks that were withdrawn or moved into, where the next ones come from: none of them is handed out."""
    policy = make_policy(name, range(7000))
    policy.remove_free(range(5000))
    assert policy.take_free(count, 2001 - count) is None
    taken = policy.take_free(count, 0) or policy.take(count).blocks
    assert taken == list(range(5000, 5000 + count))
    policy.give_free(taken)
    policy.give_free(range(5000))
    assert sorted(policy.take(7000).blocks) == list(range(7000))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_forgetting_keeps_the_order(name: str) -> None:
    policy = make_policy(name, range(4))
    policy.take(4)
    policy.give_cached([3, 0])
    policy.give_cached([2])
    expected = {"lowest-any": [0, 2, 3]}.get(name, [3, 0, 2])
    assert policy.forget_cached() == expected
    assert (policy.num_free, policy.num_cached) == (3, 0)
    order = [3, 0, 2] if name in {"vllm", "fifo"} else [0, 2, 3]
    assert policy.take(3) == Taken(order, [], [])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_removing_a_hit_takes_it_out_of_the_order(name: str) -> None:
    policy = make_policy(name, range(3))
    policy.take(3)
    policy.give_cached([0, 1, 2])
    policy.remove_cached([1])
    assert policy.take(2).blocks == [0, 2]
    assert policy.num_cached == 0


def test_unknown_policy_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'lru'; choose one of vllm, fifo, lowest-free, lowest-any"):
        make_policy("lru", range(3))


def test_stock_order_equals_a_deque_that_does_what_vllm_does() -> None:
    """20,000 operations: uncached blocks to the front in the order given, cached ones to the end, hits pulled out."""
    random_ = random.Random(7)
    policy = StockPolicy(range(1, 300))
    queue = deque(range(1, 300))
    cached: set[int] = set()
    held: list[int] = []
    for _ in range(20_000):
        choice = random_.random()
        if choice < 0.4:
            count = random_.randint(1, 12)
            if count > len(queue):
                continue
            expected = [queue.popleft() for _ in range(count)]
            blocks, evicted, _ = policy.take(count)
            assert blocks == expected
            assert evicted == [block for block in expected if block in cached]
            cached.difference_update(expected)
            held += expected
        elif choice < 0.85 and held:
            random_.shuffle(held)
            given_back = [held.pop() for _ in range(min(len(held), random_.randint(1, 12)))]
            if random_.random() < 0.5:
                policy.give_free(given_back)
                queue.extendleft(reversed(given_back))
            else:
                policy.give_cached(given_back)
                queue.extend(given_back)
                cached.update(given_back)
        elif cached:
            hit = random_.choice(sorted(cached))
            policy.remove_cached([hit])
            queue.remove(hit)
            cached.remove(hit)
            held.append(hit)
        assert policy.num_free + policy.num_cached == len(queue)


@given(st.lists(st.integers(0, 40), unique=True), st.data())
def test_address_map_gives_the_lowest(members: list[int], data: st.DataObject) -> None:
    addresses = AddressMap(sorted(members))
    plain = set(members)
    outside: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, len(plain)))
        lowest = sorted(plain)[:count]
        assert addresses.take_lowest(count) == lowest
        plain.difference_update(lowest)
        outside += lowest
        if outside:
            back = data.draw(st.lists(st.sampled_from(outside), unique=True))
            addresses.add(back)
            plain.update(back)
            outside = [block for block in outside if block not in back]
        if plain:
            gone = data.draw(st.lists(st.sampled_from(sorted(plain)), unique=True, max_size=3))
            addresses.remove(gone)
            plain.difference_update(gone)
            outside += gone
        assert addresses.count == len(plain)


class OneCopyPolicy(StockPolicy):
    """Hands out the lowest block though stock would take another: the prefix in it moves to that other one."""

    def take(self, count: int) -> Taken:
        (chosen,), evicted, _ = super().take(count)
        lowest = min(self._cached, default=chosen)
        if lowest >= chosen:
            return Taken([chosen], evicted, [])
        self._cached = type(self._cached)(chosen if b == lowest else b for b in self._cached)
        return Taken([lowest], evicted, [(lowest, chosen)])


class Moves(NullObserver):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def evicted(self, blocks: Sequence[int]) -> None:
        self.seen.append(("evicted", list(blocks)))

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        self.seen.append(("moved", list(sources), list(destinations), live))

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self.seen.append(("allocated", list(blocks)))


def test_pool_follows_the_copies_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relocated prefix is found in its new block, and duplicates of it keep their order."""
    monkeypatch.setattr(block_pool, "make_policy", lambda name, blocks: OneCopyPolicy(blocks))
    observer = Moves()
    pool = BlockPool(4, headroom=0, observer=observer)
    blocks = [pool.allocate(1).blocks[0] for _ in range(4)]
    assert blocks == [0, 1, 2, 3]
    for block, block_hash in zip(blocks, (50, 60, 50, 70), strict=True):
        pool.register(block, block_hash)
    pool.release([3, 0, 1, 2])  # evict 3 first
    observer.seen.clear()
    allocation = pool.allocate(1)
    assert allocation == ([0], [(0, 3)])
    assert observer.seen == [("evicted", [3]), ("moved", [0], [3], False), ("allocated", [0])]
    assert pool.find_prefix([70]) == []
    assert pool.find_prefix([50]) == [3]  # still before its duplicate in block 2
    assert pool.find_prefix([60]) == [1]
