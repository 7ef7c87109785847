"""Looks block ids up in the tables of all live sequences at once, and rewrites them after a move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim.compaction.mover import Moves
from engine_shim.reference.sequence import Sequence


class Hits(NamedTuple):
    """Where blocks stand in tables, one element an occurrence, in the order of sequences and positions."""

    blocks: NDArray[np.int64]
    numbers: NDArray[np.uint32]  # of the sequence
    positions: NDArray[np.uint32]


class BlockTables:
    """The tables of the sequences that `sequences` lists now. Nothing is remembered: each look reads the tables."""

    def __init__(self, sequences: Callable[[], Iterable[Sequence]], num_blocks: int) -> None:
        self._sequences = sequences
        self._wanted = np.zeros(num_blocks, np.bool_)
        self._renamed = np.arange(num_blocks, dtype=np.int64)

    def find(self, blocks: NDArray[np.int64] | None = None) -> Hits:
        """All occurrences of these blocks, or of every block."""
        sequences = [sequence for sequence in self._sequences() if sequence.table]
        if not sequences:
            return Hits(np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0, np.uint32))
        flat = np.frombuffer(b"".join([sequence.table for sequence in sequences]), np.int64)
        starts = np.fromiter(accumulate((len(s.table) for s in sequences), initial=0), np.int64, len(sequences) + 1)
        numbers = np.array([sequence.number for sequence in sequences], np.uint32)
        if blocks is None:
            places = np.arange(flat.size)
        else:
            try:
                self._wanted[blocks] = True
                places = np.flatnonzero(self._wanted[flat])
            finally:
                self._wanted[blocks] = False
        which = np.searchsorted(starts, places, side="right") - 1
        return Hits(flat[places], numbers[which], (places - starts[which]).astype(np.uint32))

    def rename(self, moves: Moves) -> None:
        """Write each move's destination wherever its source stands."""
        renamed = self._renamed
        try:
            renamed[moves[:, 0]] = moves[:, 1]
            for sequence in self._sequences():
                if sequence.table:
                    table = np.frombuffer(sequence.table, np.int64)  # a view, which keeps the array from growing
                    table[:] = renamed[table]
                    del table
        finally:  # what is left here would rename blocks that the next moves do not name
            renamed[moves[:, 0]] = moves[:, 0]
