"""Compares a published map with vLLM's own objects, by rules of its own: nothing here is taken from the adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

FREE, CACHED, USED, PINNED, RESERVED = range(5)


class Truth:
    """Collects what differs, over many steps, and how much was compared."""

    def __init__(self, scheduler: Any, reader: Any, kept: set[str] | None = None) -> None:
        self.scheduler = scheduler
        self.reader = reader
        self.kept = kept if kept is not None else set()  # requests whose blocks a connector keeps
        self.shared: set[int] = set()
        self.differences: list[str] = []
        self.steps = self.most_running = self.blocks_compared = self.owned = self.pinned = 0
        self.shared_seen = self.tokens_compared = 0

    def check(self) -> None:
        """Everything, now; the differences are collected, not raised."""
        snapshot = self.reader.read()
        scheduler = self.scheduler
        cache = scheduler.kv_cache_manager
        managers = cache.coordinator.single_type_managers
        self.steps += 1
        self.most_running = max(self.most_running, len(scheduler.running))
        pinned = {
            block.block_id
            for name in self.kept
            for manager in managers
            for block in manager.req_to_blocks.get(name) or ()
            if not block.is_null
        }
        counts = [0] * 8
        for block in cache.block_pool.blocks:
            number = block.block_id
            if block.is_null:
                state, references = RESERVED, 0
            elif block.ref_cnt > 0 or block.next_free_block is None:
                state, references = PINNED if number in pinned else USED, block.ref_cnt
            else:
                state, references = CACHED if block.block_hash is not None else FREE, 0
                self.shared.discard(number)
            counts[state] += 1
            if references > 1:
                self.shared.add(number)
            self._same(f"state of {number}", int(snapshot.states[number]), state)
            self._same(f"references of {number}", int(snapshot.references[number]), references)
            if state == FREE:
                self._same(f"tokens of free {number}", int(snapshot.tokens[number]), 0)
                self._same(f"group of free {number}", int(snapshot.group[number]), 255)
            if state in (FREE, CACHED):
                self._same(f"owner of unheld {number}", int(snapshot.owner[number]), 0)
        self.pinned = max(self.pinned, counts[PINNED])
        self.shared_seen = max(self.shared_seen, len(self.shared))
        self._same("state counts", list(snapshot.state_counts), counts)
        self._same("running", snapshot.running_requests, len(scheduler.running))
        self._same("waiting", snapshot.waiting_requests, len(scheduler.waiting) + len(scheduler.kv_holding_waiting))
        self._check_owners(snapshot, managers)

    def _check_owners(self, snapshot: Any, managers: Any) -> None:
        by_name = {entry.request_id: entry for entry in snapshot.owners}
        by_value = {entry.owner: entry.request_id for entry in snapshot.owners}
        for name, request in self.scheduler.requests.items():
            tables = [manager.req_to_blocks.get(name) or [] for manager in managers]
            held = sum(not block.is_null for table in tables for block in table)
            entry = by_name.get(name)
            if entry is None:
                self._same(f"blocks of the unlisted {name}", 0, held)
                continue
            self._same(f"blocks of {name}", entry.blocks, held)
            self._same(f"salt of {name}", entry.cache_salt, request.cache_salt or "")
            if request in self.scheduler.running:
                self._same(f"tokens of {name}", entry.tokens, request.num_computed_tokens)
            for manager, table in zip(managers, tables, strict=True):
                for place, block in enumerate(table):
                    if not block.is_null:
                        self._check_block(snapshot, by_value, name, request, manager, place, block)
        listed = set(by_name) - set(self.scheduler.requests)
        self._same("owners that have ended", sorted(listed), [])

    def _check_block(
        self, snapshot: Any, by_value: Any, name: str, request: Any, manager: Any, place: int, block: Any
    ) -> None:
        number, size = block.block_id, manager.block_size
        self.blocks_compared += 1
        owner = by_value.get(int(snapshot.owner[number]))
        if owner == name:
            self.owned += 1
            self._same(f"position of {number}", int(snapshot.position[number]), place)
        elif block.ref_cnt < 2:
            self._same(f"owner of {number}", owner, name)
        else:  # another of its holders is named
            other = manager.req_to_blocks.get(owner or "") or ()
            there = other[place].block_id if place < len(other) else None
            self._same(f"block of the owner of {number}", number, there)
        self._same(f"group of {number}", int(snapshot.group[number]), manager.kv_cache_group_id)
        if request in self.scheduler.running:
            tokens = min(size, max(0, request.num_computed_tokens - place * size))
            self.tokens_compared += 1
            self._same(f"tokens of {number}", int(snapshot.tokens[number]), tokens)

    def _same(self, what: str, seen: Any, wanted: Any) -> None:
        if seen != wanted and len(self.differences) < 20:
            self.differences.append(f"step {self.steps}: {what}: {seen!r} in the map, {wanted!r} in the pool")
        elif seen != wanted:
            self.differences.append("")

    def report(self) -> dict[str, Any]:
        """For the test that runs this driver."""
        return {
            "differences": len(self.differences),
            "first": [line for line in self.differences if line],
            "steps": self.steps,
            "blocks_compared": self.blocks_compared,
            "tokens_compared": self.tokens_compared,
            "owned": self.owned,
            "most_running": self.most_running,
            "most_shared": self.shared_seen,
            "most_pinned": self.pinned,
        }


def faults_of_the_pool(scheduler: Any) -> list[str]:
    """What does not fit together in vLLM's own objects: tables and references, the free queue, the table of hashes."""
    cache = scheduler.kv_cache_manager
    pool = cache.block_pool
    found: list[str] = []
    references: Counter[int] = Counter()
    for manager in cache.coordinator.single_type_managers:
        for table in manager.req_to_blocks.values():
            references.update(block.block_id for block in table if not block.is_null)
        references.update(block.block_id for pair in manager._pending_cow_copies for block in pair)
    for _, blocks in scheduler.deferred_frees:
        references.update(block.block_id for block in blocks if not block.is_null)
    queue = pool.free_block_queue
    queued = [block.block_id for block in queue.get_all_free_blocks()]
    if queued != list(_backwards(queue))[::-1] or len(queued) != queue.num_free_blocks:
        found.append("the free queue is not whole")
    free = set(queued)
    for block in pool.blocks:
        number = block.block_id
        if block.is_null:
            continue
        if block.ref_cnt != references[number]:
            found.append(f"block {number} counts {block.ref_cnt} references, {references[number]} are in tables")
        if (block.ref_cnt == 0) != (number in free):
            found.append(f"block {number} with {block.ref_cnt} references: in the free queue {number in free}")
    for name, entry in pool.cached_block_hash_to_block._cache.items():
        for number, block in (entry if isinstance(entry, dict) else {entry.block_id: entry}).items():
            known = {block.block_hash, *pool.cached_block_hashes_by_block.get(number, ())}
            if block.block_id != number or pool.blocks[number] is not block or name not in known:
                found.append(f"block {number} stands under a hash that is not its own")
    return found


def _backwards(queue: Any) -> Iterator[int]:
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        yield block.block_id
        block = block.prev_free_block
