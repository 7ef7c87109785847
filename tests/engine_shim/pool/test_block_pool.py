"""The block pool against a plain model of it, and its refusals: an error leaves the pool as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_shim.errors import DoubleFree, PoolError, PoolExhausted, SettingsError, UnknownBlock
from engine_shim.layout import BlockState
from engine_shim.observer import NullObserver
from engine_shim.pool.block_pool import Allocation, BlockPool
from engine_shim.pool.policies import POLICIES

FREE, CACHED, USED, PINNED, RESERVED = BlockState


class FollowingObserver(NullObserver):
    """Keeps states and references from the calls alone, and refuses a call that the protocol does not allow."""

    def __init__(self, blocks: int) -> None:
        self.states = [FREE] * blocks
        self.references = [0] * blocks
        self.places: dict[int, tuple[int, int]] = {}
        self.counters: Counter[str] = Counter()

    def _move(self, blocks: Sequence[int], before: set[BlockState], after: BlockState) -> None:
        for block in blocks:
            assert self.states[block] in before, f"block {block} is {self.states[block]!r}, not one of {before}"
            self.states[block] = after

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._move(blocks, {FREE}, USED)
        for index, block in enumerate(blocks, start=position):
            self.references[block] = 1
            self.places[block] = (owner, index)

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._move(blocks, {CACHED}, USED)
        for index, block in enumerate(blocks, start=position):
            self.references[block] = 1
            self.places[block] = (owner, index)

    def shared(self, blocks: Sequence[int], owner: int = 0) -> None:
        for block in blocks:
            assert self.states[block] in {USED, PINNED}
            self.references[block] += 1

    def unshared(self, blocks: Sequence[int], owner: int = 0) -> None:
        for block in blocks:
            self.references[block] -= 1
            assert self.states[block] is PINNED or self.references[block] > 0

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._move(blocks, {USED}, FREE)
        for block in blocks:
            self.references[block] = 0

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._move(blocks, {USED}, CACHED)
        for block in blocks:
            assert self.references[block] == 1
            self.references[block] = 0

    def evicted(self, blocks: Sequence[int]) -> None:
        self._move(blocks, {CACHED}, FREE)

    def pinned(self, blocks: Sequence[int]) -> None:
        self._move(blocks, {USED, CACHED}, PINNED)

    def unpinned(self, blocks: Sequence[int], *, cached: bool) -> None:
        self._move(blocks, {PINNED}, CACHED if cached else USED)

    def reserved(self, blocks: Sequence[int]) -> None:
        self._move(blocks, {FREE}, RESERVED)

    def counted(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount


class PlainPool:
    """What the pool should be, said as plainly as possible: one list of allocatable blocks, searched each time."""

    def __init__(self, blocks: int, policy: str, reserved: Sequence[int]) -> None:
        self.policy = policy
        self.queue = [block for block in range(blocks) if block not in reserved]
        self.hashes: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []  # (hash, block), oldest first
        self.pinned: set[int] = set()

    def choose(self, count: int) -> list[int]:
        if self.policy == "lowest-any":
            return sorted(self.queue)[:count]
        if self.policy == "lowest-free":
            free = sorted(block for block in self.queue if block not in self.hashes)
            return (free + [block for block in self.queue if block in self.hashes])[:count]
        return self.queue[:count]

    def take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.queue.remove(block)
            self.forget(block)

    def forget(self, block: int) -> None:
        if block in self.hashes:
            self.registered.remove((self.hashes.pop(block), block))

    def give(self, blocks: Sequence[int]) -> None:
        uncached = [block for block in blocks if block not in self.hashes]
        cached = [block for block in blocks if block in self.hashes]
        if self.policy == "vllm":
            self.queue = uncached + self.queue + cached
        else:
            self.queue += uncached + cached

    def find(self, hashes: Sequence[int]) -> list[int]:
        found: list[int] = []
        for wanted in hashes:
            holders = [block for block_hash, block in self.registered if block_hash == wanted]
            if not holders:
                break
            found.append(holders[0])
        return found


class PoolMachine(RuleBasedStateMachine):
    """Policies that move nothing; `relocating` has a machine of its own, by contents."""

    BLOCKS = 14

    @initialize(
        policy=st.sampled_from(sorted(set(POLICIES) - {"relocating"})), reserved=st.sampled_from([(), (0,), (0, 5)])
    )
    def create(self, policy: str, reserved: tuple[int, ...]) -> None:
        self.observer = FollowingObserver(self.BLOCKS)
        self.pool = BlockPool(self.BLOCKS, policy=policy, headroom=0.2, reserved=reserved, observer=self.observer)
        self.model = PlainPool(self.BLOCKS, policy, reserved)
        self.reserved = reserved
        self.tables: list[list[int]] = []

    def _table(self, data: st.DataObject) -> int:
        assume(self.tables)
        return data.draw(st.integers(0, len(self.tables) - 1))

    def _referenced(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, 8), new=st.booleans())
    def allocate(self, count: int, new: bool) -> None:
        available = len(self.model.queue) - (self.pool.headroom_blocks if new else 0)
        assert self.pool.can_allocate(count, new_sequence=new) == (count <= available or count == 0)
        if count > available and count:
            before = self.observer.counters["allocation_failures"]
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count, new_sequence=new)
            assert self.observer.counters["allocation_failures"] == before + 1
            return
        expected = self.model.choose(count)
        allocation = self.pool.allocate(count, owner=3, position=2, new_sequence=new)
        assert allocation == Allocation(expected, [])
        assert [self.observer.places[block] for block in expected] == [(3, 2 + i) for i in range(count)]
        self.model.take(expected)
        allocation.blocks.sort()  # the caller's own: nothing else may depend on it
        self.tables.append(expected)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = self._table(data)
        table = self.tables[index]
        given = data.draw(st.permutations(table))
        given = given[: data.draw(st.integers(0, len(given)))]
        for block in given:
            table.remove(block)
        left = self._referenced()
        gone = [
            b for i, b in enumerate(given) if not left[b] and b not in self.model.pinned and b not in given[i + 1 :]
        ]
        self.pool.release(iter(given), owner=1)
        self.model.give(gone)
        if not table:
            del self.tables[index]

    @rule(data=st.data(), block_hash=st.integers(1, 6))
    def register(self, data: st.DataObject, block_hash: int) -> None:
        table = self.tables[self._table(data)]
        assume(table)
        block = data.draw(st.sampled_from(table))
        if self.model.hashes.get(block, block_hash) != block_hash:
            with pytest.raises(PoolError):
                self.pool.register(block, block_hash)
            return
        self.pool.register(block, block_hash)
        if block not in self.model.hashes:
            self.model.hashes[block] = block_hash
            self.model.registered.append((block_hash, block))

    @rule(hashes=st.lists(st.integers(1, 6), max_size=4))
    def hit(self, hashes: list[int]) -> None:
        found = self.pool.find_prefix(hashes)
        assert found == self.model.find(hashes)
        idle = {block for block in found if block in self.model.queue}
        assert self.pool.num_unreferenced(found) == len([block for block in found if block in idle])
        self.pool.acquire(found, owner=4, position=1)
        for block in idle:
            self.model.queue.remove(block)
            assert self.observer.places[block] == (4, 1 + found.index(block))
        if found:
            self.tables.append(found)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = list(self.tables[self._table(data)])
        self.pool.fork(table)
        self.tables.append(table)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        table = self.tables[self._table(data)]
        assume(table)
        index = data.draw(st.integers(0, len(table) - 1))
        block = table[index]
        if self._referenced()[block] < 2:
            assert self.pool.copy_on_write(block) is None
        elif not self.model.queue:
            with pytest.raises(PoolExhausted):
                self.pool.copy_on_write(block)
        else:
            (fresh,) = self.model.choose(1)
            before = self.observer.counters["copy_on_write"]
            assert self.pool.copy_on_write(block) == Allocation([fresh], [(block, fresh)])
            self.model.take([fresh])
            table[index] = fresh
            assert self.observer.counters["copy_on_write"] == before + 1

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        holding = set(self._referenced()) | {block for block in self.model.queue if block in self.model.hashes}
        choice = sorted(holding - self.model.pinned)
        assume(choice)
        blocks = data.draw(st.lists(st.sampled_from(choice), unique=True, max_size=3))
        self.pool.pin(blocks)
        self.model.pinned.update(blocks)
        self.model.queue = [block for block in self.model.queue if block not in blocks]

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        assume(self.model.pinned)
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model.pinned)), unique=True))
        self.pool.unpin(blocks)
        self.model.pinned.difference_update(blocks)
        referenced = self._referenced()
        self.model.give([block for block in blocks if not referenced[block]])

    @rule()
    def reset(self) -> None:
        busy = bool(self._referenced()) or bool(self.model.pinned)
        assert self.pool.reset_prefix_cache() == (not busy)
        if not busy:
            self.model.hashes.clear()
            self.model.registered.clear()

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """A bad id anywhere in a list is named, and nothing has happened."""
        referenced = self._referenced()
        good = sorted(referenced)
        idle = sorted(set(range(self.BLOCKS)) - set(good) - set(self.reserved))
        bad = data.draw(st.sampled_from([-1, self.BLOCKS, 10**9, *self.reserved, *idle]))
        blocks = list(good)
        blocks.insert(data.draw(st.integers(0, len(good))), bad)
        before = self.observer.states[:], self.observer.references[:]
        expected = DoubleFree if bad in idle else UnknownBlock
        with pytest.raises(expected, match=str(bad)):
            self.pool.release(blocks)
        with pytest.raises(PoolError, match=str(bad)):
            self.pool.fork(blocks)
        with pytest.raises(PoolError, match=str(bad)):
            self.pool.register(bad, 1)
        with pytest.raises(PoolError, match=str(bad)):
            self.pool.copy_on_write(bad)
        if good:
            with pytest.raises(DoubleFree, match=f"block {good[0]} "):
                self.pool.release([*good, *[good[0]] * referenced[good[0]]])
        if bad not in self.model.pinned:
            with pytest.raises(PoolError, match=str(bad)):
                self.pool.unpin([*sorted(self.model.pinned), bad])
        if bad not in self.model.hashes and bad not in self.model.pinned:
            with pytest.raises(PoolError, match=str(bad)):
                self.pool.acquire(blocks)
        assert before == (self.observer.states, self.observer.references)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        referenced = self._referenced()
        states = pool.states()
        assert states.tolist() == [int(state) for state in self.observer.states]
        assert states.tolist() == [int(pool.state(block)) for block in range(self.BLOCKS)]
        usable = [block for block in range(self.BLOCKS) if block not in self.reserved]
        assert [pool.references(block) for block in usable] == [referenced[block] for block in usable]
        assert self.observer.references == [referenced[block] for block in range(self.BLOCKS)]
        parts = [pool.num_free, pool.num_cached, pool.num_used, pool.num_pinned, len(self.reserved)]
        assert np.bincount(states, minlength=5).tolist() == parts
        assert sum(parts) == pool.num_blocks
        assert pool.num_allocatable == len(model.queue)
        assert pool.num_cached == sum(block in model.hashes for block in model.queue)
        assert pool.num_used == len(set(referenced) - model.pinned)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPoolAgainstModel = PoolMachine.TestCase


def test_the_model_notices_a_pool_that_frees_in_another_order() -> None:
    pool = BlockPool(6, policy="fifo", headroom=0)
    model = PlainPool(6, "vllm", ())
    blocks = pool.allocate(3).blocks
    model.take(blocks)
    pool.release(blocks)
    model.give(blocks)
    assert pool.allocate(3).blocks != model.choose(3)


def test_the_following_observer_notices_a_wrong_call() -> None:
    observer = FollowingObserver(2)
    with pytest.raises(AssertionError):
        observer.freed([0])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("blocks", "reserved"), [(0, ()), (1, (0,)), (1, ())])
def test_smallest_pools(policy: str, blocks: int, reserved: tuple[int, ...]) -> None:
    pool = BlockPool(blocks, policy=policy, reserved=reserved)
    usable = blocks - len(reserved)
    assert pool.usable_blocks == pool.num_free == usable
    assert pool.headroom_blocks == 0
    assert pool.can_allocate(usable, new_sequence=True)
    assert not pool.can_allocate(usable + 1, new_sequence=False)
    with pytest.raises(PoolExhausted, match=f"{usable + 1} blocks asked for, {usable} of {usable} allocatable"):
        pool.allocate(usable + 1)
    assert pool.allocate(0) == Allocation([], [])
    assert pool.allocate(usable).blocks == list(range(usable))
    assert pool.states().shape == (blocks,)


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"num_blocks": -1}, "num_blocks"),
        ({"num_blocks": 4, "headroom": 1.0}, "headroom"),
        ({"num_blocks": 4, "headroom": -0.1}, "headroom"),
        ({"num_blocks": 4, "headroom": float("nan")}, "headroom"),
        ({"num_blocks": 4, "block_tokens": 0}, "block_tokens"),
        ({"num_blocks": 4, "reserved": (4,)}, "block 4"),
        ({"num_blocks": 4, "policy": "best-fit"}, "'best-fit'.*lowest-any"),
    ],
)
def test_settings_that_make_no_pool(settings_: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        BlockPool(**settings_)  # type: ignore[arg-type]


def test_negative_count_is_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(PoolError, match="-1"):
        pool.allocate(-1)
    assert pool.num_free == 4


def test_headroom_is_kept_from_new_sequences_alone() -> None:
    pool = BlockPool(100)
    assert pool.headroom_blocks == 10
    pool.allocate(90, new_sequence=True)
    with pytest.raises(PoolExhausted, match="10 of them held back"):
        pool.allocate(1, new_sequence=True)
    assert len(pool.allocate(10).blocks) == 10


def test_pinned_block_outlives_its_last_reference() -> None:
    pool = BlockPool(4, headroom=0)
    plain, prefix = pool.allocate(2).blocks
    pool.register(prefix, 77)
    pool.pin([plain, prefix])
    pool.release([prefix, plain])
    assert [pool.state(plain), pool.state(prefix)] == [PINNED, PINNED]
    assert (pool.num_pinned, pool.num_used, pool.num_allocatable) == (2, 0, 2)
    assert pool.find_prefix([77]) == [prefix]  # a pinned prefix can still be hit
    with pytest.raises(PoolExhausted):
        pool.allocate(3)
    with pytest.raises(PoolError, match="pinned already"):
        pool.pin([plain])
    pool.unpin([plain, prefix])
    assert [pool.state(plain), pool.state(prefix)] == [FREE, CACHED]


def test_everything_pinned_leaves_nothing_to_allocate() -> None:
    pool = BlockPool(3, headroom=0)
    blocks = pool.allocate(3).blocks
    pool.pin(blocks)
    pool.release(blocks)
    with pytest.raises(PoolExhausted, match="0 of 3"):
        pool.allocate(1)
    pool.unpin(blocks)
    assert pool.num_free == 3


def test_without_prefix_cache_nothing_is_ever_cached() -> None:
    pool = BlockPool(4, prefix_cache=False)
    (block,) = pool.allocate(1).blocks
    pool.register(block, 5)
    assert pool.find_prefix([5]) == []
    pool.release([block])
    assert (pool.num_cached, pool.num_free) == (0, 4)


def test_the_first_of_duplicate_hashes_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(2, headroom=0)
    first, second = pool.allocate(2).blocks
    pool.register(first, 9)
    pool.register(second, 9)
    pool.release([first])
    assert pool.find_prefix([9]) == [first]
    pool.allocate(1)  # evicts the first
    assert pool.find_prefix([9]) == [second]
    pool.release([second])
    pool.allocate(1)
    assert pool.find_prefix([9]) == []


def test_a_hit_tells_each_blocks_place_though_some_are_in_use() -> None:
    observer = FollowingObserver(4)
    pool = BlockPool(4, headroom=0, observer=observer)
    blocks = pool.allocate(3, owner=1).blocks
    pool.register_blocks(blocks, [10, 11, 12])
    pool.release(blocks[1:])
    pool.acquire(pool.find_prefix([10, 11, 12]), owner=2, position=5)
    assert [observer.places[block] for block in blocks] == [(1, 0), (2, 6), (2, 7)]


def test_callers_may_do_what_they_like_with_their_lists() -> None:
    """What an observer was given stays as it was; it reads it at the end of the step."""

    class Keeping(FollowingObserver):
        def __init__(self, blocks: int) -> None:
            super().__init__(blocks)
            self.kept: list[tuple[Sequence[int], list[int]]] = []

        def _move(self, blocks: Sequence[int], before: set[BlockState], after: BlockState) -> None:
            super()._move(blocks, before, after)
            self.kept.append((blocks, list(blocks)))

        def shared(self, blocks: Sequence[int], owner: int = 0) -> None:
            super().shared(blocks, owner)
            self.kept.append((blocks, list(blocks)))

    observer = Keeping(6)
    pool = BlockPool(6, headroom=0, observer=observer)
    table = pool.allocate(3).blocks
    hashed = pool.allocate(1).blocks
    pool.register_blocks(hashed, [8])
    lists = [list(table), list(table), list(table), list(table), list(hashed), list(hashed)]
    pool.fork(lists[0])
    pool.pin(lists[1])
    pool.unpin(lists[2])
    pool.release(lists[3])
    pool.release(lists[4])
    pool.acquire(lists[5])
    pool.release(last := list(table))
    for given in (*lists, last, table, hashed):
        given.clear()
    assert len(observer.kept) == 8
    assert all(list(sequence) == before for sequence, before in observer.kept)


def test_half_filled_blocks_are_whole_blocks_to_the_pool() -> None:
    """30 sequences of 17 tokens in blocks of 16: 60 of 100 blocks used, 510 of their 960 slots."""
    pool = BlockPool(100)
    for _ in range(30):
        pool.allocate(-(-17 // pool.block_tokens), new_sequence=True)
    assert pool.num_used == 60
    assert 1 - 30 * 17 / (pool.num_used * pool.block_tokens) == pytest.approx(0.469, abs=0.0005)


def test_cached_prefixes_are_not_live() -> None:
    """Idle, 24 distinct prompts of two full blocks, idle again: live 0, 0, 0 at rest; cached 0, then 48."""
    pool = BlockPool(200)
    assert (pool.num_used, pool.num_cached) == (0, 0)
    for prompt in range(24):
        blocks = pool.allocate(2, new_sequence=True).blocks
        for index, block in enumerate(blocks):
            pool.register(block, prompt * 10 + index)
        assert pool.num_used == 2
        pool.release(reversed(blocks))
        assert pool.num_used == 0
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 48, 152)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_null_block_is_never_usable(policy: str) -> None:
    """1,000 blocks of which block 0 is reserved: 999 usable, idle usage 0, and a request for all of them is served."""
    pool = BlockPool(1000, policy=policy, reserved=[0], headroom=0)
    assert (pool.usable_blocks, pool.num_used, pool.state(0)) == (999, 0, RESERVED)
    blocks = pool.allocate(999, new_sequence=True).blocks
    assert sorted(blocks) == list(range(1, 1000))
    with pytest.raises(UnknownBlock, match="reserved"):
        pool.release([*blocks, 0])
    assert pool.num_used == 999


def test_register_blocks_wants_one_hash_each() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2).blocks
    with pytest.raises(PoolError, match="1 hashes for 2 blocks"):
        pool.register_blocks(blocks, [1])
    with pytest.raises(PoolError, match="twice"):
        pool.register_blocks([blocks[0]] * 2, [1, 1])
    assert pool.find_prefix([1]) == []
