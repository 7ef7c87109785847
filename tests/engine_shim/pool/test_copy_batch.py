"""Copies of one step, composed: what lies where after the batch is what copying at once would have left there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.pool.block_pool import Allocation
from engine_shim.pool.copy_batch import CopyBatch

BLOCKS = 8


def copied(memory: list[int], copies: list[tuple[int, int]]) -> list[int]:
    after = list(memory)
    for source, home in copies:
        after[home] = memory[source]
    return after


@settings(max_examples=400)
@given(st.data())
def test_a_batch_is_what_copying_at_once_is(data: st.DataObject) -> None:
    """But for new blocks, which nobody reads before they are written."""
    at_once = list(range(BLOCKS))
    batch = CopyBatch()
    unread: set[int] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        homes = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=4))
        readable = [block for block in range(BLOCKS) if block not in unread]
        if not readable:
            break
        sources = data.draw(st.lists(st.sampled_from(readable), min_size=len(homes), max_size=len(homes)))
        copies = list(zip(sources, homes, strict=True))
        at_once = copied(at_once, copies)
        unread -= set(homes)
        if data.draw(st.booleans()):
            batch.pulled(Allocation([], copies))
        else:
            fresh = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=3))
            batch.allocated(Allocation(fresh, copies))
            unread |= set(fresh) - set(homes)
    wanted = batch.take()
    assert len({home for _, home in wanted}) == len(wanted)
    assert wanted == sorted(wanted)
    assert all(source != home for source, home in wanted)
    composed = copied(list(range(BLOCKS)), wanted)
    assert [composed[b] for b in range(BLOCKS) if b not in unread] == [
        at_once[b] for b in range(BLOCKS) if b not in unread
    ]
    assert batch.take() == []


def test_a_chain_is_one_copy_and_a_way_back_none() -> None:
    batch = CopyBatch()
    batch.pulled(Allocation([], [(1, 2)]))
    batch.allocated(Allocation([2], [(2, 3)]))
    assert batch.take() == [(1, 3)]
    batch.pulled(Allocation([], [(1, 2)]))
    batch.pulled(Allocation([], [(2, 1)]))
    assert batch.take() == [(1, 2)]


def test_two_blocks_that_change_places_are_both_copied() -> None:
    batch = CopyBatch()
    batch.pulled(Allocation([], [(1, 2), (2, 1)]))
    assert batch.take() == [(1, 2), (2, 1)]


def test_a_copy_on_write_of_a_relocated_block_reads_where_it_came_from() -> None:
    batch = CopyBatch()
    batch.pulled(Allocation([4], [(7, 4)]))
    batch.allocated(Allocation([5], [(2, 6), (4, 5)]))
    assert batch.take() == [(2, 6), (7, 4), (7, 5)]
