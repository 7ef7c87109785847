"""The pool and its map end to end: after any mix of operations a reader sees what the pool says."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import POLICIES

BLOCKS = 300


def spec(policy: str = "vllm") -> MapSpec:
    return MapSpec(
        engine_id="follow",
        kind="reference",
        model="none",
        pool="kv",
        total_blocks=BLOCKS,
        block_tokens=16,
        block_bytes=1,
        dtype="none",
        policy=policy,
    )


def test_a_step_that_names_no_block_is_a_step_like_any_other(tmp_path: Path) -> None:
    observer = MapObserver.create(spec(), tmp_path)
    assert observer.path is not None
    pool = BlockPool(BLOCKS, observer=observer)
    pool.release([])
    pool.acquire([])
    pool.fork([])
    pool.pin([])
    pool.unpin([])
    observer.step_ended(0, 0)
    for call in (observer.allocated, observer.reused, observer.shared, observer.unshared, observer.freed):
        call([])
        observer.step_ended(0, 0)
    observer.cached([])
    observer.evicted([])
    observer.wrote([], [], 0)
    observer.step_ended(0, 0)
    assert observer.reason == ""
    reader = MapReader(observer.path)
    assert reader.read().counters["steps"] == 7
    reader.close()
    observer.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_map_follows_the_pool(policy: str, tmp_path: Path) -> None:
    """4,000 random operations in steps of 1 to 40, then states, counts, references, owners and places are compared."""
    observer = MapObserver.create(spec(policy), tmp_path)
    assert observer.path is not None
    pool = BlockPool(BLOCKS, policy=policy, headroom=0.1, reserved=(0,), observer=observer)
    reader = MapReader(observer.path)
    dice = random.Random(3)
    tables: list[list[int]] = []
    sole: dict[int, tuple[int, int]] = {}  # owner and place of blocks that were last allocated, while in use
    pinned: set[int] = set()
    owner = observer.open_owner("one")
    seen = Counter[int]()

    def operate() -> None:
        choice = dice.random()
        if choice < 0.4:
            count = dice.randint(1, 20)
            if pool.can_allocate(count, new_sequence=True):
                place = dice.randint(0, 9)
                table = pool.allocate(count, owner=owner, position=place, new_sequence=True).blocks
                sole.update((block, (owner, place + i)) for i, block in enumerate(table))
                full = dice.randint(0, count)
                pool.register_blocks(table[:full], [dice.randrange(200) for _ in range(full)])
                tables.append(table)
        elif choice < 0.5:
            found = pool.find_prefix([dice.randrange(200) for _ in range(4)])
            for block in found:
                sole.pop(block, None)
            pool.acquire(list(dict.fromkeys(found)), owner=owner)
            tables.append(list(dict.fromkeys(found)))
        elif not tables:
            return
        elif choice < 0.58:
            table = dice.choice(tables)
            pool.fork(table, owner=owner)
            tables.append(list(table))
        elif choice < 0.63:
            table = dice.choice(tables)
            if table and pool.num_allocatable:
                place = dice.randrange(len(table))
                if copied := pool.copy_on_write(table[place], owner=owner, position=place):
                    table[place] = copied.blocks[0]
                    sole[table[place]] = (owner, place)
        elif choice < 0.7:
            fresh = [block for block in dice.choice(tables) if block not in pinned]
            pool.pin(fresh)
            pinned.update(fresh)
        elif choice < 0.78:
            some = dice.sample(sorted(pinned), dice.randint(0, len(pinned)))
            pool.unpin(some)
            pinned.difference_update(some)
        else:
            pool.release(reversed(tables.pop(dice.randrange(len(tables)))), owner=owner)

    for _ in range(200):
        for _ in range(dice.randint(1, 40)):
            operate()
        observer.step_ended(len(tables), 0)
        assert observer.reason == ""
        snapshot = reader.read()
        assert snapshot.references is not None
        assert snapshot.owner is not None
        assert snapshot.position is not None
        states = pool.states()
        assert np.array_equal(snapshot.states, states)
        assert snapshot.state_counts[:5] == tuple(np.bincount(states, minlength=5).tolist())
        held = Counter(block for table in tables for block in table)
        assert snapshot.references.tolist() == [held[block] for block in range(BLOCKS)]
        for block, place in sole.items():
            if held[block]:
                assert (int(snapshot.owner[block]), int(snapshot.position[block])) == place
        sole = {block: place for block, place in sole.items() if held[block]}
        seen.update(states.tolist())
    assert set(seen) == set(BlockState)
    reader.close()
    observer.close()
