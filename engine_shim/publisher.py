"""Stores what one engine step did in the allocation map: columns, counts, histograms, owners, events, all at once."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import journal, layout
from engine_shim.journal import WROTE, Batch, Entry
from engine_shim.layout import COUNTERS, EventKind
from engine_shim.map_writer import MapWriter
from engine_shim.text import fit

_FLAGS = {"sleeping": layout.FLAG_SLEEPING, "relocating": layout.FLAG_RELOCATING}
_COUNTER = {name: index for index, name in enumerate(COUNTERS)}
_EVENT_COUNTERS = {
    EventKind.ALLOCATE: _COUNTER["blocks_allocated"],
    EventKind.FREE: _COUNTER["blocks_freed"],
    EventKind.CACHE: _COUNTER["blocks_freed"],
    EventKind.EVICT: _COUNTER["blocks_evicted"],
    EventKind.REUSE: _COUNTER["blocks_reused"],
}
_SLOT_MASK = (1 << layout.OWNER_SLOT_BITS) - 1


@dataclass(slots=True)
class StepJournal:
    """What a step did, in order, until it is published. Hot paths append to `entries` directly."""

    entries: list[Entry] = field(default_factory=list)
    token_lists: list[Sequence[int]] = field(default_factory=list)  # one for each WROTE entry
    counted: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)  # owners, their tokens
    opened: dict[int, tuple[int, str, str, str, int]] = field(default_factory=dict)  # by slot
    closed: list[int] = field(default_factory=list)

    def clear(self) -> None:
        for part in (self.entries, self.token_lists, self.counted, self.progress, self.opened, self.closed):
            part.clear()


class StepPublisher:
    """Applies journals to one writer's map. Whatever may be wrong with a journal raises before the map is touched."""

    def __init__(self, writer: MapWriter, clock_ns: Callable[[], int]) -> None:
        self.writer = writer
        self._clock_ns = clock_ns
        blocks = writer.spec.total_blocks
        columns = writer.columns
        # Kept even where the map drops the column: counts and histograms are of every block.
        self._touched_ms: NDArray[Any] = columns["touched"] if "touched" in columns else np.zeros(blocks, np.uint32)
        self._references: NDArray[Any] = (
            columns["references"] if "references" in columns else np.zeros(blocks, np.uint16)
        )
        self._born_ms = np.zeros(blocks, np.uint32)
        self._last_place = np.zeros(blocks, np.int64)
        self._free_slots: list[int] = list(range(writer.spec.owner_slots))
        self._generation = [0] * writer.spec.owner_slots
        self._owner_blocks = np.zeros(writer.spec.owner_slots, np.int64)
        self._created_ns = writer.created_unix_ns

    def take_owner(self) -> int:
        """A fresh owner value, of the lowest free slot so that readers need few rows; NO_OWNER when all are taken."""
        if not self._free_slots:
            return layout.NO_OWNER
        slot = heapq.heappop(self._free_slots)
        self._generation[slot] = self._generation[slot] % 255 + 1  # never 0: 0 is nobody
        return slot | self._generation[slot] << layout.OWNER_SLOT_BITS

    def publish(self, step: StepJournal, running: int | None, waiting: int | None) -> None:
        """Make a journal visible and clear it; with `running` and `waiting` it counts as an engine step."""
        began = time.thread_time_ns()
        writer = self.writer
        live = writer.live
        batch = journal.flatten(step.entries) if step.entries else None
        tokens = self._check(step, batch)
        updates = None if batch is None else self._work_out(batch)
        now = self._clock_ns()
        with writer.publishing():
            if batch is not None and updates is not None:
                self._store(batch, updates, tokens)
                self._write_events(batch)
            self._write_owners(step, batch)
            counters = live.counters
            for name, amount in step.counted.items():
                counters[_COUNTER[name]] += amount
            if running is not None and waiting is not None:
                counters[_COUNTER["steps"]] += 1
                live.running_requests[0], live.waiting_requests[0] = running, waiting
                live.last_step_unix_ns[0] = now
            live.published_unix_ns[0] = now
            counters[_COUNTER["shim_cpu_ns"]] += time.thread_time_ns() - began
        step.clear()

    def _check(self, step: StepJournal, batch: Batch | None) -> NDArray[np.int64]:
        """What could go wrong in a store is found here; returns the tokens of the WROTE entries, in order."""
        for name in step.counted:
            if name not in _COUNTER:
                raise KeyError(f"{name!r} is not a counter")
        for owners, counts in step.progress:
            if len(owners) != len(counts):
                raise ValueError(f"{len(owners)} owners progressed to {len(counts)} token counts")
        if batch is None:
            return np.zeros(0, np.int64)
        lowest, highest = int(batch.blocks.min(initial=0)), int(batch.blocks.max(initial=0))
        if lowest < 0 or highest >= self.writer.spec.total_blocks:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"block {wrong} is not in a pool of {self.writer.spec.total_blocks}")
        parts = [np.asarray(part, np.int64) for part in step.token_lists]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        written = int(batch.entry_length[batch.entry_kind == WROTE].sum())
        if len(tokens) != written:
            raise ValueError(f"{written} blocks were written, with {len(tokens)} token counts")
        return tokens

    def _work_out(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Durations and reference counts, which need to know what was before within the same step."""
        kind, blocks = batch.kind, batch.blocks
        now_ms = ((batch.time_ns - self._created_ns) // 1_000_000) & 0xFFFFFFFF
        result: dict[str, NDArray[Any]] = {"now_ms": now_ms}
        ends, evicts = journal.ENDS_LIFE[kind], kind == EventKind.EVICT
        reuses = (kind == EventKind.REUSE) | (kind == EventKind.SHARE)
        if not (ends.any() or reuses.any()):
            return result
        by_block = journal.order_by_block(blocks)
        if ends.any():
            born = journal.previous(
                by_block, kind == EventKind.ALLOCATE, now_ms, self._born_ms[blocks].astype(np.int64)
            )
            result["lifetime"] = (now_ms - born)[ends] & 0xFFFFFFFF
        if not (evicts.any() or reuses.any()):
            return result
        touched = journal.previous(by_block, journal.TOUCHES[kind], now_ms, self._touched_ms[blocks].astype(np.int64))
        if evicts.any():
            result["idle_before_evict"] = (now_ms - touched)[evicts] & 0xFFFFFFFF
        if reuses.any():
            result["reuse_gap"] = (now_ms - touched)[reuses] & 0xFFFFFFFF
        return result

    def _store(self, batch: Batch, updates: dict[str, NDArray[Any]], tokens_written: NDArray[np.int64]) -> None:
        writer = self.writer
        kind, blocks = batch.kind, batch.blocks
        columns = writer.columns
        state = columns["state"]
        place = np.arange(len(blocks))
        self._last_place[blocks] = place
        last = self._last_place[blocks] == place
        changed = blocks[last]
        counts = np.bincount(state[changed], minlength=8)[:8]
        touched_segments = np.zeros(len(writer.tables["segments"]), bool)
        touched_segments[changed // layout.SEGMENT_BLOCKS] = True
        with writer.segments_open(np.flatnonzero(touched_segments)):
            after = journal.STATE_AFTER[kind]
            after[kind == EventKind.UNPIN] = batch.extra[kind == EventKind.UNPIN]
            sets = after >= 0
            state[blocks[sets]] = after[sets]
            self._store_references(batch)
            empties = journal.EMPTIES[kind]
            if (tokens := columns.get("tokens")) is not None:
                _store_tokens(tokens, batch, empties, tokens_written)
            takes, loses = journal.TAKES_OWNER[kind], journal.LOSES_OWNER[kind]
            takes_blocks = blocks[takes]
            if (owner := columns.get("owner")) is not None:
                either = takes | loses
                owner[blocks[either]] = np.where(takes, batch.owner, 0)[either]
            if (position := columns.get("position")) is not None:
                position[takes_blocks] = batch.position[takes]
            if (group := columns.get("group")) is not None:
                grouped = takes | empties
                group[blocks[grouped]] = np.where(takes, batch.extra, layout.NO_GROUP)[grouped]
            touches = journal.TOUCHES[kind]
            self._touched_ms[blocks[touches]] = updates["now_ms"][touches]
            born = kind == EventKind.ALLOCATE
            self._born_ms[blocks[born]] = updates["now_ms"][born]
        live = writer.live
        _shift_counts(live.state_counts, counts, np.bincount(state[changed], minlength=8)[:8])
        table = writer.tables["histograms"]
        for index, name in enumerate(layout.HISTOGRAMS):
            if (durations := updates.get(name)) is not None:
                table["counts"][index] += journal.histogram_counts(durations).astype(np.uint64)
                table["sum_seconds"][index] += durations.sum() / 1000
        totals = np.bincount(batch.entry_kind, weights=batch.entry_length, minlength=len(journal.STATE_AFTER))
        for event, counter in _EVENT_COUNTERS.items():
            live.counters[counter] += np.uint64(totals[event])

    def _store_references(self, batch: Batch) -> None:
        kind, blocks = batch.kind, batch.blocks
        added = journal.REFERENCES_ADDED[kind]
        to = journal.REFERENCES_AFTER[kind]
        sets = to >= 0
        if not added.any():
            self._references[blocks[sets]] = to[sets]
            return
        before = self._references[blocks].astype(np.int64)
        count = journal.running(journal.order_by_block(blocks), sets, to, added, before)
        self._references[blocks] = np.clip(count, 0, 0xFFFF)

    def _write_events(self, batch: Batch) -> None:
        starts, lengths, downwards = journal.event_runs(batch)
        kinds = batch.kind[starts]
        keep = kinds != WROTE
        starts, lengths, downwards, kinds = starts[keep], lengths[keep], downwards[keep], kinds[keep]
        total = len(starts)
        if total == 0:
            return
        rows = np.zeros(total, layout.EVENT)
        rows["time_ns"], rows["block"], rows["count"] = batch.time_ns[starts], batch.blocks[starts], lengths
        rows["owner"], rows["position"], rows["kind"] = batch.owner[starts], batch.position[starts], kinds
        rows["descending"], rows["other"] = downwards, batch.extra[starts]
        self._append_events(rows)

    def _append_events(self, rows: NDArray[np.void]) -> None:
        ring, live = self.writer.tables["events"], self.writer.live
        slots = len(ring)
        head = int(live.event_head[0])
        total = len(rows)
        live.event_claim[0] = head + total
        if total > slots:
            live.counters[_COUNTER["events_dropped"]] += total - slots
        kept = rows[-slots:]
        at = (head + total - len(kept)) % slots
        first = min(len(kept), slots - at)
        ring[at : at + first] = kept[:first]
        ring[: len(kept) - first] = kept[first:]
        live.event_head[0] = head + total

    def _write_owners(self, step: StepJournal, batch: Batch | None) -> None:
        table, live = self.writer.tables["owners"], self.writer.live
        for slot, (owner, request_id, lora, salt, now) in step.opened.items():
            self._owner_blocks[slot] = 0
            table[slot] = (owner, 0, 0, now, fit(request_id, 64), fit(lora, 32), fit(salt, 32))
        if step.opened:
            live.owner_rows[0] = max(int(live.owner_rows[0]), max(step.opened) + 1)
        if batch is not None:
            change = journal.OWNER_BLOCKS[batch.entry_kind] * batch.entry_length
            held = (batch.entry_owner != layout.NO_OWNER) & (change != 0)
            if held.any():
                slots = batch.entry_owner[held] & _SLOT_MASK
                np.add.at(self._owner_blocks, slots, change[held])
                table["blocks"][slots] = np.maximum(self._owner_blocks[slots], 0)
        for owners, tokens in step.progress:
            slots = np.asarray(owners, np.int64)
            known = slots != layout.NO_OWNER
            table["tokens"][slots[known] & _SLOT_MASK] = np.asarray(tokens, np.int64)[known]
        for owner in step.closed:
            slot = owner & _SLOT_MASK
            if int(table["owner"][slot]) == owner:
                table["owner"][slot] = layout.NO_OWNER
                heapq.heappush(self._free_slots, slot)

    def move(self, sources: Sequence[int], destinations: Sequence[int], live: bool) -> None:
        """Let rows follow their contents. All that happened before must have been published."""
        writer = self.writer
        source, destination = np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
        both = np.concatenate((source, destination))
        if len(source) != len(destination) or both.min() < 0 or both.max() >= writer.spec.total_blocks:
            raise IndexError("a move names blocks outside the pool, or not as many sources as destinations")
        if len(np.unique(both)) != len(both):
            raise ValueError("a block is named twice in one batch of moves")
        state = writer.columns["state"]
        counts = np.bincount(state[both], minlength=8)[:8]
        now = self._clock_ns()
        with writer.publishing():
            with writer.segments_open(np.unique(both // layout.SEGMENT_BLOCKS)):
                kept = {id(array): array for array in writer.columns.values()}
                kept |= {id(array): array for array in (self._touched_ms, self._born_ms, self._references)}
                for array in kept.values():
                    array[destination] = array[source]
                    array[source] = layout.NO_GROUP if array is writer.columns.get("group") else 0
                self._touched_ms[source] = ((now - self._created_ns) // 1_000_000) & 0xFFFFFFFF
            _shift_counts(writer.live.state_counts, counts, np.bincount(state[both], minlength=8)[:8])
            rows = np.zeros(len(source), layout.EVENT)
            rows["time_ns"], rows["block"], rows["count"], rows["other"] = now, destination, 1, source
            rows["kind"] = EventKind.MOVE if live else EventKind.RELOCATE
            self._append_events(rows)
            moved = "live_move" if live else "relocation"
            counters = writer.live.counters
            counters[_COUNTER["live_moves" if live else "relocation_copies"]] += len(source)
            counters[_COUNTER[f"{moved}_bytes"]] += len(source) * writer.spec.block_bytes
            writer.live.published_unix_ns[0] = now

    def set_flags(self, flags: dict[str, bool]) -> None:
        """Set or clear flags by name; visible at once."""
        writer = self.writer
        value = int(writer.live.flags[0])
        for name, on in flags.items():
            bit = _FLAGS[name]
            value = value | bit if on else value & ~bit
        with writer.publishing():
            writer.live.flags[0] = value

    def set_gpu_uuids(self, uuids: Sequence[str]) -> None:
        """Name the devices; visible at once."""
        writer = self.writer
        with writer.publishing():
            writer.set_gpu_uuids(uuids)

    def set_policy(self, policy: str) -> None:
        """Name the allocation policy; visible at once."""
        writer = self.writer
        with writer.publishing():
            writer.live.policy[0] = fit(policy, 32)


def _shift_counts(words: NDArray[Any], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
    """Move blocks between states; in signed numbers, since NumPy adds unsigned and signed ones as floats."""
    words[:] = words.astype(np.int64) + after - before


def _store_tokens(
    column: NDArray[Any], batch: Batch, empties: NDArray[np.bool_], tokens_written: NDArray[np.int64]
) -> None:
    wrote = batch.kind == WROTE
    values = np.zeros(len(batch.blocks), np.int64)
    values[wrote] = np.clip(tokens_written, 0, 0xFFFF)
    sets = wrote | empties
    column[batch.blocks[sets]] = values[sets]
