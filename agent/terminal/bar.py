"""The block bar: a pool's cells as states, one for each column of the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent.terminal.words import STATE_ORDER
from agent.wire import BlockStateName, MapCells

STRIPES = 4  # columns of a cell that stands for several blocks


def cells_wanted(total_blocks: int, columns: int) -> int:
    """How many cells to ask the API for, to fill so many columns at most: a column a block where that is enough."""
    return max(1, total_blocks if total_blocks <= columns else columns // STRIPES)


def states_of(cells: MapCells) -> list[BlockStateName]:
    """In address order. Where a cell is one block, its state; else STRIPES states, in the order of STATE_ORDER.

    A most frequent state alone would hide the one used block that breaks a run: what is present in a cell gets a stripe
    however few it is, and what is left over goes by shares.
    """
    if cells.blocks_per_cell == 1:
        return [_only(cells, cell) for cell in range(cells.cells)]
    drawn: list[BlockStateName] = []
    for cell in range(cells.cells):
        drawn += stripes({state: counts[cell] for state, counts in cells.counts.items() if counts[cell]})
    return drawn


def stripes(blocks: dict[BlockStateName, int], width: int = STRIPES) -> list[BlockStateName]:
    """`width` states for a cell with so many blocks of each; with more states than that, the held ones come first."""
    present = [state for state in STATE_ORDER if blocks.get(state)][:width]
    if not present:
        return ["unknown"] * width
    total = sum(blocks[state] for state in present)
    given = dict.fromkeys(present, 1)
    for _ in range(width - len(present)):
        neediest = max(present, key=lambda state: blocks[state] * width / total - given[state])
        given[neediest] += 1
    return [state for state in present for _ in range(given[state])]


def rows_of(states: Sequence[BlockStateName], columns: int) -> list[list[BlockStateName]]:
    """Rows of at most `columns` states. Give a multiple of STRIPES, so that no cell is broken."""
    return [list(states[start : start + columns]) for start in range(0, len(states), columns)]


def _only(cells: MapCells, cell: int) -> BlockStateName:
    return next((state for state, counts in cells.counts.items() if counts[cell]), "unknown")
