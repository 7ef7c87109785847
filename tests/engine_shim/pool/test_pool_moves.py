"""Moves within a pool: references, prefixes, order of eviction and the map follow the contents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.errors import PoolError, PoolExhausted
from engine_shim.layout import BlockState
from engine_shim.observer import NullObserver
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import POLICIES
from engine_shim.pool.pool_moves import PoolMoves

FREE, CACHED, USED, PINNED, RESERVED = BlockState
BLOCKS = 120


def test_a_prefix_in_the_way_changes_places_and_keeps_its_turn() -> None:
    pool = BlockPool(8, headroom=0)
    moves = PoolMoves(pool)
    old = pool.allocate(3).blocks  # 0, 1, 2
    pool.register_blocks(old, [10, 11, 12])
    pool.release(old)  # evicted in this order
    live = pool.allocate(5).blocks
    assert live == [3, 4, 5, 6, 7]
    assert moves.reserve([(7, 1)]) == [1]
    moves.commit()
    assert (pool.state(1), pool.state(7)) == (USED, CACHED)
    assert pool.find_prefix([10, 11, 12]) == [10 - 10, 7, 2]
    assert [pool.allocate(1).blocks for _ in range(3)] == [[0], [7], [2]]


def test_a_vacated_block_is_handed_out_after_all_other_free_ones() -> None:
    pool = BlockPool(6, headroom=0)
    moves = PoolMoves(pool)
    (live,) = pool.allocate(1).blocks
    moves.reserve([(live, 5)])
    moves.commit()
    assert pool.allocate(5).blocks == [1, 2, 3, 4, 0]
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.release([5, 3])
    assert sorted(pool.allocate(2).blocks) == [3, 5]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_handed_out_while_blocks_are_moved(policy: str) -> None:
    pool = BlockPool(6, policy=policy, headroom=0)
    moves = PoolMoves(pool)
    live = pool.allocate(2).blocks
    (cached,) = pool.allocate(1).blocks
    pool.register(cached, 1)
    pool.release([cached])
    before = pool.states().tolist()
    assert moves.reserve([(live[0], cached)]) == [cached]
    with pytest.raises(PoolError, match="being moved"):
        pool.allocate(1)
    with pytest.raises(PoolError, match="it is free"):
        pool.acquire([cached])
    with pytest.raises(PoolError, match="under way"):
        moves.reserve([(live[1], 5)])
    moves.abandon()
    moves.abandon()
    assert pool.states().tolist() == before
    pool.acquire([cached])
    pool.release([*live, cached])
    assert (pool.num_free, pool.num_cached) == (5, 1)


def test_refusals_change_nothing() -> None:
    pool = BlockPool(8, headroom=0, reserved=(0,))
    moves = PoolMoves(pool)
    one, two, three = pool.allocate(3).blocks
    pool.pin([two])
    before = pool.states().tolist()
    for wrong, why in (
        ([(one, 5), (one, 6)], "twice"),
        ([(5, 6)], "FREE"),
        ([(two, 6)], "PINNED"),
        ([(one, three)], "USED"),
        ([(one, 0)], "RESERVED"),
        ([(one, three), (three, 6)], "twice"),
    ):
        with pytest.raises(PoolError, match=why):
            moves.reserve(wrong)
    with pytest.raises(PoolError, match="cannot be evicted"):
        moves.evict([one])
    with pytest.raises(PoolError, match="cannot go"):
        moves.relocate([(one, 6)])
    with pytest.raises(PoolError, match="withdrawn"):
        moves.withdraw([one])
    with pytest.raises(PoolError, match="not reserved"):
        moves.restore([one])
    assert pool.states().tolist() == before


class Broken(NullObserver):
    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        raise RuntimeError("no space left")

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        raise RuntimeError("no space left")


def test_an_observer_that_raises_does_not_break_a_move_off() -> None:
    pool = BlockPool(6, headroom=0, observer=Broken())
    moves = PoolMoves(pool)
    (live,) = pool.allocate(1).blocks
    moves.reserve([(live, 5)])
    moves.commit()
    assert (pool.state(5), pool.state(live)) == (USED, FREE)
    moves.scrap([5])
    assert pool.num_free == 6


def test_a_reservation_that_raises_leaves_the_pool_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(6, headroom=0)
    moves = PoolMoves(pool)
    (live,) = pool.allocate(1).blocks

    def fail(block: int) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pool, "state", lambda block: USED if block == live else FREE)
        patch.setattr(pool._policy, "is_cached", fail)
        with pytest.raises(MemoryError):
            moves.reserve([(live, 5)])
    assert pool.allocate(1).blocks == [1]
    assert moves.reserve([(live, 5)]) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_scrapped_blocks_are_free_whatever_they_were_and_the_others_stay(policy: str) -> None:
    pool = BlockPool(12, policy=policy, headroom=0, reserved=(0,))
    moves = PoolMoves(pool)
    held = pool.allocate(6).blocks
    moves.withdraw([11])
    pool.register_blocks(held, range(10, 16))
    pool.fork(held[:2])
    pool.release(held[3:])
    pool.pin(held[2:3])
    moves.reserve([(held[0], held[3])])
    moves.scrap([held[0], held[3], 9])
    states = pool.states()
    assert states[[held[0], held[3], 9]].tolist() == [FREE] * 3
    assert [pool.state(block) for block in held[1:3]] == [USED, PINNED]
    assert (pool.references(held[1]), pool.num_cached, pool.num_free) == (2, 2, 6)
    assert states[[0, 11]].tolist() == [RESERVED] * 2
    assert [pool.find_prefix([name]) for name in range(10, 16)] == [[], [2], [3], [], [held[4]], [held[5]]]
    taken = pool.allocate(8).blocks
    assert sorted(taken) == sorted(np.flatnonzero(states <= CACHED).tolist())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_withdrawn_blocks_are_never_handed_out_until_restored(policy: str) -> None:
    pool = BlockPool(8, policy=policy, headroom=0)
    moves = PoolMoves(pool)
    moves.withdraw([2, 5, 7])
    assert (pool.usable_blocks, pool.num_allocatable) == (5, 5)
    assert pool.states().tolist() == [FREE, FREE, RESERVED, FREE, FREE, RESERVED, FREE, RESERVED]
    taken = pool.allocate(5).blocks
    assert sorted(taken) == [0, 1, 3, 4, 6]
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    moves.restore([5])
    assert pool.allocate(1).blocks == [5]
    assert pool.usable_blocks == 6


def traffic(pool: BlockPool, steps: int = 400) -> list[object]:
    """What the pool hands out, and has copied, while tables of 1 to 12 blocks come, are hit again, and go."""
    dice = random.Random(3)
    tables: list[list[int]] = []
    told: list[object] = []
    for step in range(steps):
        count = dice.randint(1, 12)
        if dice.random() < 0.5 and pool.can_allocate(count, new_sequence=False):
            hits = pool.find_prefix(range(dice.choice([0, 12 * dice.randrange(step + 1)]), 12 * step)[:6])
            pulled = pool.pull(hits)
            pool.acquire(pulled.blocks)
            allocation = pool.allocate(count) if pool.can_allocate(count, new_sequence=False) else ([], [])
            pool.register_blocks(allocation[0], range(12 * step, 12 * step + len(allocation[0])))
            told += [pulled, allocation]
            tables.append(pulled.blocks + allocation[0])
        elif tables:
            pool.release(reversed(tables.pop(dice.randrange(len(tables)))))
    for table in tables:
        pool.release(table)
    return told


def relocating_made_so_small(size: int) -> BlockPool:
    return BlockPool(size, policy="relocating", headroom=0)


def relocating_shrunk(size: int) -> BlockPool:
    pool = BlockPool(400, policy="relocating", headroom=0)
    moves = PoolMoves(pool)
    for first in range(399, size - 1, -1):  # as a tail comes free, in any order
        moves.withdraw([first])
    return pool


def relocating_shrunk_and_grown(size: int) -> BlockPool:
    pool = relocating_shrunk(50)
    PoolMoves(pool).restore(range(50, size))
    return pool


def switched_to_relocating(size: int) -> BlockPool:
    pool = BlockPool(400, policy="vllm", headroom=0)
    PoolMoves(pool).withdraw(range(size, 400))
    pool.set_policy("relocating")
    return pool


def relocating_put_in_order(size: int) -> BlockPool:
    pool = relocating_shrunk(size)
    PoolMoves(pool).scrap([3])
    return pool


@pytest.mark.parametrize(
    "make", [relocating_shrunk, relocating_shrunk_and_grown, switched_to_relocating, relocating_put_in_order]
)
def test_a_relocating_pool_that_was_made_smaller_works_as_one_of_that_size(make: Callable[[int], BlockPool]) -> None:
    small, shrunk = relocating_made_so_small(150), make(150)
    assert traffic(shrunk) == traffic(small)
    assert shrunk.relocation_copies == small.relocation_copies > 50


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_map_stays_exact_under_moves_of_every_kind(policy: str, tmp_path: Path) -> None:
    """Random traffic with moves, relocations, evictions and withdrawals between; after each step map and pool agree,
    the pool's own counts do, and every prefix is found where its contents went."""
    observer = MapObserver.create(
        MapSpec(engine_id="moves", kind="reference", model="none", pool="kv", total_blocks=BLOCKS, block_tokens=16,
                block_bytes=1, dtype="none", policy=policy), tmp_path)  # fmt: skip
    assert observer.path is not None
    pool = BlockPool(BLOCKS, policy=policy, headroom=0.1, reserved=(0,), observer=observer)
    moves = PoolMoves(pool)
    reader = MapReader(observer.path)
    dice = random.Random(5)
    tables: list[list[int]] = []
    contents: dict[int, int] = {}  # block to the hash that its contents have
    withdrawn: list[int] = []
    moved = swapped = hashes = 0

    def copied(pairs: list[tuple[int, int]]) -> None:
        read = [contents.pop(source, None) for source, _ in pairs]
        for (_, destination), value in zip(pairs, read, strict=True):
            contents.pop(destination, None)
            if value is not None:
                contents[destination] = value

    for step in range(300):
        choice = dice.random()
        states = pool.states()
        if choice < 0.45 and pool.can_allocate(4, new_sequence=True):
            allocation = pool.allocate(4)
            copied(allocation.copies)
            for block in allocation.blocks:
                contents.pop(block, None)
            full = dice.randint(0, 4)
            names = list(range(hashes, hashes + full))
            hashes += full
            pool.register_blocks(allocation.blocks[:full], names)
            contents.update(zip(allocation.blocks[:full], names, strict=True))
            tables.append(allocation.blocks)
        elif choice < 0.55 and tables:
            table = dice.choice(tables)
            pool.fork(table)
            tables.append(list(table))
        elif choice < 0.8 and tables:
            pool.release(reversed(tables.pop(dice.randrange(len(tables)))))
        elif choice < 0.85:
            cached = np.flatnonzero(states == CACHED).tolist()
            moves.evict(dice.sample(cached, min(len(cached), 2)))
        elif choice < 0.9:
            high, low = np.flatnonzero(states == CACHED)[-3:].tolist(), np.flatnonzero(states == FREE)[:3].tolist()
            pairs = list(zip(high, low, strict=False))
            moves.relocate(pairs)
            copied(pairs)
        elif choice < 0.95:
            moves.restore(withdrawn)
            free = np.flatnonzero(pool.states() == FREE).tolist()
            withdrawn = dice.sample(free, min(len(free), 5))
            moves.withdraw(withdrawn)
        used = np.flatnonzero(pool.states() == USED).tolist()
        places = np.flatnonzero(pool.states() <= CACHED).tolist()
        count = min(len(used), len(places), 6)
        batch = list(zip(dice.sample(used, count), dice.sample(places, count), strict=True))
        cached = moves.reserve(batch)
        if step % 7 == 0:
            moves.abandon()
        else:
            moves.commit()
            aside = {destination: contents.pop(destination, None) for destination in cached}
            back = [(destination, source) for source, destination in batch if destination in aside]
            copied(batch)
            contents.update(
                {source: value for (destination, source) in back if (value := aside[destination]) is not None}
            )
            where = dict(batch)
            tables = [[where.get(block, block) for block in table] for table in tables]
            moved += len(batch)
            swapped += len(cached)
        observer.step_ended(len(tables), 0)
        assert observer.reason == ""
        snapshot = reader.read()
        assert np.array_equal(snapshot.states, pool.states())
        held = Counter(block for table in tables for block in table)
        assert moves.references_of(range(BLOCKS)).tolist() == [held[block] for block in range(BLOCKS)]
        assert snapshot.references is not None
        assert snapshot.references.tolist() == moves.references_of(range(BLOCKS)).tolist()
        assert pool.num_cached == int(np.count_nonzero(pool.states() == CACHED))
        assert pool.num_free == int(np.count_nonzero(pool.states() == FREE))
        for block, name in pool._prefixes.hash_of.items():
            assert contents[block] == name
            assert pool.find_prefix([name]) == [block]
    assert moved > 500
    assert swapped > 50
    assert snapshot.counters["live_moves"] == moved
    reader.close()
    observer.close()
