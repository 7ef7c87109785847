"""Compares published maps with a paged attention cache itself, by rules of its own: nothing is the adapter's."""

from __future__ import annotations

from collections import Counter
from typing import Any

FREE, CACHED, USED, PINNED, RESERVED = range(5)


class Truth:
    """Collects what differs, over many looks, and how much was compared."""

    def __init__(self, processor: Any, blocks: Any, sectors: Any = None) -> None:
        self.processor = processor
        self.blocks = blocks  # readers of the maps
        self.sectors = sectors
        self.differences: list[str] = []
        self.steps = self.most_running = self.blocks_compared = self.owned = self.tokens_compared = 0
        self.most_shared = self.most_cached = 0
        self.kinds_seen: set[tuple[int, int]] = set()  # states and groups of sectors

    def check(self, batch: dict[str, int] | None = None) -> None:
        """Everything, now; `batch`: tokens by request, where a step was shown with them."""
        snapshot = self.blocks.read()
        scheduler, cache = self.processor.scheduler, self.processor.cache
        self.steps += 1
        self.most_running = max(self.most_running, len(scheduler.active_requests))
        self._same("running", snapshot.running_requests, len(scheduler.active_requests))
        self._same("waiting", snapshot.waiting_requests, len(scheduler.waiting_requests))
        memory = self._memory(cache)
        unit = snapshot.identity.block_bytes
        self._same("size", snapshot.identity.total_blocks * unit, int(cache.cache_tensor.nbytes))
        by_name = {entry.request_id: entry for entry in snapshot.owners}
        by_value = {entry.owner: entry.request_id for entry in snapshot.owners}
        counts = [0] * 8
        for number in range(snapshot.identity.total_blocks):
            state, group, references, holders = memory.get(number * unit, (FREE, 255, 0, {}))
            counts[state] += 1
            self._same(f"state of {number}", int(snapshot.states[number]), state)
            self._same(f"references of {number}", int(snapshot.references[number]), references)
            self._same(f"group of {number}", int(snapshot.group[number]), group)
            owner = by_value.get(int(snapshot.owner[number]), "")
            if state == USED:
                self.blocks_compared += 1
                self.owned += owner in holders
                self._same(f"a holder of {number}", owner in holders, True)
                self._same(f"position of {number}", int(snapshot.position[number]), holders.get(owner))
            else:
                self._same(f"owner of unheld {number}", owner, "")
            if state == FREE:
                self._same(f"tokens of free {number}", int(snapshot.tokens[number]), 0)
        self._same("state counts", list(snapshot.state_counts), counts)
        self.most_shared = max(self.most_shared, sum(entry[2] > 1 for entry in memory.values()))
        self.most_cached = max(self.most_cached, counts[CACHED])
        self._requests(snapshot, cache, by_name, unit)
        if self.sectors is not None:
            self._sectors(cache, memory, unit)

    def _memory(self, cache: Any) -> dict[int, tuple[int, int, int, dict[str, int]]]:
        """By byte in the cache's tensor, in steps of what every allocator's blocks are multiples of: state, group,
        references, and where in whose table."""
        unit = min(allocator.bytes_per_block for allocator in cache.cache_allocators.values())
        for allocator in cache.cache_allocators.values():
            while allocator.bytes_per_block % unit:
                unit -= 1
        memory: dict[int, tuple[int, int, int, dict[str, int]]] = {}
        for byte in range(0, cache.pool.num_reserved_sectors * cache.bytes_per_sector, unit):
            memory[byte] = (RESERVED, 255, 0, {})
        for allocator in cache.cache_allocators.values():
            size, width = allocator.bytes_per_block, allocator.bytes_per_block // unit
            references: Counter[int] = Counter()
            holders: dict[int, dict[str, int]] = {}
            for name, table in allocator.block_table.items():
                references.update(table)
                for place, block in enumerate(table):
                    holders.setdefault(block, {})[name] = place
            for block, count in references.items():
                self._same(f"ledger of {block}", allocator.ledger.shared_ref_counts.get(block, 1), count)
                for part in range(width):
                    places = {name: place * width + part for name, place in holders[block].items()}
                    memory[block * size + part * unit] = (USED, allocator.index, count, places)
            for block in allocator.ledger.cached_blocks:
                for part in range(width):
                    memory[block * size + part * unit] = (CACHED, allocator.index, 0, {})
        return memory

    def _requests(self, snapshot: Any, cache: Any, by_name: Any, unit: int) -> None:
        held: Counter[str] = Counter()
        for allocator in cache.cache_allocators.values():
            for name, table in allocator.block_table.items():
                held[name] += len(table) * (allocator.bytes_per_block // unit)
        self._same("requests", sorted(by_name), sorted(held))
        for name, state in self.processor.scheduler.active_requests.items():
            if name in by_name:
                self._same(f"blocks of {name}", by_name[name].blocks, held[name])
                self._same(f"tokens of {name}", by_name[name].tokens, state.position_offset)
                self._tokens(snapshot, cache, name, state.position_offset, unit)

    def _tokens(self, snapshot: Any, cache: Any, name: str, length: int, unit: int) -> None:
        for allocator in cache.cache_allocators.values():
            stored = min(length, getattr(allocator, "sliding_window", None) or length)
            width = allocator.bytes_per_block // unit
            for place, block in enumerate(allocator.block_table.get(name, ())):
                wanted = min(allocator.tokens_per_page, max(0, stored - place * allocator.tokens_per_page))
                for part in range(width):
                    self.tokens_compared += 1
                    self._same(f"tokens of {block}", int(snapshot.tokens[block * width + part]), wanted)

    def _sectors(self, cache: Any, memory: Any, unit: int) -> None:
        snapshot = self.sectors.read()
        size = cache.bytes_per_sector
        self._same("sectors", snapshot.identity.total_blocks * snapshot.identity.block_bytes, cache.cache_tensor.nbytes)
        for sector in range(snapshot.identity.total_blocks):
            parts = [memory.get(byte, (FREE, 255)) for byte in range(sector * size, (sector + 1) * size, unit)]
            states = {part[0] for part in parts}
            state = next(one for one in (RESERVED, USED, CACHED, FREE) if one in states)
            groups = {part[1] for part in parts} - {255}
            self._same(f"kinds in sector {sector}", len(groups) < 2, True)
            group = min(groups, default=255)
            self._same(f"state of sector {sector}", int(snapshot.states[sector]), state)
            self._same(f"group of sector {sector}", int(snapshot.group[sector]), group)
            self.kinds_seen.add((state, group))
            if sector in cache.pool.free_sectors:
                self._same(f"free sector {sector}", state, FREE)

    def _same(self, what: str, seen: Any, wanted: Any) -> None:
        if seen != wanted:
            self.differences.append(f"look {self.steps}: {what}: {seen!r} in the map, {wanted!r} in the cache")

    def report(self) -> dict[str, Any]:
        """For the test that runs this driver."""
        return {
            "differences": len(self.differences),
            "first": self.differences[:20],
            "steps": self.steps,
            "blocks_compared": self.blocks_compared,
            "tokens_compared": self.tokens_compared,
            "owned": self.owned,
            "most_running": self.most_running,
            "most_shared": self.most_shared,
            "most_cached": self.most_cached,
            "sector_kinds": sorted(self.kinds_seen),
        }
