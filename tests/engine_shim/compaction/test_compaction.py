"""The move planner against brute force, against its own bound on large pools, and on pools made to trip it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_shim.compaction.planning import MovePlan, chunks, plan_moves, sequence_runs
from engine_shim.errors import PoolError, SettingsError
from engine_shim.layout import BlockState
from engine_shim.pool.block_pool import BlockPool

FREE, CACHED, USED, PINNED, RESERVED = (int(state) for state in BlockState)
UNKNOWN = 9

Pool = tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]  # states, owners, positions


def longest_run(states: tuple[int, ...]) -> int:
    best = run = 0
    for state in states:
        run = run + 1 if state in (FREE, CACHED) else 0
        best = max(best, run)
    return best


def reachable_runs(states: tuple[int, ...]) -> list[int]:
    """The longest allocatable run after 0, 1, 2, ... moves, by trying every move from every state."""
    simple = tuple(FREE if state == CACHED else state for state in states)
    seen, frontier, best = {simple}, [simple], [longest_run(simple)]
    while frontier:
        following = []
        for state in frontier:
            for source, what in enumerate(state):
                if what != USED:
                    continue
                for destination, where in enumerate(state):
                    if where == FREE:
                        moved = list(state)
                        moved[source], moved[destination] = FREE, USED
                        after = tuple(moved)
                        if after not in seen:
                            seen.add(after)
                            following.append(after)
        frontier = following
        if frontier:
            best.append(max(best[-1], max(map(longest_run, frontier))))
    return best


def apply(plan: MovePlan, states: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The states after the plan; every move is checked on the way."""
    after = states.copy()
    for source, destination in plan.moves.tolist():
        assert after[source] == USED
        assert after[destination] in (FREE, CACHED)
        assert plan.window.start <= source < plan.window.start + plan.window.length
        assert not plan.window.start <= destination < plan.window.start + plan.window.length
        after[source], after[destination] = FREE, USED
    return after


def check(plan: MovePlan, column: NDArray[np.uint8]) -> None:
    """What holds for every plan, and that its figures are those of the pool after it."""
    assert plan.moves.dtype == np.int64
    assert plan.moves.shape == (len(plan.moves), 2)
    assert not plan.moves.flags.writeable
    sources, destinations = plan.moves.T
    assert np.unique(sources).size == np.unique(destinations).size == len(plan.moves)
    assert (np.diff(sources) > 0).all()
    after = apply(plan, column)
    total = int((column <= CACHED).sum())
    assert plan.largest_run_before == longest_run(tuple(column.tolist()))
    assert plan.largest_run_after == longest_run(tuple(after.tolist()))
    assert plan.cached_lost == int((column[destinations] == CACHED).sum())
    free_outside = int((column == FREE).sum()) - int(
        (column[plan.window.start : plan.window.start + plan.window.length] == FREE).sum()
    )
    assert plan.cached_lost == max(0, len(plan.moves) - free_outside) * bool(len(plan.moves))
    if total == 0:
        assert plan.fragmentation_before is plan.fragmentation_after is None
        return
    assert plan.fragmentation_before == 1 - plan.largest_run_before / total
    assert plan.fragmentation_after == 1 - plan.largest_run_after / total


def random_pool(dice: np.random.Generator, most: int) -> NDArray[np.uint8]:
    weights = dice.dirichlet(np.full(6, 1.0)) * (1, 1, 2, 0.2, 0.1, 0.1)
    blocks = int(dice.integers(0, most + 1) if dice.random() < 0.3 else most)
    return dice.choice([FREE, CACHED, USED, PINNED, RESERVED, UNKNOWN], blocks, p=weights / weights.sum()).astype(
        np.uint8
    )


def test_moves_equal_brute_force_on_random_pools() -> None:
    dice = np.random.default_rng(1)
    known: dict[tuple[int, ...], list[int]] = {}
    seen = {"moved": 0, "unreachable": 0, "limited": 0}
    for _ in range(5000):
        column = random_pool(dice, 10)
        target = float(dice.choice([0.0, 0.1, 0.25, 0.3, 0.5, 0.9]))
        max_moves = None if dice.random() < 0.6 else int(dice.integers(0, 5))
        states = tuple(FREE if state == CACHED else int(state) for state in column)
        if states not in known:
            known[states] = reachable_runs(states)
        by_moves = known[states]
        plan = plan_moves(column, target=target, max_moves=max_moves)
        check(plan, column)
        total = states.count(FREE)
        wanted = next(
            run for run in range(total + 1) if total == 0 or 1 - Fraction(run, total) <= Fraction(str(target))
        )
        assert plan.wanted_run == wanted
        needed = next((moves for moves, run in enumerate(by_moves) if run >= wanted), None)
        assert plan.reachable == (needed is not None)
        allowed = by_moves[: None if max_moves is None else max_moves + 1]
        aim = min(wanted, max(allowed))
        assert len(plan.moves) == next(moves for moves, run in enumerate(allowed) if run >= aim)
        assert plan.largest_run_after >= aim
        assert plan.meets_target == (max(allowed) >= wanted)
        assert plan.limited == (max(allowed) < min(wanted, max(by_moves)))
        seen["moved"] += bool(len(plan.moves))
        seen["unreachable"] += not plan.reachable
        seen["limited"] += plan.limited
    assert min(seen.values()) > 100, seen


def test_brute_force_tells_a_worse_plan() -> None:
    # One move is enough here; a planner that took the first window would need two.
    states = (FREE, USED, USED, FREE, FREE, USED, FREE)
    assert reachable_runs(states)[:2] == [2, 4]
    assert states[:3].count(USED) == 2
    assert len(plan_moves(states, target=0.25).moves) == 1


def test_ties_lose_fewer_cached_blocks_and_then_take_the_higher_address() -> None:
    # Windows of two at 0, 1, 2, .. 5 are alike in moves; only a FREE block outside saves the cached ones.
    column = np.array([CACHED, USED, CACHED, USED, FREE, USED, CACHED], np.uint8)
    plan = plan_moves(column, target=0.5)
    check(plan, column)
    assert plan.wanted_run == 2
    assert (plan.window, plan.cached_lost) == ((5, 2), 0)
    alike = np.array([FREE, USED, FREE, USED, FREE, USED, FREE], np.uint8)
    assert plan_moves(alike, target=0.5).window == (5, 2)


def test_ties_among_windows_agree_with_trying_them_all() -> None:
    dice = np.random.default_rng(5)
    for _ in range(1500):
        column = random_pool(dice, 12)
        plan = plan_moves(column, target=0.3)
        if not len(plan.moves):
            continue
        length, costs = plan.window.length, []
        for start in range(column.size - length + 1):
            inside = column[start : start + length]
            if (inside <= USED).all():
                moves = int((inside == USED).sum())
                free_outside = int((column == FREE).sum() - (inside == FREE).sum())
                costs.append((moves, max(0, moves - free_outside), -start))
        assert (len(plan.moves), plan.cached_lost, -plan.window.start) == min(costs)


@pytest.mark.parametrize(
    ("states", "moves", "reason"),
    [
        pytest.param([], 0, "nothing is allocatable", id="no blocks"),
        pytest.param([USED], 0, "nothing is allocatable", id="one used block"),
        pytest.param([FREE], 0, "met without a move", id="one free block"),
        pytest.param([USED] * 50, 0, "nothing is allocatable", id="all used"),
        pytest.param([FREE, CACHED] * 20, 0, "met without a move", id="all allocatable"),
        pytest.param([UNKNOWN] * 5, 0, "nothing is allocatable", id="nothing known"),
        pytest.param([RESERVED, USED, FREE, USED, FREE], 1, "emptied", id="reserved block 0"),
        pytest.param([PINNED, FREE] * 20, 0, "there already", id="pinned everywhere"),
        pytest.param(
            [FREE, USED, FREE, PINNED, FREE, FREE], 1, "best reachable run is 3", id="best of what pins leave"
        ),
        pytest.param([FREE, USED, FREE, RESERVED, FREE, UNKNOWN, FREE], 1, "best reachable", id="reserved and unknown"),
    ],
)
def test_pools_made_to_trip(states: list[int], moves: int, reason: str) -> None:
    column = np.array(states, np.uint8)
    plan = plan_moves(column, target=0.0)
    check(plan, column)
    assert len(plan.moves) == moves
    assert reason in plan.reason
    assert plan.reachable == ("reachable" not in plan.reason)


def test_the_wanted_run_is_exact() -> None:
    # 1 - 9/10 is above 0.1 in binary arithmetic; a plan that trusted it would want 10.
    assert 1 - 9 / 10 < 0.1 or plan_moves(np.zeros(10, np.uint8), target=0.1).wanted_run == 9
    for total in (10, 30, 70, 1000, 12_345):
        assert plan_moves(np.zeros(total, np.uint8), target=0.1).wanted_run == -(-total * 9 // 10)
    assert plan_moves([FREE] * 10, target=0).wanted_run == 10
    assert plan_moves([FREE] * 10, target=1.0).wanted_run == 0


def test_a_number_too_wide_for_a_byte_is_unknown() -> None:
    plan = plan_moves(np.array([FREE, 258, USED, -255, FREE]), target=0.0)
    assert plan.largest_run_before == 1
    assert not plan.reachable
    assert not len(plan.moves)


@given(st.data())
@settings(max_examples=150)
def test_owners_change_destinations_and_never_the_number_of_moves(data: st.DataObject) -> None:
    states = data.draw(st.lists(st.sampled_from([FREE, FREE, CACHED, USED, USED, PINNED, RESERVED]), max_size=120))
    owners = data.draw(st.lists(st.integers(0, 4), min_size=len(states), max_size=len(states)))
    positions = data.draw(st.lists(st.integers(0, 12), min_size=len(states), max_size=len(states)))
    column = np.array(states, np.uint8)
    plain = plan_moves(column)
    for given_positions in (None, positions):
        plan = plan_moves(column, owners=owners, positions=given_positions)
        check(plan, column)
        assert len(plan.moves) == len(plain.moves)
        assert plan.window == plain.window
        after_owners = np.array(owners, np.int64)
        after_positions = np.array(positions, np.int64)
        sources, destinations = plan.moves.T
        after_owners[destinations] = after_owners[sources]
        after_positions[destinations] = after_positions[sources]
        measured = None if given_positions is None else after_positions
        assert plan.runs_after == sequence_runs(after_owners, measured, apply(plan, column))
        assert plan.runs_before == sequence_runs(owners, given_positions, column)


def ordered_pool(dice: np.random.Generator, blocks: int, sequences: int) -> Pool:
    """Sequences in pieces at random places of a pool, and their owner and position columns."""
    states = np.full(blocks, FREE, np.uint8)
    owners, positions = np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32)
    for owner in range(1, sequences + 1):
        position = 0
        for _ in range(int(dice.integers(1, 8))):
            start, length = int(dice.integers(0, blocks - 8)), int(dice.integers(1, 8))
            for block in range(start, start + length):
                if states[block] == FREE:
                    states[block], owners[block], positions[block] = USED, owner, position
                    position += 1
    return states, owners, positions


def test_large_pools_stay_within_the_window_bound_and_lengthen_runs() -> None:
    dice = np.random.default_rng(3)
    with_positions = with_owners = without = 0
    for _ in range(40):
        states, owners, positions = ordered_pool(dice, 4000, 90)
        plan = plan_moves(states, owners=owners, positions=positions)
        check(plan, states)
        used = np.concatenate(([0], np.cumsum(states == USED)))
        length = plan.wanted_run
        assert len(plan.moves) == int((used[length:] - used[:-length]).min())
        assert plan.meets_target
        assert plan.runs_after is not None
        assert plan.runs_before is not None
        with_positions += plan.runs_after
        for name, other in (("owners", plan_moves(states, owners=owners)), ("none", plan_moves(states))):
            sources, destinations = other.moves.T
            moved_owners, moved_positions = owners.copy(), positions.copy()
            moved_owners[destinations], moved_positions[destinations] = owners[sources], positions[sources]
            runs = sequence_runs(moved_owners, moved_positions, apply(other, states))
            with_owners += runs if name == "owners" else 0
            without += runs if name == "none" else 0
    # Knowing more makes fewer runs; a planner that ignored what it was given would fail here.
    assert with_positions < with_owners < without


def test_a_moved_block_goes_beside_its_sequence() -> None:
    # The window is 0..5; sequence 1 goes on behind block 12, sequence 2 ends before block 16.
    states = [FREE, USED, FREE, FREE, USED, FREE] + [PINNED] * 4 + [USED, FREE, FREE, PINNED, FREE, FREE, USED, FREE]
    owners = [0, 1, 0, 0, 2, 0] + [3] * 4 + [1, 0, 0, 4, 0, 0, 2, 0]
    positions = [0, 8, 0, 0, 0, 0, 0, 1, 2, 3, 7, 0, 0, 0, 0, 0, 1, 0]
    plan = plan_moves(states, owners=owners, positions=positions, target=0.4)
    assert plan.window == (0, 6)
    assert plan.moves.tolist() == [[1, 11], [4, 15]]
    assert plan.runs_before is not None
    assert plan.runs_after == plan.runs_before - 2


def test_blocks_of_one_owner_stay_together_in_a_hole_that_fits() -> None:
    # Three blocks of owner 1 move; holes of 2, 3 and 6 wait. Best fit takes the 3, and leaves the 6 whole.
    states = [FREE] * 10 + [USED] * 3 + [FREE] * 9 + [PINNED, FREE, FREE, PINNED, FREE, FREE, FREE, PINNED] + [FREE] * 6
    owners = [0] * 10 + [1] * 3 + [0] * 9 + [0] * 8 + [0] * 6
    positions = [0] * 10 + [0, 1, 2] + [0] * 9 + [0] * 8 + [0] * 6
    plan = plan_moves(states, owners=owners, positions=positions, target=0.36)
    assert plan.moves.tolist() == [[10, 26], [11, 27], [12, 28]]
    assert plan.runs_after == 1


def test_without_owners_small_holes_are_filled_and_large_ones_last() -> None:
    states = [FREE] * 10 + [USED] * 3 + [FREE] * 9 + [PINNED, FREE, FREE, PINNED, FREE, PINNED] + [FREE] * 6
    plan = plan_moves(states, target=0.30)
    assert sorted(plan.moves[:, 1].tolist()) == [23, 24, 26]


def test_cached_blocks_are_taken_last_and_from_the_shortest_runs() -> None:
    states = (
        [FREE] * 4 + [USED] * 3 + [FREE] * 5 + [PINNED, CACHED, CACHED, CACHED, CACHED, PINNED, FREE, CACHED, PINNED]
    )
    plan = plan_moves(states, target=0.2)
    assert plan.cached_lost == 2
    assert plan.moves.tolist() == [[4, 13], [5, 18], [6, 19]]


def test_runs_of_a_real_pool() -> None:
    pool = BlockPool(32, reserved=(0,), headroom=0.0, policy="lowest-any")
    first, second = pool.allocate(6).blocks, pool.allocate(6).blocks
    gone = pool.allocate(8).blocks
    pool.release(gone[::-1])
    owners, positions = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    for owner, table in ((1, first), (2, second)):
        owners[table], positions[table] = owner, np.arange(6)
    assert sequence_runs(owners, positions, pool.states()) == 2
    positions[first] = positions[first[::-1]]
    assert sequence_runs(owners, positions, pool.states()) == 7
    assert sequence_runs(owners, None, pool.states()) == 2
    pool.pin(second)
    assert sequence_runs(owners, None, pool.states()) == 2  # a pinned sequence is live
    assert sequence_runs([], [], []) == 0


@pytest.mark.parametrize("target", [-0.1, 1.1, float("nan"), float("inf"), "much", True, None])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(SettingsError, match="target="):
        plan_moves([FREE], target=target)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        pytest.param({"states": [FREE], "max_moves": -1}, SettingsError, "max_moves=-1", id="negative moves"),
        pytest.param({"states": [[FREE]]}, PoolError, "states must be a one-dimensional", id="two dimensions"),
        pytest.param({"states": [0.5]}, PoolError, "states must be", id="fractions"),
        pytest.param({"states": [FREE], "owners": []}, PoolError, "owners has 0 entries", id="short owners"),
        pytest.param(
            {"states": [FREE], "owners": [1], "positions": [1, 2]}, PoolError, "positions has 2", id="long positions"
        ),
        pytest.param({"states": [FREE], "positions": [1]}, PoolError, "positions without owners", id="no owners"),
    ],
)
def test_bad_columns_are_named(arguments: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        plan_moves(**arguments)  # type: ignore[arg-type]


def test_chunks_keep_within_both_limits_and_lose_nothing() -> None:
    states = np.array([FREE, USED] * 50, np.uint8)
    plan = plan_moves(states)
    assert len(plan.moves) > 20
    for max_moves, max_bytes, size in ((7, 10**9, 7), (100, 4096 * 5, 5), (100, 10, 1)):
        pieces = list(chunks(plan, max_moves=max_moves, max_bytes=max_bytes, block_bytes=4096))
        assert max(map(len, pieces)) == size
        assert np.array_equal(np.concatenate(pieces), plan.moves)
    assert list(chunks(plan_moves([FREE]), max_moves=1, max_bytes=1, block_bytes=1)) == []
    with pytest.raises(SettingsError, match="max_moves=0"):
        list(chunks(plan, max_moves=0, max_bytes=1, block_bytes=1))
