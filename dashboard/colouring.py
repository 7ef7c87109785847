"""What the colours of the block map tell: states, owners, ages or reference counts. Pure."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agent.wire import ENDED_OWNER, MapCells
from dashboard.palette import STATE_ORDER, Theme
from dashboard.raster import MAX_STRIPES, stripes

AGES_SECONDS = (1.0, 10.0, 60.0, 600.0, 3600.0)  # steps between shades
AGE_WORDS = ("< 1 s", "< 10 s", "< 1 min", "< 10 min", "< 1 h", "longer")
REFERENCES = (1, 2, 3, 5, 9)
REFERENCE_WORDS = ("0", "1", "2", "3 to 4", "5 to 8", "9 or more")
FADED = 0.82  # of the ground in the colour of what is not lit


@dataclass(frozen=True, slots=True)
class Colouring:
    """`pixels` is (cells, width): indices into `colours` (#rrggbb). `legend` says in words what a colour means."""

    pixels: NDArray[np.uint8]
    colours: tuple[str, ...]
    legend: tuple[tuple[str, str], ...]


def cell_counts(cells: MapCells) -> NDArray[np.int64]:
    """Blocks of each state in each cell, (len(STATE_ORDER), cells)."""
    absent = np.zeros(cells.cells, dtype=np.int64)
    given = {name: np.asarray(column, dtype=np.int64) for name, column in cells.counts.items()}
    return np.stack([given.get(name, absent) for name in STATE_ORDER])  # type: ignore[call-overload]


def by_state(cells: MapCells, theme: Theme) -> Colouring:
    """Stripes by the shares of the states; the legend is the page's table of states."""
    width = min(MAX_STRIPES, max(cells.blocks_per_cell, 1))
    return Colouring(stripes(cell_counts(cells), width), tuple(theme.states[name] for name in STATE_ORDER), ())


def by_owner(cells: MapCells, theme: Theme, slots: Mapping[str, int]) -> Colouring | None:
    """The owner of most blocks of each cell, by the colour of its slot; None where the map has no owners."""
    if cells.owner is None:
        return None
    others, ended, free = len(theme.series), len(theme.series) + 1, len(theme.series) + 2
    table = [slots.get(name, ended if name == ENDED_OWNER else others) for name in cells.owners] + [free]
    colours = (*theme.series, theme.others, theme.states["cached"], theme.states["free"])
    named = [(theme.series[slot], name) for name, slot in slots.items()]
    words = [(theme.others, "others"), (theme.states["cached"], ENDED_OWNER), (theme.states["free"], "nobody")]
    owner = np.asarray(table, np.uint8)[np.asarray(cells.owner, np.int64)]  # -1, nobody, is the last
    return Colouring(owner[:, None], colours, (*named, *words))


def owner_slots(cells: MapCells, size: int, before: Mapping[str, int]) -> dict[str, int]:
    """A slot of `size` for each of the owners of most cells; who had one keeps it while it is among them."""
    if cells.owner is None:
        return {}
    found = Counter(cells.owners[index] for index in cells.owner if index >= 0)
    found.pop(ENDED_OWNER, None)
    top = [name for name, _ in sorted(found.items(), key=lambda each: (-each[1], each[0]))[:size]]
    kept = {name: slot for name, slot in before.items() if name in top and slot < size}
    free = [slot for slot in range(size) if slot not in kept.values()]
    # Of the slots that are free, by name: a colour says the same after the page was opened anew, if nobody else has it.
    for name in (name for name in top if name not in kept):
        kept[name] = free.pop(zlib.crc32(name.encode()) % len(free))
    return {name: kept[name] for name in top}


def by_age(cells: MapCells, theme: Theme) -> Colouring | None:
    """Since the most recent touch in each cell; None where the map has no times."""
    return None if cells.age_seconds is None else _steps(cells, theme, cells.age_seconds, AGES_SECONDS, AGE_WORDS)


def by_references(cells: MapCells, theme: Theme) -> Colouring | None:
    """The highest reference count of each cell; None where the map has none."""
    return None if cells.references is None else _steps(cells, theme, cells.references, REFERENCES, REFERENCE_WORDS)


def _steps(
    cells: MapCells, theme: Theme, values: Sequence[float], bounds: Sequence[float], words: Sequence[str]
) -> Colouring:
    shade = np.searchsorted(bounds, np.asarray(values, np.float64), side="right").astype(np.uint8)
    counts = cell_counts(cells)
    shade[counts[STATE_ORDER.index("free")] == counts.sum(axis=0)] = len(words)
    colours = (*theme.shades, theme.states["free"])
    return Colouring(shade[:, None], colours, tuple(zip(colours, (*words, "free"), strict=True)))


BY: dict[str, Callable[[MapCells, Theme], Colouring | None]] = {
    "state": by_state,
    "age": by_age,
    "references": by_references,
}


def lit(colouring: Colouring, requested: Sequence[int], ground: str) -> Colouring:
    """Cells without a block of the request fade into the ground; the others stay as they are."""
    dark = np.asarray(requested) == 0
    pixels = colouring.pixels + np.where(dark, len(colouring.colours), 0).astype(np.uint8)[:, None]
    faded = tuple(_mixed(colour, ground, FADED) for colour in colouring.colours)
    return replace(colouring, pixels=pixels, colours=(*colouring.colours, *faded))


def _mixed(colour: str, ground: str, share: float) -> str:
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(ground[1:]), strict=True)
    return "#" + bytes(round((1 - share) * own + share * other) for own, other in parts).hex()
