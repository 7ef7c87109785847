"""Writes a step's events to a map's ring: one for each run of neighbouring blocks that had one thing happen to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.journal import Batch
from engine_shim.allocation_map.writer import MapWriter


class EventRing:
    """The ring of one writer's map, and its head."""

    def __init__(self, writer: MapWriter) -> None:
        self._ring: NDArray[np.int64] = writer.tables["events"].view(np.int64).reshape(-1, layout.EVENT_WORDS)
        self._head: NDArray[Any] = writer.live.event_head
        self._claim: NDArray[Any] = writer.live.event_claim

    def append(self, batch: Batch) -> int:
        """Write the events of a batch. Returns how many of them were more than the ring holds, and so are lost."""
        starts, lengths, falling = journal.event_runs(batch)
        if journal.SILENT.in_any(batch):
            keep = (~journal.SILENT.entries(batch)).take(batch.entry).take(starts).nonzero()[0]
            starts, lengths = starts.take(keep), lengths.take(keep)
            falling = None if falling is None else falling.take(keep)
        ring, slots, total = self._ring, len(self._ring), len(starts)
        head = int(self._head[0])
        self._claim[0] = head + total
        lost = max(0, total - slots)
        at = (head + lost) % slots
        if lost or at + total > slots:
            words = np.empty((total, layout.EVENT_WORDS), np.int64)
            _fill(words, batch, starts, lengths, falling)
            words = words[lost:]
            first = min(len(words), slots - at)
            ring[at : at + first] = words[:first]
            ring[: len(words) - first] = words[first:]
        else:
            _fill(ring[at : at + total], batch, starts, lengths, falling)
        self._head[0] = head + total
        return lost


def _fill(
    words: NDArray[np.int64],
    batch: Batch,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    falling: NDArray[np.bool_] | None,
) -> None:
    """Events of EVENT's fields as its four words each; what is the same for an entry is packed once for each entry."""
    entry = batch.entry.take(starts)
    words[:, 0] = batch.entry_time_ns.take(entry)
    words[:, 1] = lengths << 32 | batch.blocks.take(starts)
    words[:, 2] = (batch.entry_extra << 32 | batch.entry_owner).take(entry)
    if len(batch.sources):
        moves = journal.MOVES.entries(batch).take(entry)
        # One event a move, in order.
        words[moves, 2] = batch.sources << 32 | batch.entry_owner.take(entry[moves])
    last = ((batch.entry_shift << 32) + batch.entry_kind).take(entry) + (starts << 32)
    if falling is not None:
        last |= falling.astype(np.int64) << 8
    words[:, 3] = last
