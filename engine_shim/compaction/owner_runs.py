"""Counts the contiguous runs of blocks over all sequences of a pool, as it is and as it will be after moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_shim.layout import BlockState

_CHUNK = 1 << 16  # blocks worked on at a time: what they take stays in the cache


def owned_blocks(owners: NDArray[np.integer], states: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which blocks are live (USED or PINNED) and somebody's: a mask."""
    owned: NDArray[np.bool_] = states == BlockState.USED
    owned |= states == BlockState.PINNED
    owned &= owners != 0
    return owned


def count_runs(owned: NDArray[np.bool_], owners: NDArray[np.integer], positions: NDArray[np.integer] | None) -> int:
    """How many owned blocks have no neighbour before them that their sequence goes on from. Columns of one length."""
    runs = int(np.count_nonzero(owned))
    for start in range(0, owned.size, _CHUNK):
        part = slice(max(0, start - 1), start + _CHUNK)  # with the block before it, so that no pair is missed
        inside, owner = owned[part], owners[part]
        joined = inside[1:] & inside[:-1]
        joined &= owner[1:] == owner[:-1]
        if positions is not None:
            position = positions[part]
            joined &= position[1:] - position[:-1] == 1
        runs -= int(np.count_nonzero(joined))
    return runs


def count_runs_after(
    owned: NDArray[np.bool_],
    owners: NDArray[np.integer],
    positions: NDArray[np.integer] | None,
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
) -> int:
    """The runs of sequences once sources[i] lies at destinations[i]. Changes `owned` to what is owned then."""
    moved = owners.take(sources)
    owners = owners.copy()
    owners[destinations] = moved
    owned[sources] = False
    owned[destinations] = moved != 0
    if positions is not None:
        moved = positions.take(sources)
        positions = positions.copy()
        positions[destinations] = moved
    return count_runs(owned, owners, positions)
