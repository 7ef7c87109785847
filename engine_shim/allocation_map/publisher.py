"""Stores what one engine step did in the allocation map: columns, counts, histograms, owners, events, all at once."""

from __future__ import annotations

import heapq
import operator
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.journal import WROTE, Batch, Entry
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.layout import COUNTERS, EventKind
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
_MOVE_COUNTERS = (
    (EventKind.MOVE, _COUNTER["live_moves"], _COUNTER["live_move_bytes"]),
    (EventKind.RELOCATE, _COUNTER["relocation_copies"], _COUNTER["relocation_bytes"]),
)
_UNPIN = int(EventKind.UNPIN)
_MS_MASK = 0xFFFFFFFF
_SLOT_MASK = (1 << layout.OWNER_SLOT_BITS) - 1


@dataclass(slots=True)
class StepJournal:
    """What a step did, in order, until it is published. Hot paths append to `entries` directly."""

    entries: list[Entry] = field(default_factory=list)
    token_lists: list[Sequence[int]] = field(default_factory=list)  # one for each WROTE entry
    move_sources: list[Sequence[int]] = field(default_factory=list)  # one for each MOVE or RELOCATE entry
    counted: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)  # owners, their tokens
    opened: dict[int, tuple[int, str, str, str, int]] = field(default_factory=dict)  # by slot
    closed: list[int] = field(default_factory=list)

    def clear(self) -> None:
        self.entries.clear()
        self.token_lists.clear()
        self.move_sources.clear()
        self.counted.clear()
        self.progress.clear()
        self.opened.clear()
        self.closed.clear()


@dataclass(frozen=True, slots=True)
class _Checked:
    """Parts of a journal in the form in which they are stored."""

    tokens: NDArray[np.int64]  # of the WROTE entries, in order
    opened: list[tuple[int, tuple[int, int, int, int, bytes, bytes, bytes]]]  # slot, its row of the owner table
    progress: list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # slots, their tokens


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
        own: list[NDArray[Any]] = [self._touched_ms, self._references, self._born_ms]
        self._row_arrays = tuple({id(array): array for array in [*columns.values(), *own]}.values())
        self._ring: NDArray[np.int64] = writer.tables["events"].view(np.int64).reshape(-1, layout.EVENT_WORDS)

    def take_owner(self) -> int:
        """A fresh owner value, of the lowest free slot so that readers need few rows; NO_OWNER when all are taken."""
        if not self._free_slots:
            return layout.NO_OWNER
        slot = heapq.heappop(self._free_slots)
        self._generation[slot] = self._generation[slot] % 255 + 1  # never 0: 0 is nobody
        return slot | self._generation[slot] << layout.OWNER_SLOT_BITS

    def publish(self, step: StepJournal, running: int | None, waiting: int | None, *, counts: bool = True) -> None:
        """Make a journal visible and clear it. With `running` and `waiting` it counts as an engine step, unless
        `counts` is false: then they are only told."""
        began = time.thread_time_ns()
        writer = self.writer
        live = writer.live
        batch = journal.flatten(step.entries, step.move_sources) if step.entries else None
        if batch is not None and len(batch.blocks) == 0:
            batch = None  # every call named an empty list
        queues = None if running is None or waiting is None else (running, waiting)
        checked = self._check(step, batch, queues)
        updates = None if batch is None else self._work_out(batch)
        now = self._clock_ns()
        with writer.publishing():
            if batch is not None and updates is not None:
                self._store(batch, updates, checked.tokens)
                self._write_events(batch)
            self._write_owners(step, checked, batch)
            counters = live.counters
            for name, amount in step.counted.items():
                counters[_COUNTER[name]] += amount
            if queues is not None:
                live.running_requests[0], live.waiting_requests[0] = queues
                if counts:
                    counters[_COUNTER["steps"]] += 1
                    live.last_step_unix_ns[0] = now
            live.published_unix_ns[0] = now
            counters[_COUNTER["shim_cpu_ns"]] += time.thread_time_ns() - began
        step.clear()

    def _check(self, step: StepJournal, batch: Batch | None, queues: tuple[int, int] | None) -> _Checked:
        """What could go wrong in a store is found here, before the map is touched."""
        for name, amount in step.counted.items():
            if name not in _COUNTER:
                raise KeyError(f"{name!r} is not a counter")
            _in_range(f"an amount of {name}", amount, 1 << 62)
        for what in queues or ():
            _in_range("a number of requests", what, 1 << 32)
        slots = self.writer.spec.owner_slots
        opened = [
            (slot, (owner, 0, 0, now, fit(_text(request_id), 64), fit(_text(lora), 32), fit(_text(salt), 32)))
            for slot, (owner, request_id, lora, salt, now) in step.opened.items()
        ]
        for owner in step.closed:
            _in_range("an owner", owner, 1 << 32)
            _in_range("an owner's slot", owner & _SLOT_MASK, slots)
        progress = []
        for owners, counts in step.progress:
            who, count = _whole_numbers(owners), _whole_numbers(counts)
            if len(who) != len(count):
                raise ValueError(f"{len(who)} owners progressed to {len(count)} token counts")
            who, count = who[who != layout.NO_OWNER], count[who != layout.NO_OWNER]
            if len(who):
                _in_range("an owner", int(who.min()), 1 << 32)
                _in_range("an owner's slot", int((who & _SLOT_MASK).max()), slots)
                _in_range("a token count", int(count.min()), 1 << 62)
            progress.append((who & _SLOT_MASK, count))
        tokens = np.zeros(0, np.int64)
        if batch is not None:
            tokens = self._check_batch(step, batch)
        return _Checked(tokens, opened, progress)

    def _check_batch(self, step: StepJournal, batch: Batch) -> NDArray[np.int64]:
        """Returns the tokens of the WROTE entries, in order."""
        lowest, highest = int(batch.blocks.min()), int(batch.blocks.max())
        if len(batch.sources):
            lowest, highest = min(lowest, int(batch.sources.min())), max(highest, int(batch.sources.max()))
        if lowest < 0 or highest >= self.writer.spec.total_blocks:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"block {wrong} is not in a pool of {self.writer.spec.total_blocks}")
        owner, position, extra = batch.entry_owner, batch.entry_position, batch.entry_extra
        # As one bit pattern each: a number out of range has a bit where none may be, a negative one the sign.
        _in_range("an owner", int(np.bitwise_or.reduce(owner)), 1 << 32)
        _in_range("an owner's slot", int((owner & _SLOT_MASK).max()), self.writer.spec.owner_slots)
        _in_range("a position", int(np.bitwise_or.reduce(position)), 1 << 32)
        _in_range("a group", int(np.bitwise_or.reduce(extra)), layout.NO_GROUP + 1)
        parts = [_whole_numbers(part) for part in step.token_lists]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        written = int(batch.entry_length[batch.entry_kind == WROTE].sum())
        if len(tokens) != written:
            raise ValueError(f"{written} blocks were written, with {len(tokens)} token counts")
        return tokens

    def _work_out(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Durations, in ms, which need to know what was before within the same step."""
        entry_ms = ((batch.entry_time_ns - self._created_ns) // 1_000_000) & _MS_MASK
        now_ms = entry_ms.take(batch.entry)
        result: dict[str, NDArray[Any]] = {"now_ms": now_ms}
        by_block = None
        for name, kinds, since, starts in (
            ("lifetime", journal.ENDS_LIFE, self._born_ms, journal.BEGINS_LIFE),
            ("idle_before_evict", journal.EVICTS, self._touched_ms, journal.TOUCHES),
            ("reuse_gap", journal.HITS, self._touched_ms, journal.TOUCHES),
        ):
            if kinds.in_any(batch):
                by_block = by_block or journal.order_by_block(batch.rows)
                setter = starts.entries(batch).take(batch.entry)
                began = journal.previous(by_block, setter, now_ms, since.take(batch.rows))
                chosen = kinds.elements(batch)
                took = (now_ms[chosen] - began[chosen]) & _MS_MASK
                # Half the range and more is a clock that was set back, not a block of 25 days.
                result[name] = np.where(took > _MS_MASK // 2, 0, took)
        return result

    def _store(self, batch: Batch, updates: dict[str, NDArray[Any]], tokens_written: NDArray[np.int64]) -> None:
        writer = self.writer
        kind, rows = batch.kind, batch.rows
        columns = writer.columns
        state = columns["state"]
        place = np.arange(len(rows))
        self._last_place[rows] = place
        last = self._last_place[rows] == place
        changed = rows[last]
        counts = np.bincount(state[changed], minlength=8)[:8]
        touched_segments = np.zeros(len(writer.tables["segments"]), bool)
        touched_segments[changed // layout.SEGMENT_BLOCKS] = True
        if len(batch.moved_blocks):
            touched_segments[batch.moved_blocks // layout.SEGMENT_BLOCKS] = True
        with writer.segments_open(np.flatnonzero(touched_segments)):
            if journal.UNPINS.in_any(batch):
                after = journal.STATE_AFTER.take(kind)
                unpins = kind == _UNPIN
                after[unpins] = batch.entry_extra.take(batch.entry)[unpins]
                state[rows[after >= 0]] = after[after >= 0]
            else:
                sets = journal.SETS_STATE.elements(batch)
                state[rows[sets]] = journal.STATE_AFTER.take(kind[sets])
            self._store_references(batch)
            if (tokens := columns.get("tokens")) is not None:
                _store_tokens(tokens, batch, tokens_written)
            takes = journal.TAKES_OWNER.elements(batch)
            if (owner := columns.get("owner")) is not None:
                either = journal.SETS_OWNER.elements(batch)
                values = batch.entry_owner * journal.TAKES_OWNER.entries(batch)
                owner[rows[either]] = values.take(batch.entry[either])
            if (position := columns.get("position")) is not None:
                position[rows[takes]] = batch.position[takes]
            if (group := columns.get("group")) is not None:
                either = journal.SETS_GROUP.elements(batch)
                values = np.where(journal.TAKES_OWNER.entries(batch), batch.entry_extra, layout.NO_GROUP)
                group[rows[either]] = values.take(batch.entry[either])
            touches = journal.TOUCHES.elements(batch)
            self._touched_ms[rows[touches]] = updates["now_ms"][touches]
            born = journal.BEGINS_LIFE.elements(batch)
            self._born_ms[rows[born]] = updates["now_ms"][born]
            after_counts = np.bincount(state[changed], minlength=8)[:8]
            if len(batch.moved_blocks):
                for array in self._row_arrays:
                    array[batch.moved_blocks] = array[batch.moved_rows]
        live = writer.live
        _shift_counts(live.state_counts, counts, after_counts)
        table = writer.tables["histograms"]
        for index, name in enumerate(layout.HISTOGRAMS):
            if (durations := updates.get(name)) is not None:
                table["counts"][index] += journal.histogram_counts(durations).astype(np.uint64)
                table["sum_seconds"][index] += durations.sum() / 1000
        totals = np.bincount(batch.entry_kind, weights=batch.entry_length, minlength=len(journal.STATE_AFTER))
        for event, counter in _EVENT_COUNTERS.items():
            live.counters[counter] += np.uint64(totals[event])
        for event, count, size in _MOVE_COUNTERS:
            if totals[event]:
                live.counters[count] += np.uint64(totals[event])
                live.counters[size] += np.uint64(totals[event]) * np.uint64(writer.spec.block_bytes)

    def _store_references(self, batch: Batch) -> None:
        kind, rows = batch.kind, batch.rows
        if not journal.ADDS_REFERENCES.in_any(batch):
            sets = journal.SETS_REFERENCES.elements(batch)
            self._references[rows[sets]] = journal.REFERENCES_AFTER.take(kind[sets])
            return
        # Additions after the last setter of each block count on top of it.
        to = journal.REFERENCES_AFTER.take(kind)
        added = journal.REFERENCES_ADDED.take(kind)
        before = self._references[rows].astype(np.int64)
        count = journal.running(journal.order_by_block(rows), to >= 0, to, added, before)
        self._references[rows] = np.clip(count, 0, 0xFFFF)

    def _write_events(self, batch: Batch) -> None:
        starts, lengths, downwards = journal.event_runs(batch)
        kinds = batch.kind.take(starts)
        if journal.SILENT.in_any(batch):
            keep = ~journal.SILENT.table.take(kinds)
            starts, lengths, downwards, kinds = starts[keep], lengths[keep], downwards[keep], kinds[keep]
        entry = batch.entry.take(starts)
        other = batch.entry_extra.take(entry)
        if len(batch.sources):
            other[journal.MOVES.table.take(kinds)] = batch.sources  # one event a move, in order
        words = layout.event_words(
            batch.entry_time_ns.take(entry),
            batch.blocks.take(starts),
            lengths,
            batch.entry_owner.take(entry),
            other,
            kinds,
            downwards,
            batch.position.take(starts),
        )
        self._append_events(words)

    def _append_events(self, words: NDArray[np.int64]) -> None:
        ring, live = self._ring, self.writer.live
        slots, total = len(ring), len(words)
        head = int(live.event_head[0])
        live.event_claim[0] = head + total
        if total > slots:
            live.counters[_COUNTER["events_dropped"]] += total - slots
            words = words[-slots:]
        at = (head + total - len(words)) % slots
        first = min(len(words), slots - at)
        ring[at : at + first] = words[:first]
        if first < len(words):
            ring[: len(words) - first] = words[first:]
        live.event_head[0] = head + total

    def _write_owners(self, step: StepJournal, checked: _Checked, batch: Batch | None) -> None:
        table, live = self.writer.tables["owners"], self.writer.live
        for slot, row in checked.opened:
            self._owner_blocks[slot] = 0
            table[slot] = row
        if step.opened:
            live.owner_rows[0] = max(int(live.owner_rows[0]), max(step.opened) + 1)
        if batch is not None:
            change = journal.OWNER_BLOCKS[batch.entry_kind] * batch.entry_length
            held = (batch.entry_owner != layout.NO_OWNER) & (change != 0)
            if held.any():
                slots = batch.entry_owner[held] & _SLOT_MASK
                np.add.at(self._owner_blocks, slots, change[held])
                table["blocks"][slots] = np.maximum(self._owner_blocks[slots], 0)
        for slots, tokens in checked.progress:
            table["tokens"][slots] = tokens
        for owner in step.closed:
            slot = owner & _SLOT_MASK
            if int(table["owner"][slot]) == owner:
                table["owner"][slot] = layout.NO_OWNER
                heapq.heappush(self._free_slots, slot)

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
        encoded = [fit(uuid, 64) for uuid in uuids]
        writer = self.writer
        with writer.publishing():
            writer.set_gpu_uuids(encoded)

    def set_policy(self, policy: str) -> None:
        """Name the allocation policy; visible at once."""
        writer, encoded = self.writer, fit(policy, 32)
        with writer.publishing():
            writer.live.policy[0] = encoded


def _in_range(what: str, value: int, end: int) -> None:
    if not 0 <= operator.index(value) < end:
        raise ValueError(f"{value} is not {what} (0 to {end - 1})")


def _whole_numbers(values: Sequence[int]) -> NDArray[np.int64]:
    """As an array; TypeError where NumPy alone would cut 1.5 down to 1."""
    return np.frombuffer(array("q", values), np.int64) if len(values) else np.zeros(0, np.int64)


def _text(value: object) -> str:
    """Engines hand over None for what a request does not have, and now and then a number as an id."""
    return "" if value is None else str(value)


def _shift_counts(words: NDArray[Any], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
    """Move blocks between states; in signed numbers, since NumPy adds unsigned and signed ones as floats."""
    words[:] = words.astype(np.int64) + after - before


def _store_tokens(column: NDArray[Any], batch: Batch, tokens_written: NDArray[np.int64]) -> None:
    values = np.zeros(len(batch.blocks), np.int64)
    if len(tokens_written):
        values[batch.kind == WROTE] = np.clip(tokens_written, 0, 0xFFFF)
    sets = journal.SETS_TOKENS.elements(batch)
    column[batch.rows[sets]] = values[sets]
