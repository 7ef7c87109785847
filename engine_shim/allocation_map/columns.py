"""Stores one engine step in a map's columns, counts and histograms: each column is one scatter, the last value wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.journal import Batch, KindSet
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.layout import EventKind

_UNPIN = int(EventKind.UNPIN)
_MS_MASK = 0xFFFFFFFF
_SEGMENT_BITS = layout.SEGMENT_BLOCKS.bit_length() - 1
# In the columns' own types: a scatter that has to cast takes twice as long.
_STATE_AFTER = journal.STATE_AFTER.astype(np.uint8)
_REFERENCES_AFTER = journal.REFERENCES_AFTER.astype(np.uint16)
_GROUP_AFTER = np.where(journal.TAKES_OWNER.table, 0, layout.NO_GROUP).astype(np.uint8)  # 0 stands for the entry's own


@dataclass(slots=True, eq=False)
class Outlook:
    """What a step will change, as far as it has to be known before the first store."""

    changed: NDArray[np.int64]  # (c,) rows, each once
    now_ms: NDArray[np.uint32]  # (e,)
    durations: list[tuple[int, float, NDArray[np.int64]]]  # histogram, sum in seconds, counts by bucket


class ColumnStore:
    """The columns of one writer's map, and those of which a map may hold none: histograms are of every block."""

    def __init__(self, writer: MapWriter) -> None:
        self._columns = columns = writer.columns
        blocks = writer.spec.total_blocks
        self.touched_ms: NDArray[Any] = columns["touched"] if "touched" in columns else np.zeros(blocks, np.uint32)
        self.references: NDArray[Any] = (
            columns["references"] if "references" in columns else np.zeros(blocks, np.uint16)
        )
        self.born_ms = np.zeros(blocks, np.uint32)
        self._last_place = np.zeros(blocks, np.int32)
        own: list[NDArray[Any]] = [self.touched_ms, self.references, self.born_ms]
        self._row_arrays = tuple({id(array): array for array in [*columns.values(), *own]}.values())
        self._created_ns = writer.created_unix_ns
        self._segment_words = writer.tables["segments"]
        # Signed, since NumPy adds signed numbers to unsigned ones as floats; the bits are the same.
        self._state_counts: NDArray[np.int64] = writer.live.state_counts.view(np.int64)
        table = writer.tables["histograms"]
        self._bucket_counts = [table["counts"][index].view(np.int64) for index in range(len(layout.HISTOGRAMS))]
        self._sums: NDArray[np.float64] = table["sum_seconds"]

    def look_ahead(self, batch: Batch) -> Outlook:
        """Work out what depends on the map as it was. Stores nothing in the map."""
        rows, now_ms = batch.rows, ((batch.entry_time_ns - self._created_ns) // 1_000_000).astype(np.uint32)
        place = journal.short_places(len(rows))
        self._last_place[rows] = place
        is_last = self._last_place.take(rows) == place
        last = is_last.nonzero()[0]
        repeated = len(rows) - len(last)
        by_block: journal.BlockOrder | None = None
        durations = []
        for index, kinds, since, starts in (
            (0, journal.ENDS_LIFE, self.born_ms, journal.BEGINS_LIFE),
            (1, journal.EVICTS, self.touched_ms, journal.TOUCHES),
            (2, journal.HITS, self.touched_ms, journal.TOUCHES),
        ):
            if not kinds.in_any(batch):
                continue
            ends = kinds.part(batch)
            if not repeated or not self._starts_before_an_end(batch, starts, kinds, is_last, repeated):
                began = since.take(ends.rows)
            else:
                by_block = by_block or journal.order_by_block(rows)
                setter = starts.entries(batch).take(batch.entry)
                before = since.take(rows).astype(np.int64)
                began = journal.previous(by_block, setter, now_ms.take(batch.entry).astype(np.int64), before)
                began = began.take(ends.places).astype(np.uint32)
            took = now_ms.take(ends.entry) - began
            counts = journal.histogram_counts(took)
            if counts[-1]:
                # Half the range and more is a clock that was set back, not a block of 25 days.
                took[took > _MS_MASK // 2] = 0
                counts = journal.histogram_counts(took)
            durations.append((index, float(np.add.reduce(took, dtype=np.float64)) / 1000, counts))
        return Outlook(rows.take(last) if repeated else rows, now_ms, durations)

    def _starts_before_an_end(
        self, batch: Batch, starts: KindSet, ends: KindSet, is_last: NDArray[np.bool_], repeated: int
    ) -> bool:
        """Is there a block that a step starts and ends, in this order? Hardly ever, and the order costs a sort.

        `repeated` elements are not the last of their block.
        """
        if not starts.in_any(batch):
            return False
        ending = ends.part(batch)
        both = starts.bits & ends.bits & batch.kinds
        if not both and len(ending.places) - np.count_nonzero(is_last.take(ending.places)) == repeated:
            return False  # whatever something else came after was an end
        starting = starts.part(batch)
        last = self._last_place
        last[starting.rows] = -1  # what earlier steps left there
        last[ending.rows] = ending.places
        return bool(np.count_nonzero(last.take(starting.rows) > starting.places))

    def store(self, batch: Batch, ahead: Outlook, tokens_written: NDArray[np.int64]) -> None:
        """Bring columns, counts and histograms up to date, within a publish of the whole."""
        changed = ahead.changed
        state = self._columns["state"]
        counts_before = np.bincount(state.take(changed), minlength=8)
        segments = self._segments_of(batch, changed)
        # Odd from here to the end. What raises or interrupts in between leaves them so: nobody believes them then.
        self._segment_words += segments
        self._store_states(batch)
        counts_after = np.bincount(state.take(changed), minlength=8)
        self._store_references(batch)
        self._store_holders(batch)
        if (tokens := self._columns.get("tokens")) is not None and journal.SETS_TOKENS.in_any(batch):
            _store_tokens(tokens, batch, tokens_written)
        touched = journal.TOUCHES.part(batch)
        now_ms = ahead.now_ms.take(touched.entry)
        self.touched_ms[touched.rows] = now_ms
        if journal.SETS_BIRTH.in_any(batch):
            born = journal.SETS_BIRTH.part(batch)
            self.born_ms[born.rows] = now_ms if born is touched else ahead.now_ms.take(born.entry)
        if len(batch.moved_blocks):
            for array in self._row_arrays:
                array[batch.moved_blocks] = array[batch.moved_rows]
        self._segment_words += segments
        counts_after -= counts_before
        self._state_counts += counts_after[:8]
        for index, seconds, counts in ahead.durations:
            self._bucket_counts[index] += counts
            self._sums[index] += seconds

    def _segments_of(self, batch: Batch, changed: NDArray[np.int64]) -> NDArray[np.uint64]:
        """1 for each segment that has one of these rows, or a block that moved; 0 for the others."""
        hits = np.bincount(changed >> _SEGMENT_BITS, minlength=len(self._segment_words))
        if len(batch.moved_blocks):
            hits[batch.moved_blocks >> _SEGMENT_BITS] = 1
        return np.minimum(hits, 1).view(np.uint64)

    def _store_states(self, batch: Batch) -> None:
        state = self._columns["state"]
        if journal.UNPINS.in_any(batch):
            after = journal.STATE_AFTER.take(batch.entry_kind)
            unpins = batch.entry_kind == _UNPIN
            after[unpins] = batch.entry_extra[unpins]
            after = after.take(batch.entry)
            state[batch.rows[after >= 0]] = after[after >= 0]
        elif journal.SETS_STATE.in_any(batch):
            part = journal.SETS_STATE.part(batch)
            state[part.rows] = _STATE_AFTER.take(batch.entry_kind).take(part.entry)

    def _store_references(self, batch: Batch) -> None:
        if not journal.ADDS_REFERENCES.in_any(batch):
            if journal.SETS_REFERENCES.in_any(batch):
                part = journal.SETS_REFERENCES.part(batch)
                self.references[part.rows] = _REFERENCES_AFTER.take(batch.entry_kind).take(part.entry)
            return
        # Additions after the last setter of each block count on top of it.
        kind, rows = batch.kind, batch.rows
        to = journal.REFERENCES_AFTER.take(kind)
        added = journal.REFERENCES_ADDED.take(kind)
        before = self.references[rows].astype(np.int64)
        count = journal.running(journal.order_by_block(rows), to >= 0, to, added, before)
        self.references[rows] = np.clip(count, 0, 0xFFFF)

    def _store_holders(self, batch: Batch) -> None:
        """Owner, position and group. A position means nothing where nobody owns the block, so that it is stored with
        the owner always: looking for those that have one would take longer."""
        columns = self._columns
        if journal.SETS_OWNER.in_any(batch):
            part = journal.SETS_OWNER.part(batch)
            if (owner := columns.get("owner")) is not None:
                values: Any = 0
                if batch.has_owners:
                    values = (batch.entry_owner * journal.TAKES_OWNER.entries(batch)).astype(np.uint32).take(part.entry)
                owner[part.rows] = values
            if (position := columns.get("position")) is not None:
                values = batch.entry_shift.take(part.entry)
                values += part.places
                position[part.rows] = values.astype(np.uint32)
        if (group := columns.get("group")) is not None and journal.SETS_GROUP.in_any(batch):
            part = journal.SETS_GROUP.part(batch)
            values = _GROUP_AFTER.take(batch.entry_kind)
            if batch.has_extras:
                values |= journal.TAKES_OWNER.entries(batch) * batch.entry_extra.astype(np.uint8)
            group[part.rows] = values.take(part.entry)


def _store_tokens(column: NDArray[Any], batch: Batch, tokens_written: NDArray[np.int64]) -> None:
    sets = journal.SETS_TOKENS.part(batch)
    if not len(tokens_written):
        column[sets.rows] = 0
        return
    values = np.zeros(len(batch.blocks), np.uint16)
    if int(np.bitwise_or.reduce(tokens_written)) >> 16:  # too many for the column in one of them, or fewer than none
        tokens_written = tokens_written.clip(0, 0xFFFF)
    values[journal.WRITES.part(batch).places] = tokens_written
    column[sets.rows] = values.take(sets.places)
