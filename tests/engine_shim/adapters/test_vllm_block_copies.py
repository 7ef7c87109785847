"""A step's copies, made as one gather and one scatter, leave each block with the contents that were promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_shim.adapters.vllm.block_copies import StepCopies

BLOCKS = 8


@given(st.data())
def test_each_block_ends_with_what_was_promised(data: st.DataObject) -> None:
    """Contents move, change places and are handed out in any order; `wanted` says by which block each is known."""
    copies = StepCopies()
    wanted: dict[int, int] = {block: block for block in range(BLOCKS)}  # block to contents; those handed out are absent
    for _ in range(data.draw(st.integers(0, 12))):
        one, other = data.draw(st.permutations(range(BLOCKS)))[:2]
        action = data.draw(st.sampled_from(("move", "exchange", "hand out")))
        if action == "hand out":
            copies.forget([one])
            wanted.pop(one, None)
        elif one in wanted and action == "exchange" and other in wanted:
            copies.apply(copies.composed([(one, other), (other, one)]))
            wanted[one], wanted[other] = wanted[other], wanted[one]
        elif one in wanted and other not in wanted:
            copies.apply(copies.composed([(one, other)]))
            wanted[other] = wanted.pop(one)
    free = [block for block in range(BLOCKS) if block not in wanted]
    on_write = [(source, free[0]) for source in list(wanted)[:1]] if free else []
    drained = copies.drain(on_write)
    memory = list(range(BLOCKS))
    gathered = [memory[source] for source, _ in drained]
    for (_, destination), contents in zip(drained, gathered, strict=True):
        memory[destination] = contents
    assert len({destination for _, destination in drained}) == len(drained)
    assert {block: memory[block] for block in wanted} == wanted
    assert all(memory[copy] == wanted[source] for source, copy in on_write)
    assert len(copies) == 0


def test_what_has_come_back_is_not_copied() -> None:
    copies = StepCopies()
    copies.apply(copies.composed([(1, 2)]))
    copies.apply(copies.composed([(2, 1)]))
    assert len(copies) == 0
    assert copies.drain([(1, 5)]) == [(1, 5)]


def test_a_change_that_is_worked_out_is_not_made_yet() -> None:
    copies = StepCopies()
    copies.composed([(1, 2)])
    assert copies.drain([]) == []


def test_sources_are_what_is_still_to_be_read() -> None:
    copies = StepCopies()
    copies.apply(copies.composed([(1, 2), (3, 4)]))
    copies.apply(copies.composed([(2, 5)]))  # the contents of 1 by now
    assert copies.sources() == {1, 3}
    copies.forget([4])
    assert copies.sources() == {1}
    copies.drain([])
    assert copies.sources() == set()
