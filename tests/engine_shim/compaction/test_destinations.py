"""The parts that place many moves at once, against the same done one by one."""

from __future__ import annotations

import numpy as np
import pytest

from engine_shim.compaction import destinations, planning


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct keys", "keys that are there twice"])
@pytest.mark.parametrize("spread", [1, 1 << 16, 1 << 40], ids=["in a row", "far apart", "colliding"])
def test_joined_keys_are_those_that_a_dictionary_finds(spread: int, repeated: bool) -> None:
    dice = np.random.default_rng(5)
    everything = dice.permutation(60_000).astype(np.uint64) * np.uint64(spread) + np.uint64(1 << 32)
    keys = everything[:25_000]
    if repeated:
        keys = np.concatenate((keys, keys[:9_000], np.zeros(4_000, np.uint64)))
    wanted = np.concatenate((everything[10_000:50_000], np.array([0, 1, 2**64 - 1], np.uint64)))
    found, matches = destinations._join(wanted, keys)
    known = set(keys.tolist())
    assert sorted(found.tolist()) == [place for place, key in enumerate(wanted.tolist()) if key in known]
    assert keys[matches].tolist() == wanted[found].tolist()
    assert 0 < found.size < wanted.size  # else nothing was told apart


def test_joining_with_nothing_finds_nothing() -> None:
    none, some = np.zeros(0, np.uint64), np.arange(5, dtype=np.uint64)
    for wanted, keys in ((none, some), (some, none), (none, none)):
        assert [part.size for part in destinations._join(wanted, keys)] == [0, 0]


@pytest.mark.parametrize("high", [1 << 20, 1 << 62], ids=["packed with their place", "too wide for that"])
def test_the_stable_order_is_numpy_s(high: int) -> None:
    keys = np.random.default_rng(3).integers(0, 50, 5_000).astype(np.uint64) * np.uint64(high // 50)
    order = destinations._stable_order(keys)
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()
    assert order.tolist() != np.argsort(keys, kind="stable")[::-1].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_what_is_done_in_chunks_is_what_is_done_at_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(chunk)
    for blocks in (1, 2, 5, 63, 64, 65, 200):
        for share in (0.0, 0.3, 0.9, 1.0):
            states = np.where(dice.random(blocks) < share, dice.integers(0, 2, blocks), dice.integers(2, 5, blocks))
            owners, positions = dice.integers(0, 3, blocks), dice.integers(0, 4, blocks)
            plans = []
            for size in (1 << 16, chunk):
                monkeypatch.setattr(planning, "_CHUNK", size)
                plans.append(planning.plan_moves(states, owners=owners, positions=positions))
            whole, pieces = plans
            assert pieces.moves.tolist() == whole.moves.tolist()
            assert (pieces.window, pieces.largest_run_before, pieces.largest_run_after) == (
                whole.window,
                whole.largest_run_before,
                whole.largest_run_after,
            )
            assert (pieces.runs_before, pieces.runs_after) == (whole.runs_before, whole.runs_after)
            if len(whole.moves):
                after, moved = np.array(states), whole.moves
                owners[moved[:, 1]], positions[moved[:, 1]] = owners[moved[:, 0]], positions[moved[:, 0]]
                after[moved[:, 0]], after[moved[:, 1]] = 0, 2
                assert planning.sequence_runs(owners, positions, after) == whole.runs_after
