"""`analyze` against a naive oracle, on random and on adversarial maps, and the cases that operators met."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent.fragmentation import BLOCKS_PER_RUN_TO_COUNT_RUNS, FragmentationReport, analyze
from engine_shim.layout import BlockState

FREE, CACHED, USED, PINNED, RESERVED = BlockState


def oracle(states: list[int]) -> FragmentationReport:
    """The definition, block by block."""
    counts = [states.count(state) for state in BlockState]

    def runs(wanted: set[int]) -> list[int]:
        return [len(list(group)) for inside, group in itertools.groupby(states, lambda s: s in wanted) if inside]

    allocatable, free = runs({FREE, CACHED}), runs({FREE})
    classes = max(allocatable, default=0).bit_length()

    def rate(lengths: list[int]) -> float | None:
        return 1.0 - max(lengths) / sum(lengths) if lengths else None

    return FragmentationReport(
        total_blocks=len(states),
        usable_blocks=len(states) - counts[RESERVED],
        free_blocks=counts[FREE],
        cached_blocks=counts[CACHED],
        used_blocks=counts[USED],
        pinned_blocks=counts[PINNED],
        reserved_blocks=counts[RESERVED],
        unknown_blocks=len(states) - sum(counts),
        allocatable_blocks=sum(allocatable),
        largest_allocatable_run=max(allocatable, default=0),
        allocatable_runs=len(allocatable),
        largest_free_run=max(free, default=0),
        free_runs=len(free),
        fragmentation_rate=rate(allocatable),
        strict_fragmentation_rate=rate(free),
        run_length_histogram=tuple(sum(n.bit_length() - 1 == i for n in allocatable) for i in range(classes)),
        run_length_blocks=tuple(sum(n for n in allocatable if n.bit_length() - 1 == i) for i in range(classes)),
    )


run_lists = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 255]), st.integers(1, 6000)), max_size=12)


@given(hnp.arrays(np.uint8, st.integers(0, 300), elements=st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 255])))
def test_equals_the_oracle_on_random_states(states: np.ndarray) -> None:
    assert analyze(states) == oracle(states.tolist())


@given(run_lists)
def test_equals_the_oracle_on_long_runs(runs: list[tuple[int, int]]) -> None:
    states = [state for state, length in runs for _ in range(length)]
    assert analyze(np.array(states, np.uint8)) == oracle(states)


@pytest.mark.parametrize(
    "states",
    [
        pytest.param([FREE, USED] * 500, id="every other block free"),
        pytest.param([FREE, CACHED] * 500, id="free and cached alternate: one allocatable run"),
        pytest.param([FREE], id="one free block"),
        pytest.param([USED], id="one used block"),
        pytest.param([PINNED] * 100, id="all pinned"),
        pytest.param([RESERVED] + [USED] * 99, id="nothing free"),
        pytest.param([USED, *[FREE] * 4096, USED, *[FREE] * 4097, USED], id="around the tabled length"),
        pytest.param(([FREE] * 7 + [USED]) * 64 + [CACHED] * 5000, id="many short runs and a long one"),
        pytest.param([USED] * 15 + [FREE], id="a run that ends the pool"),
        pytest.param(([0] * BLOCKS_PER_RUN_TO_COUNT_RUNS + [2] * BLOCKS_PER_RUN_TO_COUNT_RUNS) * 8, id="at the switch"),
    ],
)
def test_equals_the_oracle_on_adversarial_maps(states: list[int]) -> None:
    assert analyze(np.array(states, np.uint8)) == oracle([int(state) for state in states])


def test_both_ways_of_counting_agree() -> None:
    """Long stretches make it count runs, noise makes it count blocks; a pool with both is the same either way."""
    generator = np.random.default_rng(7)
    noise = generator.integers(0, 6, 2000).astype(np.uint8)
    for stretch in (0, 100_000):
        states = np.concatenate((noise, np.full(stretch, FREE, np.uint8)))
        assert analyze(states) == oracle(states.tolist())


def test_the_null_block_is_no_fragmentation() -> None:
    """An idle pool of 1000 blocks whose block 0 is the engine's null block."""
    report = analyze(np.array([RESERVED] + [FREE] * 999, np.uint8))
    assert (report.used_blocks, report.usable_blocks, report.fragmentation_rate) == (0, 999, 0.0)
    assert report.strict_fragmentation_rate == 0.0


def test_a_rate_is_undefined_where_nothing_is_free() -> None:
    report = analyze([USED, PINNED, CACHED])
    assert report.fragmentation_rate == 0.0
    assert report.strict_fragmentation_rate is None
    assert analyze([USED]).fragmentation_rate is None
    assert analyze([]).fragmentation_rate is None
    assert analyze([USED]).unusable_ratio(4) is None


def test_an_unknown_state_is_neither_free_nor_movable() -> None:
    report = analyze([FREE, 9, FREE])
    assert (report.unknown_blocks, report.free_blocks, report.fragmentation_rate) == (1, 2, 0.5)


def test_a_wider_number_does_not_wrap_round_to_a_known_state() -> None:
    report = analyze(np.array([256, -256, 258, 0], np.int64))
    assert (report.unknown_blocks, report.free_blocks) == (3, 1)


@pytest.mark.parametrize("states", [np.zeros((2, 2), np.uint8), np.zeros(3), "free"])
def test_anything_else_is_refused(states: object) -> None:
    with pytest.raises(ValueError, match="one-dimensional column of integers"):
        analyze(states)  # type: ignore[arg-type]


def test_unusable_ratio_counts_blocks_in_short_runs() -> None:
    report = analyze([FREE, USED, FREE, CACHED, USED, *[FREE] * 5])
    assert report.unusable_ratio(0) == 0.0
    assert report.unusable_ratio(1) == 1 / 8
    assert report.unusable_ratio(2) == 3 / 8
    assert report.unusable_ratio(3) == 1.0
