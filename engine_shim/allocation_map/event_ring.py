"""Writes a step's events to a map's ring: one for each run of neighbouring blocks that had one thing happen to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.journal import HIGH, Batch
from engine_shim.allocation_map.writer import MapWriter


class EventRing:
    """The ring of one writer's map, and its head."""

    def __init__(self, writer: MapWriter) -> None:
        self.ring: NDArray[np.int64] = writer.tables["events"].view(np.int64).reshape(-1, layout.EVENT_WORDS)
        self._head: NDArray[Any] = writer.live.event_head
        self._claim: NDArray[Any] = writer.live.event_claim

    def append(self, batch: Batch) -> int:
        """Write the events of a batch. Returns how many of them were more than the ring holds, and so are lost."""
        runs = journal.event_runs(batch)
        if runs is not None and journal.SILENT.in_any(batch):
            starts, lengths, falling = runs
            keep = (~journal.SILENT.entries(batch)).take(batch.entry).take(starts).nonzero()[0]
            runs = starts.take(keep), lengths.take(keep), None if falling is None else falling.take(keep)
        ring, slots = self.ring, len(self.ring)
        total = len(batch.blocks) if runs is None else len(runs[0])
        head = int(self._head[0])
        lost = self.claim(total)
        at = (head + lost) % slots
        if lost or at + total > slots:
            words = np.empty((total, layout.EVENT_WORDS), np.int64)
            _fill(words, batch, runs)
            words = words[lost:]
            first = min(len(words), slots - at)
            ring[at : at + first] = words[:first]
            ring[: len(words) - first] = words[first:]
        else:
            _fill(ring[at : at + total], batch, runs)
        self.advance(total)
        return lost

    def claim(self, total: int) -> int:
        """As many events are about to be written. Returns how many of them are more than the ring holds."""
        self._claim[0] = int(self._head[0]) + total
        return max(0, total - len(self.ring))

    def advance(self, total: int) -> None:
        """They were written."""
        self._head[0] = int(self._head[0]) + total


def _fill(words: NDArray[np.int64], batch: Batch, runs: journal.Runs | None) -> None:
    """Events of EVENT's fields as its four words each; what is the same for an entry is packed once for each entry."""
    if runs is None:
        entry, blocks, starts = batch.entry, batch.blocks, journal.places(len(words))
    else:
        starts, lengths, falling = runs
        entry, blocks = batch.entry.take(starts), batch.blocks.take(starts)
    batch.words.take(entry, axis=0, out=words, mode="clip")
    if len(batch.sources):
        moves = journal.MOVES.entries(batch).take(entry)
        # One event a move, in order.
        words[moves, 2] = batch.sources << HIGH | batch.entry_owner.take(entry[moves])
    if runs is None:
        np.bitwise_or(blocks, 1 << HIGH, out=words[:, 1])
    else:
        np.bitwise_or(blocks, lengths << HIGH, out=words[:, 1])
        if falling is not None:
            words[:, 3] |= falling.astype(np.int64) << 8
    words[:, 3] += starts << HIGH
