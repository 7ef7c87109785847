"""The consumer *transfer*: what sending live sequences would cost as their blocks lie now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_shim.reference.sequence import Sequence
from engine_shim.runs import count_runs


@dataclass(frozen=True, slots=True)
class TransferCost:
    """A run is one contiguous piece of memory: a descriptor of a transfer."""

    sequences: int
    blocks: int
    runs: int

    @property
    def runs_per_sequence(self) -> float | None:
        """None where there is no sequence."""
        return self.runs / self.sequences if self.sequences else None


def transfer_cost(sequences: Iterable[Sequence]) -> TransferCost:
    """Cost of sending all of these, each whole."""
    tables = [sequence.table.tolist() for sequence in sequences if sequence.table]
    return TransferCost(len(tables), sum(map(len, tables)), sum(map(count_runs, tables)))
