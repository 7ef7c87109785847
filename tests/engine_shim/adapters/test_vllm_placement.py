"""Where new blocks come from under relocating allocation in vLLM: low addresses, in runs, within a budget of copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_shim.adapters.vllm.placement import EMPTY, PREFIX, TAKEN, Placement


def placed(marks: str) -> Placement:
    """One character a block: `.` in use, `o` holds nothing, `x` holds a prefix."""
    placement = Placement(len(marks))
    placement.mark_all(bytes({".": TAKEN, "o": EMPTY, "x": PREFIX}[mark] for mark in marks))
    return placement


def choose(marks: str, victims: list[int], *, copies: int = 100) -> list[int]:
    return placed(marks).choose(victims, sum(mark != "." for mark in marks), copies)


def test_one_block_fills_the_lowest_hole() -> None:
    assert choose("..o..xxxxx", [9]) == [2]
    assert choose("..x..xxxxx", [9]) == [2]


def test_a_prefix_is_displaced_only_within_the_budget() -> None:
    assert choose("..x..xxxxx", [9], copies=0) == [9]
    assert choose("xxxxxxxxxx", [6, 7, 8, 9], copies=2) == [0, 1, 6, 7]


def test_several_blocks_come_from_a_run_and_not_from_holes() -> None:
    assert choose("x.x.x.x." + "x" * 60, [24, 25, 26, 27]) == [8, 9, 10, 11]


def test_victims_that_lie_low_are_taken_where_they_are() -> None:
    assert choose("..xxx.....xxx", [2, 3, 4]) == [2, 3, 4]


def test_a_high_hit_changes_places_with_a_low_prefix_that_is_no_hit() -> None:
    placement = placed("xx.xxxxxxx")
    assert placement.choose_lower([9], 9, 100, {9}) == [(9, 0)]
    assert placement.choose_lower([9], 9, 100, {0, 9}) == [(9, 1)]
    assert placement.choose_lower([9], 9, 1, {9}) == []  # two copies
    assert placed("o..xxxxxxx").choose_lower([9], 8, 1, {9}) == [(9, 0)]  # one


def test_low_hits_stay() -> None:
    assert placed("xxxxxxxxxx").choose_lower([0, 1], 10, 100, {0, 1}) == []


def test_asking_for_lower_places_takes_none() -> None:
    placement = placed("xx.xxxxxxx")
    first = placement.choose_lower([9], 9, 100, {9})
    assert placement.choose_lower([9], 9, 100, {9}) == first


@given(st.text("ox.", min_size=1, max_size=60), st.data())
def test_what_is_chosen_was_allocatable_and_within_the_budget(marks: str, data: st.DataObject) -> None:
    allocatable = [block for block, mark in enumerate(marks) if mark != "."]
    if not allocatable:
        return
    victims = data.draw(st.lists(st.sampled_from(allocatable), min_size=1, unique=True))
    copies = data.draw(st.integers(0, 10))
    placement = placed(marks)
    chosen = placement.choose(victims, len(allocatable), copies)
    assert len(set(chosen)) == len(victims)
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(allocatable)
    displaced = [block for block in chosen if marks[block] == "x" and block not in victims]
    assert len(displaced) <= copies
    again = placement.choose(victims[:1], len(allocatable), 0) if victims[0] not in chosen else []
    assert set(again).isdisjoint(chosen)  # what was chosen is taken
