"""What the colours of the map tell, cell by cell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from agent import wire
from dashboard.colouring import AGES_SECONDS, by_age, by_owner, by_references, by_state, lit, owner_slots
from dashboard.palette import DARK, LIGHT, STATE_ORDER, Theme

Cells = Callable[..., wire.MapCells]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_states_of_single_blocks(theme: Theme, cells: Cells) -> None:
    states = np.array([0, 1, 2, 3, 4], np.uint8)
    found = by_state(cells(states), theme)
    names = [STATE_ORDER[index] for index in found.pixels[:, 0]]
    assert names == ["free", "cached", "used", "pinned", "reserved"]
    assert found.colours == tuple(theme.states[name] for name in STATE_ORDER)


def test_owners_by_slot_and_the_rest_in_common(cells: Cells) -> None:
    owners = ["a", "b", wire.ENDED_OWNER]
    found = by_owner(cells(np.full(5, 2, np.uint8), owner=[0, 1, 2, -1, 0], owners=owners), LIGHT, {"a": 3})
    assert found is not None
    used = [found.colours[index] for index in found.pixels[:, 0]]
    assert used == [LIGHT.series[3], LIGHT.others, LIGHT.states["cached"], LIGHT.states["free"], LIGHT.series[3]]
    assert {word: colour for colour, word in found.legend}["a"] == LIGHT.series[3]


def test_an_owner_keeps_its_slot_while_it_is_among_the_largest(cells: Cells) -> None:
    def slots(owner: list[int], before: dict[str, int]) -> dict[str, int]:
        names = ["a", "b", "c", "d"]
        return owner_slots(cells(np.full(len(owner), 2, np.uint8), owner=owner, owners=names), 2, before)

    first = slots([0, 0, 0, 1, 1, 2], {})
    assert set(first) == {"a", "b"}
    assert sorted(first.values()) == [0, 1]
    later = slots([3, 3, 3, 0, 0, 1], first)
    assert later == {"d": first["b"], "a": first["a"]}
    assert slots([], later) == {}


def test_ages_and_references_in_steps(cells: Cells) -> None:
    ages = [0.0, 1.0, 9.9, 60.0, 4000.0, 5.0]
    column = cells(np.array([2, 2, 2, 2, 2, 0], np.uint8), age_seconds=ages, references=[0, 1, 2, 4, 70, 0])
    by = by_age(column, LIGHT)
    assert by is not None
    steps = [sum(age >= bound for bound in AGES_SECONDS) for age in ages[:5]]
    assert by.pixels[:, 0].tolist() == [*steps, len(LIGHT.shades)]  # a free block has no age that means anything
    counted = by_references(column, LIGHT)
    assert counted is not None
    assert [dict(counted.legend)[counted.colours[i]] for i in counted.pixels[:, 0]] == [
        "0",
        "1",
        "2",
        "3 to 4",
        "9 or more",
        "free",
    ]


def test_what_a_map_does_not_tell_is_none(cells: Cells) -> None:
    dropped = cells(np.full(3, 2, np.uint8), owner=None, age_seconds=None, references=None)
    assert by_owner(dropped, LIGHT, {}) is None
    assert by_age(dropped, LIGHT) is None
    assert by_references(dropped, LIGHT) is None
    assert owner_slots(dropped, 4, {}) == {}


def test_what_is_lit_stays_and_the_rest_fades(cells: Cells) -> None:
    plain = by_state(cells(np.array([2, 2], np.uint8)), LIGHT)
    found = lit(plain, [3, 0], "#ffffff")
    colours = [found.colours[index] for index in found.pixels[:, 0]]
    assert colours[0] == LIGHT.states["used"]
    assert colours[1] != colours[0]
    assert all(part > 200 for part in bytes.fromhex(colours[1][1:]))
