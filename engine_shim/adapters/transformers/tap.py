"""Tells what one allocator does, from its own operations: Transformers acts first, and what it then says is told.

A block's references are what its ledger counts: 2 or more where it has an entry, else 1 for a block in a table, 0 for a
cached one. Blocks in no table and not cached are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method
from engine_shim.adapters.transformers.blocks import BlockSpace
from engine_shim.adapters.transformers.requests import RequestBook
from engine_shim.allocation_map.map_observer import MapObserver

Fault = Callable[[BaseException], None]

_MOST_LOOKS = 8192  # into other requests' tables, for another holder of what one leaves


class AllocatorTap:
    """The hooks on one allocator and its ledger."""

    def __init__(self, space: BlockSpace, book: RequestBook, observer: MapObserver, fault: Fault) -> None:
        self.space = space
        self.allocator = space.allocator
        self.ledger = space.allocator.ledger
        self._book = book
        self._observer = observer
        self._fault = fault

    def install(self, hooks: Hooks) -> None:
        """Put the hooks on."""
        allocator = self.allocator
        hooks.wrap(allocator, "allocate_cache_to_request", self._around_allocate)
        hooks.wrap(allocator, "acquire_prefix_blocks", self._around_acquire)
        hooks.wrap(allocator, "fork_blocks", self._around_fork)
        hooks.wrap(allocator, "free_blocks", self._around_free)
        hooks.wrap(allocator, "mark_complete_blocks", self._around_mark)
        hooks.wrap(self.ledger, "evict_cached_blocks", self._around_evict)
        hooks.wrap(self.ledger, "reset", self._around_reset)

    def _around_allocate(self, hook: Hook) -> Method:
        tables, space, book, fault = self.allocator.block_table, self.space, self._book, self._fault

        def allocate_cache_to_request(request_id: str, *args: Any, **kwargs: Any) -> Any:
            before = len(tables.get(request_id, ()))
            result = hook.inner(request_id, *args, **kwargs)
            try:
                fresh = tables[request_id][before:]
                if fresh:
                    space.allocated(fresh, book.owner_of(request_id), before)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                fault(error)
            return result

        return allocate_cache_to_request

    def _around_acquire(self, hook: Hook) -> Method:
        def acquire_prefix_blocks(request_id: str, prefix_len: int, block_ids: list[int]) -> Any:
            result = hook.inner(request_id, prefix_len, block_ids)
            try:
                self._taken(self.allocator.block_table[request_id], request_id, 0)
                self._book.has_tokens(request_id, int(prefix_len))
            except Exception as error:  # noqa: BLE001 - see above
                self._fault(error)
            return result

        return acquire_prefix_blocks

    def _around_fork(self, hook: Hook) -> Method:
        def fork_blocks(source_request_id: str, dest_request_id: str, past_length: int) -> Any:
            result = hook.inner(source_request_id, dest_request_id, past_length)
            try:
                table = self.allocator.block_table[dest_request_id]
                fresh = list(result[1])
                self._taken(table[: len(table) - len(fresh)], dest_request_id, 0)
                self._copied(fresh, dest_request_id, len(table) - len(fresh), int(past_length))
            except Exception as error:  # noqa: BLE001 - see above
                self._fault(error)
            return result

        return fork_blocks

    def _around_free(self, hook: Hook) -> Method:
        tables, counts, fault = self.allocator.block_table, self.ledger.shared_ref_counts, self._fault

        def free_blocks(request_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                held = [(block, counts.get(block, 1)) for block in tables.get(request_id, ())]
            except Exception as error:  # noqa: BLE001 - see above
                held = []
                fault(error)
            result = hook.inner(request_id, *args, **kwargs)
            try:
                self._released(held, request_id)
                self._book.let_go(request_id)
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return result

        return free_blocks

    def _around_mark(self, hook: Hook) -> Method:
        """Where a block turns out to hold what another one does, the request adopts that one and leaves its own."""

        def mark_complete_blocks(request_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                before, counts = self._unmarked(request_id)
            except Exception as error:  # noqa: BLE001 - see above
                before, counts = [], {}
                self._fault(error)
            result = hook.inner(request_id, *args, **kwargs)
            try:
                table = self.allocator.block_table.get(request_id, ())
                first = len(table) - len(before)
                for place, left in enumerate(before, start=first):
                    if table[place] != left:
                        self._taken([table[place]], request_id, place)
                        self._released([(left, counts.get(left, 1))], request_id, place)
            except Exception as error:  # noqa: BLE001 - see above
                self._fault(error)
            return result

        return mark_complete_blocks

    def _around_evict(self, hook: Hook) -> Method:
        def evict_cached_blocks() -> Any:
            evicted = hook.inner()
            try:
                if evicted:
                    self.space.evicted(evicted)
            except Exception as error:  # noqa: BLE001 - see above
                self._fault(error)
            return evicted

        return evict_cached_blocks

    def _around_reset(self, hook: Hook) -> Method:
        cached_blocks = self.ledger.cached_blocks

        def reset() -> Any:
            cached = list(cached_blocks)
            result = hook.inner()
            try:
                if cached:
                    self.space.evicted(cached)
            except Exception as error:  # noqa: BLE001 - see above
                self._fault(error)
            return result

        return reset

    def _unmarked(self, request_id: str) -> tuple[list[int], dict[int, int]]:
        """The end of a request's table that has no hashes yet, and the shared ones' references."""
        known, shared = self.ledger.block_to_hash, self.ledger.shared_ref_counts
        table = self.allocator.block_table.get(request_id, ())
        first = len(table)
        while first and table[first - 1] not in known:
            first -= 1
        end = list(table[first:])
        return end, {block: shared[block] for block in end if block in shared}

    def _taken(self, blocks: Sequence[int], request_id: str, position: int) -> None:
        """Existing blocks are in one more table: with a reference count of 1 now, they were cached."""
        shared = self.ledger.shared_ref_counts
        owner = self._book.owner_of(request_id)
        for start, again, run in _runs([block not in shared for block in blocks]):
            some = blocks[start : start + run]
            if again:
                self.space.reused(some, owner, position + start)
            else:
                self.space.shared(some, owner)

    def _copied(self, fresh: list[int], request_id: str, position: int, length: int) -> None:
        """A fork got blocks of its own, which are copies of those that it could not share."""
        book, space = self._book, self.space
        book.has_tokens(request_id, length)
        if not fresh:
            return
        space.allocated(fresh, book.owner_of(request_id), position)
        self._observer.counted("copy_on_write", len(fresh))
        units: list[int] = []
        tokens: list[int] = []
        space.filled(self.allocator.block_table[request_id], position * space.page, length, units, tokens)
        if units:
            self._observer.wrote(units, tokens, 0)

    def _released(self, held: Sequence[tuple[int, int]], request_id: str, position: int = 0) -> None:
        """Blocks have left a request's table at `position` and after; `held` has their references until then."""
        owner, space = self._book.known_owner(request_id), self.space
        cached_blocks = self.ledger.cached_blocks
        freed: list[int] = []
        cached: list[int] = []
        kept: list[int] = []
        orphans: dict[int, int] = {}  # block: its place
        for place, (block, references) in enumerate(held, start=position):
            if references > 1:
                kept.append(block)
                if space.named[block] == owner:
                    orphans[block] = place
            else:
                (cached if block in cached_blocks else freed).append(block)
        if freed:
            space.freed(freed, owner)
        if cached:
            space.cached(cached, owner)
        if kept:
            space.unshared(kept, owner)
        if orphans:
            self._name_others(orphans, request_id)

    def _name_others(self, orphans: dict[int, int], leaver: str) -> None:
        """A shared block names its first holder; when that one leaves, another. A prefix has the same place in all."""
        looks = _MOST_LOOKS
        for name, table in self.allocator.block_table.items():
            if name == leaver or not orphans or looks < 0:
                continue
            looks -= len(orphans)
            found = [block for block, place in orphans.items() if place < len(table) and table[place] == block]
            owner = self._book.known_owner(name)
            for block in found:
                self.space.held_by([block], owner, orphans.pop(block))
        for (
            block,
            place,
        ) in orphans.items():  # no time to look on: nobody, rather than a wrong one
            self.space.held_by([block], 0, place)


def _runs(flags: Sequence[bool]) -> list[tuple[int, bool, int]]:
    """Runs of equal flags: start, flag, length."""
    runs: list[tuple[int, bool, int]] = []
    for place, flag in enumerate(flags):
        if runs and runs[-1][1] == flag:
            start, _, length = runs[-1]
            runs[-1] = (start, flag, length + 1)
        else:
            runs.append((place, flag, 1))
    return runs
