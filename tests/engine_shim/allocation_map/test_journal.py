"""The bulk arithmetic of one engine step, against the same done one block at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.allocation_map import journal
from engine_shim.layout import EventKind

ELEMENTS = st.lists(
    st.tuples(
        st.integers(0, 5),  # block
        st.booleans(),  # is it a setter?
        st.integers(-9, 9),  # what it sets
        st.integers(-2, 2),  # what it adds where it does not set
    ),
    min_size=1,
    max_size=40,
)


def as_arrays(elements: list[tuple[int, bool, int, int]]) -> tuple[np.ndarray, ...]:
    blocks, setter, value, added = (np.array(part) for part in zip(*elements, strict=True))
    return blocks.astype(np.int64), setter, value.astype(np.int64), added.astype(np.int64)


@given(ELEMENTS)
def test_previous_is_the_last_earlier_setter_of_the_block(elements: list[tuple[int, bool, int, int]]) -> None:
    blocks, setter, value, _ = as_arrays(elements)
    before = blocks + 100
    current: dict[int, int] = {}
    expected = []
    for block, is_set, new, _added in elements:
        expected.append(current.get(block, block + 100))
        if is_set:
            current[block] = new
    got = journal.previous(journal.order_by_block(blocks), setter, value, before)
    assert got.tolist() == expected


@given(ELEMENTS)
def test_running_adds_on_top_of_the_last_setter(elements: list[tuple[int, bool, int, int]]) -> None:
    blocks, setter, value, added = as_arrays(elements)
    before = blocks + 100
    current: dict[int, int] = {}
    expected = []
    for block, is_set, new, plus in elements:
        current[block] = new if is_set else current.get(block, block + 100) + plus
        expected.append(current[block])
    got = journal.running(journal.order_by_block(blocks), setter, value, added, before)
    assert got.tolist() == expected


def flat(entries: list[tuple[int, list[int], int, int]]) -> journal.Batch:
    """Entries of (kind, blocks, owner, position), as an observer notes them."""
    heads = [word for kind, blocks, owner, position in entries
             for word in (0, len(blocks), owner, kind | position << journal.HIGH)]  # fmt: skip
    return journal.flatten(heads, [block for _, blocks, _, _ in entries for block in blocks])


def runs_of(batch: journal.Batch) -> journal.Runs:
    """Also where no two blocks make a run."""
    alone = (np.arange(len(batch.blocks)), np.ones(len(batch.blocks), np.int64), None)
    return journal.event_runs(batch) or alone


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=6))
def test_event_runs_spell_the_same_blocks_in_the_same_order(lists: list[list[int]]) -> None:
    entries = [(int(EventKind.ALLOCATE), blocks, number, 0) for number, blocks in enumerate(lists)]
    batch = flat(entries)
    spelled = []
    owners = []
    starts, lengths, falling = runs_of(batch)
    downwards = np.zeros(len(starts), bool) if falling is None else falling
    for start, length, down in zip(starts, lengths, downwards, strict=True):
        first = int(batch.blocks[start])
        spelled += [first + (-i if down else i) for i in range(int(length))]
        owners += [int(batch.entry_owner[batch.entry[start]])] * int(length)
    assert spelled == [block for blocks in lists for block in blocks]
    assert owners == [number for number, blocks in enumerate(lists) for _ in blocks]


def test_a_table_that_grows_upwards_or_is_freed_backwards_is_one_event() -> None:
    entries = [
        (int(EventKind.ALLOCATE), list(range(10, 200)), 1, 0),
        (int(EventKind.FREE), list(range(199, 9, -1)), 1, 0),
    ]
    starts, lengths, falling = runs_of(flat(entries))
    assert lengths.tolist() == [190, 190]
    assert falling is not None
    assert falling.tolist() == [False, True]
    assert starts.tolist() == [0, 190]


def test_entries_that_do_not_name_as_many_blocks_as_they_say_are_refused() -> None:
    with pytest.raises(ValueError, match="entries of 2 blocks name 3"):
        journal.flatten([0, 2, 0, 1], [4, 5, 6])


def test_positions_follow_the_first_one_within_each_entry() -> None:
    batch = flat([(1, [7, 3, 9], 0, 5), (1, [4], 0, 0), (1, [], 0, 9), (1, [8, 8], 0, 2)])
    assert batch.position.tolist() == [5, 6, 7, 0, 2, 3]


def test_histogram_bounds_are_inclusive() -> None:
    counts = journal.histogram_counts(np.array([0, 1, 2, 3, 4, 2**60]))
    assert counts[:3].tolist() == [2, 1, 2]
    assert counts[-1] == 1
