"""The block map as rows for files: one a cell. Pure."""

from __future__ import annotations

from agent.wire import MapCells


def map_rows(cells: MapCells) -> list[dict[str, object]]:
    """One row a cell: its blocks, how many are in which state, and what else the map tells of it."""
    rows: list[dict[str, object]] = []
    for cell in range(cells.cells):
        first = cell * cells.blocks_per_cell
        row: dict[str, object] = {
            "first_block": first,
            "last_block": min(first + cells.blocks_per_cell, cells.total_blocks) - 1,
        }
        row |= {name: column[cell] for name, column in cells.counts.items()}
        if cells.owner is not None:
            row["owner"] = cells.owners[cells.owner[cell]] if cells.owner[cell] >= 0 else ""
        if cells.references is not None:
            row["references"] = cells.references[cell]
        if cells.age_seconds is not None:
            row["age_seconds"] = cells.age_seconds[cell]
        if cells.requested is not None:
            row["requested"] = cells.requested[cell]
        rows.append(row)
    return rows
