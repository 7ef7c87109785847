"""Which tokens are computed in the next step: continuous batching with chunked prefill and preemption by recompute.

The order is that of vLLM's V1 scheduler: running sequences first, each up to the step's token budget; where a block
is missing, the latest arrival is preempted and computed anew later; then waiting ones, first come, first served.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.errors import PoolExhausted, SettingsError
from engine_shim.observer import NO_OBSERVER, PoolObserver
from engine_shim.pool.allocation_policy import UNLIMITED
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.copy_batch import CopyBatch
from engine_shim.pool.pool_moves import PoolMoves
from engine_shim.reference.content import Work
from engine_shim.reference.sequence import Sequence, Status

log = logging.getLogger(__name__)

MAX_REST_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one step may hold."""

    max_sequences: int = 256
    step_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or self.step_tokens < 1:
            raise SettingsError(
                f"max_sequences={self.max_sequences} and step_tokens={self.step_tokens} must both be 1 or more"
            )


class Scheduler:
    """Owns the queue, the running batch and the block tables; blocks come from `pool`.

    `copy` executes the block copies of one step, all read before any is written; nothing of that step is computed yet.
    Where it raises, nobody is served what it may have left: prefixes that were to be copied are given up, sequences
    that were to read a copy are computed anew, and relocation rests for some steps, more with each failure in a row.
    """

    def __init__(
        self,
        pool: BlockPool,
        copy: Callable[[Items[tuple[int, int]]], None],
        *,
        limits: Limits | None = None,
        observer: PoolObserver = NO_OBSERVER,
        copy_limit: int = UNLIMITED,
    ) -> None:
        """`copy_limit`: blocks that the pool's policy may have copied in one step. Copies on write are not limited."""
        self.pool = pool
        self.limits = limits or Limits()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.copy_failures = 0  # steps whose copies broke off
        self._rest, self._next_rest = 0, 1  # steps without relocation after a failure: now, and after the next one
        self._copy = copy
        self._copies = CopyBatch()
        self._copy_limit = copy_limit
        self._observer = observer

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def refusal(self, sequence: Sequence, usable: int | None = None) -> str | None:
        """Why a sequence can never be served by this pool, or None where it can. `usable` blocks, where the pool is to
        have others than it has now."""
        pool = self.pool
        usable = pool.usable_blocks if usable is None else usable
        whole, prompt = self._blocks_for(sequence.max_tokens - 1), self._blocks_for(sequence.prompt_tokens)
        if whole > usable:
            return f"{sequence.max_tokens} tokens need {whole} blocks; the pool has {usable}"
        if prompt > usable - pool.headroom_blocks:
            return (
                f"a prompt of {sequence.prompt_tokens} tokens needs {prompt} blocks; "
                f"new sequences may take {usable - pool.headroom_blocks}"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `refusal` has nothing against."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Choose the next step's work and take the blocks for it, with their copies made; empty where nothing can go
        on."""
        self.pool.limit_copies(0 if self._rest else self._copy_limit)
        self._rest = max(0, self._rest - 1)
        batch: list[Work] = []
        budget = self.limits.step_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            count = min(sequence.pending, budget)
            while not self._make_room(sequence, sequence.computed + count):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                batch.append(Work(sequence, sequence.computed, sequence.computed + count))
                budget -= count
                index += 1
        while budget and self.waiting and not preempted and len(self.running) < self.limits.max_sequences:
            work = self._admit(self.waiting[0], budget)
            if work is None:
                break
            self.running.append(self.waiting.popleft())
            batch.append(work)
            budget -= work.stop - work.start
        if copies := self._copies.take():
            return self._with_contents(copies, batch)
        return batch

    def register_full_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Offer newly filled blocks to the prefix cache; returns their range in the table."""
        first, last = sequence.registered, sequence.computed // self.pool.block_tokens
        if not self.pool.prefix_cache:
            return first, first
        for index in range(first, last):
            self.pool.register(sequence.table[index], sequence.hashes[index])
        sequence.registered = last
        return first, last

    def branch(self, sequence: Sequence, sample: int) -> Sequence:
        """Start another continuation that shares all blocks so far; the next write to a shared one copies it."""
        branch = sequence.branch(sample, self.pool.block_tokens)
        branch.owner = self._observer.open_owner(f"{sequence.request_id}#{sample}")
        self.pool.fork(branch.table, owner=branch.owner)
        self.running.append(branch)
        return branch

    def finish(self, sequence: Sequence) -> None:
        """Take a complete sequence out of the batch; its blocks stay its own until `release`."""
        self.running.remove(sequence)
        sequence.status = Status.FINISHED

    def recompute(self, lost: Collection[int]) -> None:
        """Preempt every running sequence that names one of these blocks, which the pool has freed already: what they
        held is not to be relied on."""
        self._preempt_naming(lost, freed=lost)

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back, its last first: the front of a prefix is worth keeping longest."""
        table = sequence.forget_blocks()
        self.pool.release(reversed(table), owner=sequence.owner)
        self._name_other_holders(table)
        if sequence.owner:  # one that never ran has none
            self._observer.close_owner(sequence.owner)

    def _with_contents(self, copies: Items[tuple[int, int]], batch: list[Work]) -> list[Work]:
        """Make the step's copies; returns what of its work can be computed then: all of it, unless they break off."""
        try:
            self._copy(copies)
        except Exception as error:  # noqa: BLE001 - whatever it was, the books say already that all is copied
            destinations = {destination for _, destination in copies}
            PoolMoves(self.pool).distrust(destinations)
            self._preempt_naming(destinations)
            self.copy_failures += 1
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST_STEPS)
            log.error(
                "copies of %d blocks broke off, and what they held is computed anew; no relocation for %d steps: %r",
                len(copies), self._rest, error,
            )  # fmt: skip
            return [work for work in batch if work.sequence.status is Status.RUNNING]
        self._next_rest = 1
        return batch

    def _admit(self, sequence: Sequence, budget: int) -> Work | None:
        pool, size = self.pool, self.pool.block_tokens
        # The last known token is always computed: its output is wanted. So a full hit gives up its last block.
        hits = pool.find_prefix(sequence.hashes[: (sequence.length - 1) // size]) if pool.prefix_cache else []
        first_time = sequence.preemptions == 0
        # As in vLLM, the whole prompt must fit, not only its first chunk: else prefills preempt each other.
        needed = self._blocks_for(sequence.length) - len(hits) + pool.num_unreferenced(hits)
        if not pool.can_allocate(needed, new_sequence=first_time):
            self._observer.counted("allocation_failures")  # once a step, as an engine that asks its pool counts it
            return None
        if not sequence.owner:
            # Not before it holds blocks: a long queue would take every slot of the map's table from those that run.
            sequence.owner = self._observer.open_owner(sequence.request_id)
        pulled = pool.pull(hits)
        self._copies.pulled(pulled)
        hits = pulled.blocks
        pool.acquire(hits, owner=sequence.owner)
        start = len(hits) * size
        stop = min(sequence.length, start + budget)
        allocation = pool.allocate(
            self._blocks_for(stop) - len(hits), owner=sequence.owner, position=len(hits), new_sequence=first_time
        )
        self._copies.allocated(allocation)
        sequence.table = array("q", hits + allocation.blocks)
        sequence.computed = start
        sequence.registered = len(hits)
        sequence.status = Status.RUNNING
        if pool.prefix_cache and first_time:
            self.prefix_query_tokens += sequence.length
            self.prefix_hit_tokens += start
            self._observer.counted("prefix_query_tokens", sequence.length)
            if start:
                self._observer.counted("prefix_hit_tokens", start)
        return Work(sequence, start, stop)

    def _make_room(self, sequence: Sequence, stop: int) -> bool:
        """Make tokens computed..stop-1 writable: own blocks for all of them. False where the pool has too few."""
        pool, table = self.pool, sequence.table
        try:
            written = sequence.computed // pool.block_tokens
            if written < len(table):
                replaced = pool.copy_on_write(table[written], owner=sequence.owner, position=written)
                if replaced is not None:
                    self._copies.allocated(replaced)
                    left, table[written] = table[written : written + 1], replaced.blocks[0]
                    self._name_other_holders(left, written)
            missing = self._blocks_for(stop) - len(table)
            if missing > 0:
                allocation = pool.allocate(missing, owner=sequence.owner, position=len(table))
                self._copies.allocated(allocation)
                table.extend(allocation.blocks)
        except PoolExhausted:
            return False
        return True

    def _preempt_naming(self, lost: Collection[int], freed: Collection[int] = ()) -> None:
        names = frozenset(lost)
        for sequence in [s for s in reversed(self.running) if not names.isdisjoint(s.table)]:
            self.running.remove(sequence)
            self._preempt(sequence, freed)

    def _preempt(self, victim: Sequence, freed: Collection[int] = ()) -> None:
        """Back to the queue, its blocks released but for those that the pool has freed already."""
        table = victim.forget_blocks()
        self.pool.release([block for block in reversed(table) if block not in freed], owner=victim.owner)
        if not freed:  # else the pool may be shorter by now than the table's numbers
            self._name_other_holders(table)
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self._observer.counted("preemptions")

    def _name_other_holders(self, left: array[int], start: int = 0) -> None:
        """On a map a shared block names its first holder; where that one may have left, another that runs. `left` lay
        from place `start` on in the table of who gave these blocks up.

        Sequences share from their start, and who shares a block shares those before it, at the same places: so one
        pass over the front of `left` and over the running sequences finds a holder for each.
        """
        if not isinstance(self._observer, MapObserver):
            return
        references = self.pool.references
        shared = next((index for index, block in enumerate(left) if not references(block)), len(left))
        index = 0
        for other in self.running if shared else ():
            if index == shared:
                break
            first, theirs = index, other.table
            while index < shared and start + index < len(theirs) and theirs[start + index] == left[index]:
                index += 1
            if index > first and other.owner:
                self._observer.held_by(left[first:index], other.owner, start + first)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)
