"""A pool of SGLang's by what is noted of it, against a plain model, read from its map as an agent reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.adapters.sglang.slot_pool import MOST_NOTES, MOST_WAITING, Note, SlotPool, Told
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.allocation_map.reader import MapReader
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.layout import SEGMENT_BLOCKS, BlockState

FREE, CACHED, USED, RESERVED = BlockState.FREE, BlockState.CACHED, BlockState.USED, BlockState.RESERVED
NOTES = {Note.TAKE: USED, Note.GIVE_BACK: FREE, Note.LET_GO: CACHED, Note.LOCK: USED}
COUNTERS = ("blocks_allocated", "blocks_freed", "blocks_reused", "blocks_evicted")
MEANS = {
    (FREE, USED): "blocks_allocated",
    (FREE, CACHED): "blocks_allocated",
    (USED, FREE): "blocks_freed",
    (USED, CACHED): "blocks_freed",
    (CACHED, USED): "blocks_reused",
    (CACHED, FREE): "blocks_evicted",
}
PAGES = (40, 2 * SEGMENT_BLOCKS - 1, 2 * SEGMENT_BLOCKS)  # with the padding, a whole number of segments and one more


class Arrivals:
    """Numbers that reach the host when `arrived` says so, in order, as from a device."""

    def __init__(self) -> None:
        self.asked = self.arrived = 0

    def __call__(self, numbers: Any) -> tuple[Any, Callable[[], bool]]:
        self.asked += 1
        mine = self.asked
        return numbers.clone(), lambda: self.arrived >= mine


@contextmanager
def pool_of(pages: int, tokens: int, **copier: Any) -> Iterator[tuple[SlotPool, MapReader]]:
    spec = MapSpec(
        engine_id="test", kind="sglang", model="tiny", pool="kv", total_blocks=pages + 1, block_tokens=tokens,
        block_bytes=1024, dtype="float16", columns=("state",), owner_slots=1, events_per_second=1,
    )  # fmt: skip
    with TemporaryDirectory() as folder, closing(MapWriter.create(spec, Path(folder))) as writer:
        pool = SlotPool(tokens, StateMap(writer), **copier)
        pool.adopt(np.arange(1, pages + 1), np.zeros(0, np.int64))
        pool.publish(0, 0, 0)
        with closing(MapReader(writer.path)) as reader:
            yield pool, reader


def told(pages: list[int], tokens: int, how: Told, part: int) -> torch.Tensor:
    """The tensor that tells of these pages: of each whole, its first `part` slots, its last ones, or its number."""
    first = torch.tensor(pages, dtype=torch.int64).reshape(-1, 1)
    if how is Told.PAGES:
        return first.reshape(-1)
    within = torch.arange(tokens)
    if how is Told.NEW:
        within = within[:part]
    elif how is Told.SLOTS:
        within = within[-part:]
    return (first * tokens + within).reshape(-1)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[Any]]:
    pages, tokens = draw(st.sampled_from(PAGES)), draw(st.sampled_from([1, 3, 16]))
    numbers = st.one_of(st.integers(1, pages), st.sampled_from([1, pages - 1, pages]))
    note = st.tuples(
        st.sampled_from(list(NOTES)),
        st.lists(numbers, min_size=1, max_size=12, unique=True),
        st.sampled_from(list(Told)),
        st.integers(1, tokens),
        st.booleans(),
    )
    return pages, tokens, draw(st.lists(st.one_of(note, note, note, st.sampled_from(["clear", "publish"]))))


@settings(max_examples=150)
@given(history=histories(), late=st.integers(0, 3))
def test_the_map_is_what_the_notes_say(history: tuple[int, int, list[Any]], late: int) -> None:
    pages, tokens, steps = history
    arrivals = Arrivals()
    model = [RESERVED] + [FREE] * pages
    shown, counted, published = list(model), dict.fromkeys(COUNTERS, 0), 0
    with pool_of(pages, tokens, **({"copier": arrivals} if late else {})) as (pool, reader):
        for step in [*steps, "publish"]:
            if step == "clear":
                pool.note(Note.CLEAR)
                model[1:] = [FREE] * pages
            elif step == "publish":
                arrivals.arrived = arrivals.asked
                pool.publish(3, 2, 1)
                for before, after in zip(shown, model, strict=True):
                    if before != after:
                        counted[MEANS[before, after]] += 1
                shown = list(model)
                snapshot = reader.read()
                assert snapshot.states.tolist() == shown
                assert list(snapshot.state_counts[:5]) == [shown.count(state) for state in BlockState]
                assert {name: snapshot.counters[name] for name in COUNTERS} == counted
                published += 1
                told_of = snapshot.running_requests, snapshot.waiting_requests, snapshot.counters["steps"]
                assert told_of == (3, 2, published)
                assert not (pool.map._writer.tables["segments"] % 2).any()
            else:
                what, touched, how, part, padded = step
                numbers = told(touched, tokens, how, part)
                if padded and how is not Told.WHOLE:  # SGLang's tables have 0 and -1 where there is no slot
                    numbers = torch.cat((numbers, torch.tensor([0, -1])))
                pool.note(what, numbers, how)
                numbers.fill_(1)  # a view of a request's row, that SGLang writes to
                for page in touched:
                    model[page] = NOTES[what]


def test_what_has_not_arrived_is_not_shown_and_nothing_overtakes_it() -> None:
    arrivals = Arrivals()
    with pool_of(40, 1, copier=arrivals) as (pool, reader):
        pool.note(Note.TAKE, torch.tensor([5, 6]))
        pool.note(Note.GIVE_BACK, torch.tensor([5]))
        pool.note(Note.CLEAR)
        pool.note(Note.TAKE, torch.tensor([7]))
        for arrived, used in ((0, []), (1, [5, 6]), (2, []), (3, [7])):
            arrivals.arrived = arrived
            pool.publish(1, 0, 1)
            assert np.flatnonzero(reader.read().states == USED).tolist() == used


def test_a_pool_whose_steps_nobody_tells_keeps_few_notes() -> None:
    arrivals = Arrivals()
    arrivals.arrived = 1 << 60
    with pool_of(40, 1, copier=arrivals) as (pool, _):
        for _ in range(3 * MOST_NOTES):
            pool.note(Note.TAKE, torch.tensor([5]))
            assert len(pool._notes) < MOST_NOTES


@pytest.mark.parametrize(("tokens", "slot"), [(1, 41), (1, SEGMENT_BLOCKS - 2), (16, 41 * 16), (1, 10**6), (16, 10**6)])
def test_a_number_beyond_the_pool_is_a_fault_and_not_another_page(tokens: int, slot: int) -> None:
    """As after SGLang's own resizing of a pool, which the map cannot follow."""

    def take_and_publish(pool: SlotPool) -> None:
        pool.note(Note.TAKE, torch.tensor([slot]), Told.NEW)
        pool.publish(1, 0, 1)

    with pool_of(40, tokens) as (pool, _), pytest.raises(IndexError):
        take_and_publish(pool)


@pytest.mark.parametrize("pages", [SEGMENT_BLOCKS - 2, SEGMENT_BLOCKS - 1, SEGMENT_BLOCKS])
def test_the_page_behind_the_last_is_none_at_any_size(pages: int) -> None:
    with pool_of(pages, 1) as (pool, reader):
        pool.note(Note.TAKE, torch.tensor([pages, -1]))
        pool.publish(1, 0, 1)
        assert np.flatnonzero(reader.read().states == USED).tolist() == [pages]
        pool.note(Note.TAKE, torch.tensor([pages + 1]))
        with pytest.raises(IndexError):
            pool.publish(1, 0, 1)


def test_what_waits_behind_others_is_as_it_was_when_it_was_noted() -> None:
    with pool_of(40, 1) as (pool, reader):
        pool._notes.append((Note.LOCK, Told.SLOTS, torch.tensor([9]), lambda: True))
        numbers = torch.tensor([5])
        pool.note(Note.TAKE, numbers)
        numbers.fill_(6)
        pool.publish(1, 0, 1)
        assert np.flatnonzero(reader.read().states == USED).tolist() == [5, 9]


def test_numbers_that_never_arrive_are_a_fault_in_the_end() -> None:
    with pool_of(40, 1, copier=lambda numbers: (numbers, lambda: False)) as (pool, _):
        one = torch.tensor([5])
        for _ in range(MOST_WAITING - 1):
            pool.note(Note.TAKE, one)
        with pytest.raises(RuntimeError, match="have not arrived"):
            pool.note(Note.TAKE, one)
