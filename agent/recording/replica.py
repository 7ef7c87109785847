"""A copy of a map's columns that events are applied to, as the engine's own publisher applied what they tell."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.layout import COLUMNS, EventKind

_KNOWN = np.array([kind in set(EventKind) for kind in range(256)])
_MAX_ELEMENTS = 1 << 22  # blocks named by the events that are applied at once: bounds the memory of it
_GROUP_AFTER = np.where(journal.TAKES_OWNER.table, 0, layout.NO_GROUP)


class Replica:
    """The columns of a pool of `total_blocks`, as far as events tell them.

    They do not tell tokens that were written, nor who holds a block on after its holder left: those come from samples.
    """

    def __init__(self, total_blocks: int, columns: tuple[str, ...], created_unix_ns: int) -> None:
        self.total_blocks = total_blocks
        self.columns: dict[str, NDArray[Any]] = {name: np.zeros(total_blocks, COLUMNS[name]) for name in columns}
        self._created_ns = created_unix_ns
        self._row_of = np.arange(total_blocks, dtype=np.int64)

    def apply(self, events: NDArray[np.void]) -> int:
        """Follow rows of layout.EVENT, in order; in parts or at once, the result is the same.

        Returns how many were left out: of kinds that are not known here, or of blocks that the pool does not have.
        """
        sound = self.sound(events)
        left_out = len(events) - int(np.count_nonzero(sound))
        if left_out:
            events = events[sound]
        ends = np.cumsum(events["count"], dtype=np.int64)
        first, done = 0, 0
        while first < len(events):
            stop = max(int(np.searchsorted(ends, done + _MAX_ELEMENTS, side="right")), first + 1)
            self._apply(events[first:stop])
            first, done = stop, int(ends[stop - 1])
        return left_out

    def sound(self, events: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which rows can be followed, (n,)."""
        kind, block, count = events["kind"], events["block"].astype(np.int64), events["count"].astype(np.int64)
        down = events["descending"] != 0
        lowest, highest = np.where(down, block - count + 1, block), np.where(down, block, block + count - 1)
        sound: NDArray[np.bool_] = _KNOWN[kind] & (count >= 1) & (lowest >= 0) & (highest < self.total_blocks)
        moves = (kind == EventKind.MOVE) | (kind == EventKind.RELOCATE)
        sound &= ~moves | ((count == 1) & (events["other"] < self.total_blocks))
        sound &= (kind != EventKind.UNPIN) | (events["other"] <= max(layout.BlockState))
        return sound

    def _apply(self, events: NDArray[np.void]) -> None:
        count = events["count"].astype(np.int64)
        entry = np.arange(len(events)).repeat(count)
        starts = np.cumsum(count) - count
        place = np.arange(len(entry)) - starts.take(entry)
        step = np.where(events["descending"] != 0, -1, 1)
        blocks = events["block"].astype(np.int64).take(entry) + step.take(entry) * place
        kind = events["kind"].astype(np.int64).take(entry)
        rows, moved = self._rows(events, blocks, starts, count)
        columns = self.columns
        state_after = journal.STATE_AFTER.take(kind)
        other = events["other"].take(entry)
        unpins = kind == EventKind.UNPIN
        state_after[unpins] = other[unpins]
        sets = np.flatnonzero(state_after >= 0)
        columns["state"][rows[sets]] = state_after[sets]
        if (references := columns.get("references")) is not None:
            self._store_references(references, rows, kind)
        sets = np.flatnonzero(journal.SETS_OWNER.table[kind])
        if (owner := columns.get("owner")) is not None:
            takes = journal.TAKES_OWNER.table[kind[sets]]
            owner[rows[sets]] = np.where(takes, events["owner"].take(entry[sets]), 0)
        if (position := columns.get("position")) is not None:
            values = events["position"].astype(np.int64).take(entry[sets]) + place[sets]
            position[rows[sets]] = values.astype(np.uint32)
        if (group := columns.get("group")) is not None:
            sets = np.flatnonzero(journal.SETS_GROUP.table[kind])
            takes = journal.TAKES_OWNER.table[kind[sets]]
            group[rows[sets]] = np.where(takes, other[sets] & 0xFF, _GROUP_AFTER.take(kind[sets])).astype(np.uint8)
        if (tokens := columns.get("tokens")) is not None:
            tokens[rows[journal.EMPTIES.table[kind]]] = 0
        if (touched := columns.get("touched")) is not None:
            sets = np.flatnonzero(journal.TOUCHES.table[kind])
            elapsed_ms = (events["time_ns"] - self._created_ns) // 1_000_000
            touched[rows[sets]] = elapsed_ms.astype(np.uint32).take(entry[sets])
        if len(moved):
            sources = self._row_of[moved]
            for column in columns.values():
                column[moved] = column[sources]
            self._row_of[moved] = moved

    def _rows(
        self, events: NDArray[np.void], blocks: NDArray[np.int64], starts: NDArray[np.int64], count: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each element the row that its block's values stand in until the end, and the blocks whose row changes.

        As in the publisher: moves are not made one by one, what comes later follows its block to the row that holds it.
        """
        is_move = journal.MOVES.table[events["kind"]]
        moves = np.flatnonzero(is_move)
        if not len(moves):
            return blocks, np.empty(0, np.int64)
        row_of, rows = self._row_of, blocks.copy()
        sources = events["other"][moves].astype(np.int64)
        targets = events["block"][moves].astype(np.int64)
        at = 0
        for index, source, target in zip(moves.tolist(), sources.tolist(), targets.tolist(), strict=True):
            start = int(starts[index])
            if start > at:
                rows[at:start] = row_of[blocks[at:start]]
            row_of[source], row_of[target] = row_of[target], row_of[source]
            at = start  # a move's own element lies where its contents are now
        rows[at:] = row_of[blocks[at:]]
        return rows, np.unique(np.concatenate((sources, targets)))

    @staticmethod
    def _store_references(references: NDArray[np.uint16], rows: NDArray[np.int64], kind: NDArray[np.int64]) -> None:
        to, added = journal.REFERENCES_AFTER.take(kind), journal.REFERENCES_ADDED.take(kind)
        if not added.any():
            sets = np.flatnonzero(to >= 0)
            references[rows[sets]] = to[sets]
            return
        before = references[rows].astype(np.int64)
        count = journal.running(journal.order_by_block(rows), to >= 0, to, added, before)
        references[rows] = np.clip(count, 0, 0xFFFF)
