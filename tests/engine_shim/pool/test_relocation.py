"""Relocating allocation against a plain model of stock: the same evictions and hits, whatever lies where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_shim.errors import PoolExhausted, SettingsError
from engine_shim.layout import BlockState
from engine_shim.observer import NullObserver
from engine_shim.pool.address_map import SEARCHED_BLOCKS, AddressMap
from engine_shim.pool.block_pool import Allocation, BlockPool
from engine_shim.pool.policies import SWITCHABLE
from engine_shim.pool.prefix import PrefixIndex
from engine_shim.pool.relocation import RUN_BLOCKS, SLACK, STRETCH, RelocatingPolicy

FREE, CACHED, USED, PINNED, RESERVED = BlockState


class Memory(NullObserver):
    """What each block holds, by a number of its own for everything that was ever written, and each block's state."""

    def __init__(self, blocks: int) -> None:
        self.held = [0] * blocks
        self.states = [FREE] * blocks
        self.evictions: list[int] = []
        self.moves = 0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for destination, contents in [(destination, self.held[source]) for source, destination in copies]:
            self.held[destination] = contents

    def _become(self, blocks: Sequence[int], before: set[BlockState], after: BlockState) -> None:
        for block in blocks:
            assert self.states[block] in before
            self.states[block] = after

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._become(blocks, {FREE}, USED)

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        self._become(blocks, {CACHED}, USED)

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._become(blocks, {USED}, FREE)

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        self._become(blocks, {USED}, CACHED)

    def evicted(self, blocks: Sequence[int]) -> None:
        self._become(blocks, {CACHED}, FREE)
        self.evictions += [self.held[block] for block in blocks]

    def pinned(self, blocks: Sequence[int]) -> None:
        self._become(blocks, {USED, CACHED}, PINNED)

    def unpinned(self, blocks: Sequence[int], *, cached: bool) -> None:
        self._become(blocks, {PINNED}, CACHED if cached else USED)

    def reserved(self, blocks: Sequence[int]) -> None:
        self._become(blocks, {FREE}, RESERVED)

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        assert not live
        assert len({*sources, *destinations}) == 2 * len(sources) == 2 * len(destinations)
        for source, destination in zip(sources, destinations, strict=True):
            assert self.states[source] is CACHED
            assert self.states[destination] in {FREE, CACHED}
            self.states[source], self.states[destination] = self.states[destination], CACHED
        self.moves += len(sources)

    def counted(self, name: str, amount: int = 1) -> None:
        if name == "relocation_copies":
            self.moves += amount


class StockModel:
    """What vLLM keeps, by contents alone: how many blocks are free, and the cached contents in order of eviction."""

    def __init__(self, usable: int) -> None:
        self.free = usable
        self.order: list[int] = []
        self.hashes: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []  # (hash, contents), oldest first
        self.evictions: list[int] = []

    def take(self, count: int) -> None:
        evicted = self.order[: max(0, count - self.free)]
        del self.order[: len(evicted)]
        self.free += len(evicted) - count
        for contents in evicted:
            self.registered.remove((self.hashes.pop(contents), contents))
        self.evictions += evicted

    def give(self, contents: Sequence[int]) -> None:
        cached = [each for each in contents if each in self.hashes]
        self.free += len(contents) - len(cached)
        self.order += cached

    def find(self, hashes: Sequence[int]) -> list[int]:
        found: list[int] = []
        for wanted in hashes:
            holders = [contents for block_hash, contents in self.registered if block_hash == wanted]
            if not holders:
                break
            found.append(holders[0])
        return found


class RelocationMachine(RuleBasedStateMachine):
    """Tables are kept by contents and by block; only what nobody references may change its block."""

    BLOCKS = 24

    @initialize(policy=st.sampled_from(SWITCHABLE), reserved=st.sampled_from([(), (0,), (0, 7, 23)]))
    def create(self, policy: str, reserved: tuple[int, ...]) -> None:
        self.memory = Memory(self.BLOCKS)
        self.pool = BlockPool(self.BLOCKS, policy=policy, headroom=0, reserved=reserved, observer=self.memory)
        self.model = StockModel(self.BLOCKS - len(reserved))
        self.tables: list[tuple[list[int], list[int]]] = []  # contents, blocks
        self.pinned: dict[int, int] = {}  # contents to block
        self.written = 0

    def _carry_out(self, allocation: Allocation) -> None:
        before = list(self.memory.held)
        self.memory.copy(allocation.copies)
        referenced = {block for _, blocks in self.tables for block in blocks} | set(self.pinned.values())
        assert all(self.memory.held[block] == before[block] for block in referenced)

    def _write(self, blocks: Sequence[int]) -> list[int]:
        contents = list(range(self.written + 1, self.written + 1 + len(blocks)))
        self.written += len(blocks)
        for block, each in zip(blocks, contents, strict=True):
            self.memory.held[block] = each
        return contents

    def _references(self) -> Counter[int]:
        return Counter(each for contents, _ in self.tables for each in contents)

    @rule(count=st.integers(1, 12), named=st.booleans(), first=st.integers(1, 4))
    def allocate(self, count: int, named: bool, first: int) -> None:
        if count > self.model.free + len(self.model.order):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        allocation = self.pool.allocate(count)
        self._carry_out(allocation)
        self.model.take(count)
        contents = self._write(allocation.blocks)
        self.tables.append((contents, list(allocation.blocks)))
        if named:
            for offset, (each, block) in enumerate(zip(contents, allocation.blocks, strict=True)):
                self.pool.register(block, first + offset)
                self.model.hashes[each] = first + offset
                self.model.registered.append((first + offset, each))

    @rule(first=st.integers(1, 4), length=st.integers(1, 10))
    def hit(self, first: int, length: int) -> None:
        """A prompt: its hits are pulled and acquired. Duplicates count: it must be the very copy that stock finds."""
        found = self.pool.find_prefix(range(first, first + length))
        expected = self.model.find(range(first, first + length))
        assert [self.memory.held[block] for block in found] == expected
        pulled = self.pool.pull(found)
        self._carry_out(pulled)
        assert [self.memory.held[block] for block in pulled.blocks] == expected
        self.pool.acquire(pulled.blocks)
        self.model.order = [each for each in self.model.order if each not in expected]
        if expected:
            self.tables.append((expected, pulled.blocks))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        assume(self.tables)
        self.end(data.draw(st.integers(0, len(self.tables) - 1)))

    def end(self, index: int) -> None:
        contents, blocks = self.tables.pop(index)
        self.pool.release(reversed(blocks))
        left = self._references()
        self.model.give([each for each in reversed(contents) if not left[each] and each not in self.pinned])

    @rule(data=st.data())
    def fork_and_write(self, data: st.DataObject) -> None:
        assume(self.tables)
        contents, blocks = (list(part) for part in data.draw(st.sampled_from(self.tables)))
        self.pool.fork(blocks)
        self.tables.append((contents, blocks))
        if not self.model.free + len(self.model.order):
            return
        index = data.draw(st.integers(0, len(blocks) - 1))
        written = self.pool.copy_on_write(blocks[index])
        assert written is not None
        old = contents[index]
        self._carry_out(written)
        assert self.memory.held[written.blocks[0]] == old
        self.model.take(1)
        blocks[index] = written.blocks[0]
        (contents[index],) = self._write(written.blocks)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        candidates = [each for each in self.model.order if each not in self.pinned]
        assume(candidates)
        contents = data.draw(st.sampled_from(candidates))
        block = self.memory.held.index(contents)
        assume(self.pool.state(block) is CACHED)  # another block may hold an old copy
        self.pool.pin([block])
        self.pinned[contents] = block
        self.model.order.remove(contents)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        assume(self.pinned)
        contents = data.draw(st.sampled_from(sorted(self.pinned)))
        self.pool.unpin([self.pinned.pop(contents)])
        if not self._references()[contents]:
            self.model.give([contents])

    @rule(policy=st.sampled_from(SWITCHABLE))
    def switch(self, policy: str) -> None:
        self.pool.set_policy(policy)
        assert self.pool.policy == policy

    @rule(copies=st.sampled_from([0, 1, 2, 5, 1000, 1000, 1000]))
    def limit(self, copies: int) -> None:
        self.pool.limit_copies(copies)

    @invariant()
    def same_as_stock(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        assert self.memory.evictions == model.evictions
        assert (pool.num_free, pool.num_cached) == (model.free, len(model.order))
        assert [self.memory.held[block] for block in pool._policy.cached_blocks()] == model.order
        assert pool.states().tolist() == [int(state) for state in self.memory.states]
        assert pool.relocation_copies == self.memory.moves
        for contents, blocks in self.tables:
            assert [self.memory.held[block] for block in blocks] == contents


RelocationMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=50)
TestRelocationAgainstStock = RelocationMachine.TestCase


def lose_the_place(patch: pytest.MonkeyPatch) -> None:
    """A copied prefix goes to the end of the order of eviction."""
    rename = RelocatingPolicy._rename

    def to_the_end(self: RelocatingPolicy, source: int, home: int) -> None:
        rename(self, source, home)
        self._order.move_to_end(self._tickets[home])

    patch.setattr(RelocatingPolicy, "_rename", to_the_end)


def name_duplicates_anew(patch: pytest.MonkeyPatch) -> None:
    """A copied prefix goes behind its duplicates, as if it were registered again."""

    def relocate(self: PrefixIndex, copies: Sequence[tuple[int, int]]) -> None:
        hashes = [self.hash_of[source] for source, _ in copies]
        self.forget([source for source, _ in copies])
        self.add([home for _, home in copies], hashes)

    patch.setattr(PrefixIndex, "relocate", relocate)


def displace_hits(patch: pytest.MonkeyPatch) -> None:
    """The lowest cached blocks give way to a pulled hit, other hits of that request too."""
    patch.setattr(RelocatingPolicy, "_lowest_beside", lambda self, hits, *wanted: self._cached.take_lowest(*wanted))


@pytest.mark.parametrize("fault", [None, lose_the_place, name_duplicates_anew, displace_hits])
def test_the_model_notices_faults(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    """Duplicates in both halves, the upper one the older; its end is evicted, and the lowest prefixes are copied
    there; then some of these are hit, beside others that lie low."""

    def scenario() -> None:
        machine = RelocationMachine()
        machine.create(policy="relocating", reserved=())
        machine.allocate(count=12, named=True, first=1)
        machine.allocate(count=12, named=True, first=1)
        machine.end(1)
        machine.end(0)
        machine.same_as_stock()
        machine.allocate(count=3, named=False, first=1)
        assert machine.pool.relocation_copies == 3
        machine.same_as_stock()
        machine.hit(first=1, length=9)
        assert machine.pool.relocation_copies > 3
        machine.same_as_stock()

    if fault is None:
        scenario()
    else:
        fault(monkeypatch)
        with pytest.raises((AssertionError, KeyError)):
            scenario()


def filled(blocks: int, prompts: Sequence[int], *, reserved: Sequence[int] = ()) -> tuple[BlockPool, list[list[int]]]:
    """A relocating pool that has served prompts of so many blocks, hashes 1, 2, ..., one after the other."""
    pool = BlockPool(blocks, policy="relocating", headroom=0, reserved=reserved)
    tables, named = [], 0
    for count in prompts:
        table = pool.allocate(count).blocks
        pool.register_blocks(table, range(named + 1, named + 1 + count))
        named += count
        tables.append(table)
    return pool, tables


def test_a_displaced_prefix_is_copied_where_the_evicted_one_was() -> None:
    pool, tables = filled(20, [10, 10])
    pool.release(reversed(tables[1]))  # the upper half is the older: stock would take blocks 19, 18, ...
    pool.release(reversed(tables[0]))
    allocation = pool.allocate(3)
    assert allocation == ([0, 1, 2], [(0, 17), (1, 18), (2, 19)])
    assert pool.find_prefix([1, 2, 3, 4]) == [17, 18, 19, 3]
    assert pool.find_prefix(range(11, 21)) == list(range(10, 17))


def test_what_the_budget_does_not_allow_lies_where_stock_would_have_it() -> None:
    pool, tables = filled(20, [10, 10])
    pool.release(reversed(tables[1]))
    pool.release(reversed(tables[0]))
    pool.limit_copies(2)
    allocation = pool.allocate(3)
    assert allocation.copies == [(0, 17), (1, 18)]
    assert allocation.blocks == [0, 1, 19]
    assert pool.allocate(2) == ([15, 16], [])
    pool.limit_copies(1000)
    assert pool.allocate(1).copies == [(2, 14)]


def test_a_hit_is_pulled_down_and_never_displaces_another() -> None:
    pool, tables = filled(20, [4, 6, 10])
    for table in reversed(tables):
        pool.release(reversed(table))
    hits = [0, 1, *tables[2]]  # the lowest two and the upper half
    pulled = pool.pull(hits)
    assert sorted(pulled.blocks) == sorted({0, 1, *pulled.blocks})
    assert pulled.blocks[:2] == [0, 1]
    assert pulled.blocks[-7:] == list(range(2, 9))  # three lie low enough as they are
    assert len(pulled.copies) == 14  # nothing was free: each took a swap
    assert set(pulled.copies) == {
        *zip(range(13, 20), range(2, 9), strict=True),
        *zip(range(2, 9), range(13, 20), strict=True),
    }
    assert pool.find_prefix([3]) == [13]


def test_a_pull_into_a_free_block_takes_one_copy() -> None:
    pool, tables = filled(20, [4, 16])
    pool.release(reversed(tables[1]))
    extra = BlockPool(20, policy="relocating", headroom=0)
    first, second = extra.allocate(10).blocks, extra.allocate(10).blocks
    extra.register_blocks(second, range(1, 11))
    extra.release(first)
    extra.release(reversed(second))
    pulled = extra.pull(extra.find_prefix([8, 9, 10]))
    assert pulled == ([0, 1, 2], [(17, 0), (18, 1), (19, 2)])
    assert (extra.num_free, extra.num_cached) == (10, 10)


def test_many_blocks_come_from_runs_and_few_from_holes() -> None:
    pool = BlockPool(200, policy="relocating", headroom=0, prefix_cache=False)
    blocks = pool.allocate(100).blocks
    pool.release(blocks[10:30:2])  # single holes
    pool.release(blocks[40 : 40 + RUN_BLOCKS])
    assert pool.allocate(RUN_BLOCKS).blocks == list(range(40, 40 + RUN_BLOCKS))
    assert [pool.allocate(1).blocks[0] for _ in range(3)] == [10, 12, 14]
    assert pool.allocate(3).blocks == [100, 101, 102]


def test_a_run_is_found_behind_any_number_of_single_holes() -> None:
    holes = AddressMap(range(0, 20_000, 2), size=40_000)
    holes.add(range(20_000, 20_100))
    assert holes.take_runs(50, 8) == list(range(20_000, 20_050))
    assert holes.take_runs(60, 8) == list(range(20_050, 20_100))
    assert holes.take_runs(2, 8) == []
    assert holes.take_lowest(3) == [0, 2, 4]
    assert holes.count == 9_997


def test_runs_far_below_the_ceiling_are_not_searched_for() -> None:
    """One search passes over a bounded part of the pool, however large that is."""
    runs = AddressMap(range(8), size=2 * SEARCHED_BLOCKS)
    runs.add(range(SEARCHED_BLOCKS, SEARCHED_BLOCKS + 10))
    assert runs.take_runs(8, 8, SEARCHED_BLOCKS + 9) == list(range(SEARCHED_BLOCKS, SEARCHED_BLOCKS + 8))
    assert runs.take_runs(8, 8, SEARCHED_BLOCKS + 9) == []
    assert runs.take_runs(8, 8, SEARCHED_BLOCKS) == list(range(8))


def test_a_prompt_goes_above_the_ceiling_before_it_fills_single_holes() -> None:
    policy = RelocatingPolicy(range(2000))
    assert policy.take(1100).blocks == list(range(1100))
    policy.give_free(range(0, 200, 2))
    assert policy.take(40).blocks == list(range(1100, 1140))  # the ceiling is at 1136
    assert policy.take(1).blocks == [0]


def test_a_prompt_goes_no_further_above_the_ceiling_than_the_stretch() -> None:
    policy = RelocatingPolicy(range(2000))
    policy.take(1100)
    policy.give_free(range(0, 1000, 2))
    left = 1400 - 300
    end = 2000 - int((1 - SLACK) * left) + int(STRETCH * left)
    assert 1100 < end < 1200
    taken = policy.take(300).blocks
    assert taken == [*range(0, 2 * (300 - (end - 1100)), 2), *range(1100, end)]


@pytest.mark.parametrize("policy", ["fifo", "lowest-any", "lowest-free"])
def test_other_orders_cannot_be_switched(policy: str) -> None:
    pool = BlockPool(8, policy=policy)
    with pytest.raises(SettingsError, match=f"from policy {policy} to relocating; only vllm and relocating"):
        pool.set_policy("relocating")
    with pytest.raises(SettingsError, match=f"from policy vllm to {policy}"):
        BlockPool(8).set_policy(policy)


def test_a_switch_with_the_highest_blocks_in_use() -> None:
    pool = BlockPool(10, headroom=0, reserved=(0, 9))
    tables = [pool.allocate(4).blocks, pool.allocate(4).blocks]
    pool.release(tables[0])
    pool.set_policy("relocating")
    pool.release(tables[1])
    assert sorted(pool.allocate(8).blocks) == list(range(1, 9))


@pytest.mark.parametrize("slack", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("count", [1, 7, 8, 40, 100])
def test_the_ceiling_always_has_room(slack: float, count: int) -> None:
    """New blocks never lie above it, a prompt's never above the stretch, wherever what is in use lies."""
    policy = RelocatingPolicy(range(100), slack=slack)
    policy.take(100)
    policy.give_cached(range(99, -1, -1))
    policy.take(100 - count)
    policy.give_cached(range(count, 60))
    allocatable = policy.num_free + policy.num_cached
    wanted = min(count, allocatable)
    taken = policy.take(wanted)
    left = allocatable - wanted
    clear = int((1 - slack) * left) - (int(STRETCH * left) if wanted > 1 else 0)
    assert max(taken.blocks) < 100 - clear
    assert len(taken.blocks) == len(set(taken.blocks)) == wanted
