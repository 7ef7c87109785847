"""Runs of equal blocks in a mask: what every fragmentation figure is made from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def find_runs(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the maximal runs of True in a one-dimensional mask.

    Returns (starts, lengths), both int64, in ascending order of start; empty where nothing is set.
    """
    if mask.size == 0:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty
    edges = np.flatnonzero(mask[1:] != mask[:-1])
    edges += 1
    if mask[0]:
        edges = np.concatenate(([0], edges))
    if mask[-1]:
        edges = np.concatenate((edges, [mask.size]))
    starts = edges[0::2]
    return starts, edges[1::2] - starts


def count_runs(blocks: list[int]) -> int:
    """Count the contiguous ascending runs in an ordered list of block ids: what a transfer of it pays for."""
    return sum(1 for before, after in pairwise(blocks) if after != before + 1) + bool(blocks)
