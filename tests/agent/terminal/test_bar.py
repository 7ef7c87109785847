"""The block bar: what is in a cell is seen in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.terminal.bar import STRIPES, cells_wanted, rows_of, states_of, stripes
from agent.terminal.words import ASCII, STATE_ORDER, UNICODE
from agent.wire import BlockStateName, MapCells

BLOCKS = st.dictionaries(st.sampled_from(STATE_ORDER), st.integers(0, 10_000))


def cells_of(per_cell: int, counts: dict[BlockStateName, list[int]]) -> MapCells:
    length = len(next(iter(counts.values())))
    return MapCells(
        id="a",
        sequence=2,
        snapshot_age_seconds=0,
        total_blocks=per_cell * length,
        blocks_per_cell=per_cell,
        cells=length,
        state=[0] * length,
        counts=counts,
        references=None,
        age_seconds=None,
        owner=None,
        owners=[],
    )


@given(BLOCKS)
def test_every_state_of_a_cell_is_seen(blocks: dict[BlockStateName, int]) -> None:
    present = {state for state, number in blocks.items() if number}
    drawn = stripes(blocks)
    assert len(drawn) == STRIPES
    if not present:
        assert set(drawn) == {"unknown"}
    elif len(present) <= STRIPES:
        assert set(drawn) == present
    else:  # more than there is room for: the held ones, of which one is enough to break a run
        assert drawn == [state for state in STATE_ORDER if state in present][:STRIPES]


def test_one_used_block_among_thousands_is_seen_and_shares_decide_the_rest() -> None:
    assert stripes({"cached": 9999, "used": 1}) == ["used", "cached", "cached", "cached"]
    assert stripes({"cached": 2, "used": 2}) == ["used", "used", "cached", "cached"]
    assert stripes({"free": 8}) == ["free"] * 4
    assert stripes({"free": 1, "cached": 7}) == ["cached", "cached", "cached", "free"]


def test_a_column_a_block_where_that_is_enough() -> None:
    assert cells_wanted(16, 16) == 16
    assert cells_wanted(17, 16) == 4
    cells = cells_of(1, {"used": [1, 0, 0], "free": [0, 1, 0]})
    assert states_of(cells) == ["used", "free", "unknown"]
    assert states_of(cells_of(2, {"used": [1, 2], "free": [1, 0]})) == ["used"] * 2 + ["free"] * 2 + ["used"] * 4


def test_rows_hold_whole_cells() -> None:
    states = stripes({"used": 1}) + stripes({"free": 1}) + stripes({"cached": 1})
    assert rows_of(states, 8) == [states[:8], states[8:]]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_states_are_told_apart_without_colours(glyphs: object) -> None:
    assert isinstance(glyphs, type(UNICODE))
    assert len({glyphs.states[state] for state in STATE_ORDER}) == len(STATE_ORDER)
    assert all(glyphs.plain(character) == character for character in glyphs.states.values())
    assert ASCII.plain(UNICODE.states["used"]) == "?"  # and a character that it has not is noticed
