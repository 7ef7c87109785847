"""Sizes of chunks, for engines whose chunks cost something by themselves and something by the move."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine_shim.compaction.chunk_costs import ChunkCosts

STEP_SECONDS, MOST_MOVES = 0.002, 512


def steps(cost: Callable[[int, int], float], count: int = 60) -> list[tuple[int, float]]:
    """Moves and seconds of each of `count` steps, filled with chunks as a run fills them. `cost` is of so many moves
    in the n-th step."""
    costs = ChunkCosts()
    done = []
    for step in range(count):
        seconds, moves, first = 0.0, 0, True
        while size := min(MOST_MOVES, max(int(first), costs.fitting(STEP_SECONDS - seconds, first))):
            took = cost(size, step)
            costs.took(took, size)
            seconds, moves, first = seconds + took, moves + size, False
        done.append((moves, seconds))
    return done


@pytest.mark.parametrize("fixed", [0.0, 0.0001, 0.0003, 0.00061, 0.0009, 0.0011, 0.0015, 0.0019])
def test_a_fixed_cost_below_the_budget_does_not_keep_chunks_small(fixed: float) -> None:
    done = steps(lambda moves, step: fixed + 1e-6 * moves)
    fits = int((STEP_SECONDS - fixed) / 1e-6)
    assert sum(moves for moves, _ in done[30:]) / 30 > min(MOST_MOVES, fits) / 3
    assert max(seconds for _, seconds in done) <= 1.05 * STEP_SECONDS  # guesses, while they are learnt


@pytest.mark.parametrize("each", [0.00005, 0.0003, 0.0009])
def test_moves_that_cost_by_the_move_stay_within_the_budget(each: float) -> None:
    done = steps(lambda moves, step: each * moves)
    assert max(seconds for _, seconds in done) <= STEP_SECONDS + 1e-9
    assert all(moves >= 1 for moves, _ in done)


def test_one_move_in_more_than_half_of_a_step_is_seldom_tried_in_pairs() -> None:
    """From single moves alone nobody can tell whether they are dear or the chunk is."""
    done = steps(lambda moves, step: 0.0019 * moves)
    assert [moves for moves, _ in done].count(1) >= len(done) - 2
    assert max(moves for moves, _ in done) == 2


def test_what_alone_exceeds_the_budget_stays_alone() -> None:
    assert {moves for moves, _ in steps(lambda moves, step: 0.0025 + 1e-6 * moves)} == {1}


def test_what_was_learnt_in_a_hiccup_is_unlearnt() -> None:
    dice = random.Random(1)
    done = steps(lambda moves, step: (0.0011 + 1e-6 * moves) * (5 if dice.random() < 0.02 else 1), 600)
    assert sum(moves for moves, _ in done) / 600 > 50


def test_a_fixed_cost_that_grows_while_a_run_goes_on_is_learnt_anew() -> None:
    done = steps(lambda moves, step: (0.0003 if step < 50 else 0.0015) + 1e-6 * moves, 400)
    assert sum(moves for moves, _ in done[250:]) / 150 > 30


def test_one_slow_chunk_is_forgotten_in_a_few_steps() -> None:
    done = steps(lambda moves, step: (0.0003 + 4e-6 * moves) * (10 if step == 30 else 1))
    before = done[29][0]
    assert done[31][0] < 0.7 * before  # it was believed at first
    assert all(moves > 0.9 * before for moves, _ in done[37:])


def test_chunks_that_are_slow_from_now_on_stay_smaller() -> None:
    done = steps(lambda moves, step: (0.0003 + 4e-6 * moves) * (3 if step >= 30 else 1), 120)
    assert max(seconds for _, seconds in done[36:]) <= STEP_SECONDS


def test_the_last_chunk_of_a_plan_does_not_make_the_next_ones_small() -> None:
    costs = ChunkCosts()

    def made(count: int) -> None:
        costs.took(0.0003 + 4e-6 * count, count)

    made(1)
    for _ in range(20):
        made(costs.fitting(STEP_SECONDS, True))
    usual = costs.fitting(STEP_SECONDS, True)
    assert usual > 100
    made(3)
    assert costs.fitting(STEP_SECONDS, True) > 0.9 * usual
