"""Stores what one engine step did in the allocation map: columns, counts, histograms, owners, events, all at once."""

from __future__ import annotations

import heapq
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map import journal
from engine_shim.allocation_map.columns import ColumnStore
from engine_shim.allocation_map.event_ring import EventRing
from engine_shim.allocation_map.journal import Batch, whole_numbers
from engine_shim.allocation_map.sequence import Compiler, SequentialStore
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.layout import COUNTERS, EventKind
from engine_shim.text import fit

_FLAGS = {"sleeping": layout.FLAG_SLEEPING, "relocating": layout.FLAG_RELOCATING}
_COUNTER = {name: index for index, name in enumerate(COUNTERS)}
_STEPS, _SHIM_CPU_NS, _EVENTS_DROPPED = (_COUNTER[name] for name in ("steps", "shim_cpu_ns", "events_dropped"))
_TIMED_EVERY = 8
_MOVE_COUNTERS = (
    (EventKind.MOVE, _COUNTER["live_moves"], _COUNTER["live_move_bytes"]),
    (EventKind.RELOCATE, _COUNTER["relocation_copies"], _COUNTER["relocation_bytes"]),
)
_NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)
_SLOT_MASK = (1 << layout.OWNER_SLOT_BITS) - 1


@dataclass(slots=True)
class StepJournal:
    """What a step did, in order, until it is published. Hot paths extend `heads` and `named` directly."""

    heads: list[int] = field(default_factory=list)  # the fields of one journal.Head after the other
    named: list[int] = field(default_factory=list)  # the blocks of all entries, but for the last ones:
    unnamed: list[Any] = field(default_factory=list)  # these are objects, with a block_id
    token_lists: list[Sequence[int]] = field(default_factory=list)  # one for each WROTE entry
    move_sources: list[Sequence[int]] = field(default_factory=list)  # one for each MOVE or RELOCATE entry
    counted: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)  # owners, their tokens
    opened: dict[int, tuple[int, str, str, str, int]] = field(default_factory=dict)  # by slot
    closed: list[int] = field(default_factory=list)

    def name(self) -> None:
        """Let `named` hold the blocks of all entries."""
        self.named.extend([block.block_id for block in self.unnamed])
        self.unnamed.clear()

    def clear(self) -> None:
        self.heads.clear()
        self.named.clear()
        self.unnamed.clear()
        self.token_lists.clear()
        self.move_sources.clear()
        self.counted.clear()
        self.progress.clear()
        self.opened.clear()
        self.closed.clear()


class _Checked(NamedTuple):
    """Parts of a journal in the form in which they are stored."""

    tokens: NDArray[np.int64]  # of the WROTE entries, in order
    opened: list[tuple[int, tuple[int, int, int, int, bytes, bytes, bytes]]]  # slot, its row of the owner table
    progress: list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # slots, their tokens


class StepPublisher:
    """Applies journals to one writer's map. Whatever may be wrong with a journal raises before the map is touched."""

    def __init__(self, writer: MapWriter, clock_ns: Callable[[], int]) -> None:
        self.writer = writer
        self._clock_ns = clock_ns
        self._columns = ColumnStore(writer)
        self._events = EventRing(writer)
        # Python's ints through a memoryview: one aligned store each, at a third of the time of NumPy's scalars.
        self._counters = writer.live.counters.data
        self._free_slots: list[int] = list(range(writer.spec.owner_slots))
        self._generation = [0] * writer.spec.owner_slots
        self._owner_blocks = np.zeros(writer.spec.owner_slots, np.int64)
        owners = writer.tables["owners"]
        self._blocks_held, self._tokens_held = owners["blocks"], owners["tokens"]
        self._sequence: SequentialStore | None = None
        self._until_timed = 0
        self._untimed = 0

    def compile(self, compiler: Compiler) -> None:
        """Store steps in compiled code from now on. Raises what stands against it; then all stays as it is."""
        self._sequence = SequentialStore(self.writer, self._columns, self._events, self._owner_blocks, compiler)

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
        began = self._begin_timing()
        writer = self.writer
        live, counters = writer.live, self._counters
        if step.unnamed:
            step.name()
        batch = prepared = None
        if step.heads and self._sequence is not None and not step.move_sources:
            prepared = self._sequence.prepare(step.heads, step.named, step.token_lists)
        if step.heads and prepared is None:
            batch = journal.flatten(step.heads, step.named, step.move_sources)
            if len(batch.blocks) == 0:
                batch = None  # every call named an empty list
        queues = None if running is None or waiting is None else (running, waiting)
        checked = self._check(step, batch, queues)
        ahead = None if batch is None else self._columns.look_ahead(batch)
        now = self._clock_ns()
        with writer.publishing():
            if checked.opened:
                self._open_owners(checked)
            if self._sequence is not None and prepared is not None:
                if lost := self._sequence.store(prepared):
                    counters[_EVENTS_DROPPED] += lost
            elif batch is not None and ahead is not None:
                self._columns.store(batch, ahead, checked.tokens)
                self._count(batch)
                if lost := self._events.append(batch):
                    counters[_EVENTS_DROPPED] += lost
                if batch.has_owners:
                    self._count_holders(batch)
            for slots, tokens in checked.progress:
                self._tokens_held[slots] = tokens
            if step.closed:
                self._close_owners(step)
            for name, amount in step.counted.items():
                counters[_COUNTER[name]] += amount
            if queues is not None:
                live.running_requests[0], live.waiting_requests[0] = queues
                if counts:
                    counters[_STEPS] += 1
                    live.last_step_unix_ns[0] = now
            live.published_unix_ns[0] = now
            if began:
                counters[_SHIM_CPU_NS] += self._untimed * (time.thread_time_ns() - began)
                self._untimed = 0
        step.clear()

    def _begin_timing(self) -> int:
        """The clock of this thread's CPU time costs more than much of a publish, so that one in eight stands for all;
        0 for the others."""
        self._untimed += 1
        self._until_timed -= 1
        if self._until_timed >= 0:
            return 0
        self._until_timed = _TIMED_EVERY - 1
        return time.thread_time_ns()

    def _check(self, step: StepJournal, batch: Batch | None, queues: tuple[int, int] | None) -> _Checked:
        """What could go wrong in a store is found here, before the map is touched."""
        for name, amount in step.counted.items():
            if name not in _COUNTER:
                raise KeyError(f"{name!r} is not a counter")
            _in_range(f"an amount of {name}", amount, 1 << 62)
        for what in queues or ():
            _in_range("a number of requests", what, 1 << 32)
        opened = [
            (slot, (owner, 0, 0, now, fit(_text(request_id), 64), fit(_text(lora), 32), fit(_text(salt), 32)))
            for slot, (owner, request_id, lora, salt, now) in step.opened.items()
        ]
        slots = self.writer.spec.owner_slots
        for owner in step.closed:
            _in_range("an owner", owner, 1 << 32)
            _in_range("an owner's slot", owner & _SLOT_MASK, slots)
        progress = []
        for owners, counts in step.progress:
            who, count = whole_numbers(owners), whole_numbers(counts)
            if len(who) != len(count):
                raise ValueError(f"{len(who)} owners progressed to {len(count)} token counts")
            if np.count_nonzero(who) < len(who):
                named = who.nonzero()[0]  # the others are NO_OWNER
                who, count = who.take(named), count.take(named)
            slot = who & _SLOT_MASK
            if len(who):
                _in_range("an owner", int(np.bitwise_or.reduce(who)), 1 << 32)
                _in_range("an owner's slot", int(np.maximum.reduce(slot)), slots)
                _in_range("a token count", int(np.bitwise_or.reduce(count)), 1 << 62)
            progress.append((slot, count))
        return _Checked(_NOTHING if batch is None else self._check_batch(step, batch), opened, progress)

    def _check_batch(self, step: StepJournal, batch: Batch) -> NDArray[np.int64]:
        """Returns the tokens of the WROTE entries, in order."""
        total = self.writer.spec.total_blocks
        for blocks in (batch.blocks, batch.sources):
            # A negative number is a huge one without its sign.
            if len(blocks) and int(np.maximum.reduce(blocks.view(np.uint64))) >= total:
                wrong = blocks[(blocks < 0) | (blocks >= total)][0]
                raise IndexError(f"block {wrong} is not in a pool of {total}")
        # Numbers or-ed are no less than the greatest.
        if batch.holders & _SLOT_MASK >= self.writer.spec.owner_slots:
            _in_range("an owner's slot", int((batch.entry_owner & _SLOT_MASK).max()), self.writer.spec.owner_slots)
        if not step.token_lists and not journal.WRITES.in_any(batch):
            return _NOTHING
        parts = [whole_numbers(part) for part in step.token_lists]
        tokens = np.concatenate(parts) if parts else _NOTHING
        written = len(journal.WRITES.part(batch).places)
        if len(tokens) != written:
            raise ValueError(f"{written} blocks were written, with {len(tokens)} token counts")
        return tokens

    def _count(self, batch: Batch) -> None:
        counters, totals = self._counters, batch.totals
        for event, counter in journal.EVENT_COUNTERS:
            if total := totals[event]:
                counters[counter] += int(total)
        if len(batch.sources):
            for event, count, size in _MOVE_COUNTERS:
                counters[count] += int(totals[event])
                counters[size] += int(totals[event]) * self.writer.spec.block_bytes

    def _open_owners(self, checked: _Checked) -> None:
        table, live = self.writer.tables["owners"], self.writer.live
        for slot, row in checked.opened:
            self._owner_blocks[slot] = 0
            table[slot] = row
        live.owner_rows[0] = max(int(live.owner_rows[0]), max(slot for slot, _ in checked.opened) + 1)

    def _count_holders(self, batch: Batch) -> None:
        # Nobody's blocks, and entries that change nothing, fall out of the product.
        change = journal.OWNER_BLOCKS.take(batch.entry_kind) * batch.entry_length
        owner = batch.entry_owner
        held = (owner * change).nonzero()[0]
        if len(held):
            slots = owner.take(held) & _SLOT_MASK
            np.add.at(self._owner_blocks, slots, change.take(held))
            self._blocks_held[slots] = np.maximum(self._owner_blocks.take(slots), 0)

    def _close_owners(self, step: StepJournal) -> None:
        table = self.writer.tables["owners"]
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


def _text(value: object) -> str:
    """Engines hand over None for what a request does not have, and now and then a number as an id."""
    return "" if value is None else str(value)
