"""vLLM's hands for compaction: moves live blocks of one engine core's pool, in its tables and in all of its workers.

A block that moves changes places with an unreferenced one: what was cached there is cached where the block was, at the
same place in the order of eviction. So a run evicts nothing, and vLLM's hits stay what they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim.adapters.vllm import worker_moves
from engine_shim.adapters.vllm.contents import forget, trade, unreferenced
from engine_shim.adapters.vllm.watched_pool import WatchedPool
from engine_shim.compaction.mover import BlockFacts, Moves
from engine_shim.layout import BlockState

log = logging.getLogger("kvatlas.shim")


class VllmMover:
    """Implements `engine_shim.compaction.mover.Mover`. Owners are numbers given to requests as they are seen."""

    keeps_cached = True

    def __init__(
        self, scheduler: Any, block_bytes: int, *, core: Callable[[], Any], refusal: Callable[[], str]
    ) -> None:
        """`core` gives vLLM's engine core; `refusal` what stands against moving now, "" where nothing does."""
        self._block_bytes = block_bytes
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self._managers = self._cache.coordinator.single_type_managers
        self._core, self._refusal = core, refusal
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self.moved = 0  # blocks, since the start
        self._aside: list[tuple[int, int]] = []  # (source, destination) where the destination holds a prefix
        self._begun = self._committed = False
        self.watched: WatchedPool | None = None

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def refusal(self) -> str:
        return self._refusal()

    def columns(self) -> BlockFacts:
        blocks = self._pool.blocks
        live = {name for name, table in self._tables() if table}
        self._numbers = {name: number for name, number in self._numbers.items() if name in live}
        return self._facts(blocks, range(len(blocks)), self._hits(None))

    def facts(self, blocks: NDArray[np.int64]) -> BlockFacts:
        ids = blocks.tolist()
        return self._facts([self._pool.blocks[block] for block in ids], ids, self._hits(set(ids)))

    def found(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = blocks.tolist()
        count = dict.fromkeys(ids, 0)
        for _, table in self._tables():
            for block in table:
                if block.block_id in count and not block.is_null:
                    count[block.block_id] += 1
        return np.fromiter((count[block] for block in ids), np.int64, len(ids))

    def revalidate(self, moves: Moves) -> Moves:
        """A block that waits for its first name in a partial hit, or for a copy on write, is known by its object."""
        waiting = {
            block.block_id
            for manager in self._managers
            for pair in (*manager._pending_cow_copies, *manager._partial_hit_reqs.values())
            for block in pair
            if hasattr(block, "block_id")
        }
        kept: Moves = moves[[source not in waiting for source in moves[:, 0].tolist()]]
        return kept

    def reserve(self, moves: Moves) -> int:
        blocks = self._pool.blocks
        for _, destination in moves.tolist():
            if not unreferenced(blocks[destination]):
                raise RuntimeError(f"block {destination} cannot be written to: somebody holds it")
        self._begun = self._committed = False
        self._aside = [
            (source, destination)
            for source, destination in moves.tolist()
            if blocks[destination].block_hash is not None
        ]
        return 0

    def copy(self, moves: Moves) -> None:
        pairs = [(source, destination) for source, destination in moves.tolist()]
        answers = self._ask("copy_blocks", pairs, [destination for _, destination in self._aside])
        if any(answer != len(pairs) for answer in answers):
            raise RuntimeError(f"of {len(pairs)} blocks the ranks have copied {answers}")

    def digests(self, blocks: NDArray[np.int64]) -> Sequence[bytes]:
        by_rank = self._ask("digests", blocks.tolist())
        return [b"".join(one) for one in zip(*by_rank, strict=True)]

    def commit(self, moves: Moves) -> None:
        pool, blocks = self._pool, self._pool.blocks
        renamed: dict[int, int] = dict(moves.tolist())
        self._begun = True
        for source, destination in renamed.items():
            trade(pool, blocks[source], blocks[destination])
        named = self._rename(renamed)
        self._committed = True
        put_back = [source for source, _ in self._aside]
        answers = self._ask("settle_blocks", renamed, put_back)
        if len(set(answers)) > 1:
            raise RuntimeError(f"{named} places were renamed here, and {answers} by the ranks")
        self.moved += len(renamed)
        self._tell(renamed)

    def abandon(self, moves: Moves) -> None:
        """The destinations were never taken out of the pool; what was cached in them may be overwritten. A commit that
        broke off cannot be undone, and raises."""
        if self._committed:
            return
        if self._begun:
            raise RuntimeError("a commit broke off half-way")
        for _, destination in self._aside:
            self._pool._maybe_evict_cached_block(self._pool.blocks[destination])
        self._aside = []
        if self.watched is not None:
            self.watched.tap.lost(())

    def give_up(self, moves: Moves) -> None:
        """References are set to what the tables say, so that freeing them brings all blocks back."""
        scheduler, pool = self._scheduler, self._pool
        numbers = sorted(set(moves.ravel().tolist()))
        named = dict(zip(numbers, self.found(np.array(numbers, np.int64)).tolist(), strict=True))
        held = [pool.blocks[number] for number, count in named.items() if count]
        spare = [pool.blocks[number] for number, count in named.items() if not count]
        for block in held:
            if block.next_free_block is not None:
                pool.free_block_queue.remove(block)
            block.ref_cnt = named[block.block_id]
        for block in spare:
            block.ref_cnt = 0
        forget(pool, held + spare)
        for request in [one for one in scheduler.running if not self._ids_of(one.request_id).isdisjoint(named)]:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.clear()
        if self.watched is not None:
            self.watched.resync(numbers)

    # vLLM's tables and workers

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        return worker_moves.ask(self._core().model_executor, name, *arguments)

    def _tables(self) -> Iterator[tuple[str, list[Any]]]:
        for manager in self._managers:
            yield from manager.req_to_blocks.items()

    def _ids_of(self, request_id: str) -> set[int]:
        return {block.block_id for manager in self._managers for block in manager.req_to_blocks.get(request_id, ())}

    def _rename(self, renamed: dict[int, int]) -> int:
        blocks, count = self._pool.blocks, 0
        for _, table in self._tables():
            for place, block in enumerate(table):
                if block.block_id in renamed:
                    table[place] = blocks[renamed[block.block_id]]
                    count += 1
        return count

    def _hits(self, wanted: set[int] | None) -> dict[int, tuple[int, int]]:
        """(owner, position) of each block, in the first table that has it; of all blocks where none are named."""
        hits: dict[int, tuple[int, int]] = {}
        for name, table in self._tables():
            owner = 0
            for place, block in enumerate(table):
                number = block.block_id
                if (wanted is None or number in wanted) and number not in hits:
                    owner = owner or self._number_of(name)
                    hits[number] = (owner, place)
        return hits

    def _number_of(self, name: str) -> int:
        if name not in self._numbers:
            self._last_number = self._last_number % 0xFFFFFFF0 + 1
            self._numbers[name] = self._last_number
        return self._numbers[name]

    def _facts(self, blocks: Sequence[Any], ids: Sequence[int], hits: dict[int, tuple[int, int]]) -> BlockFacts:
        count = len(ids)
        states = np.fromiter(map(self._state, blocks), np.uint8, count)
        nobody = (0, 0)
        owners = np.fromiter((hits.get(number, nobody)[0] for number in ids), np.uint32, count)
        positions = np.fromiter((hits.get(number, nobody)[1] for number in ids), np.uint32, count)
        references = np.fromiter((block.ref_cnt for block in blocks), np.int64, count)
        idle = states <= int(BlockState.CACHED)
        owners[idle] = positions[idle] = 0
        return BlockFacts(states, owners, positions, references)

    def _state(self, block: Any) -> int:
        if block.is_null:
            return int(BlockState.RESERVED)
        if block.ref_cnt > 0:
            return int(BlockState.USED)
        if block.next_free_block is None:
            return int(BlockState.PINNED)
        return int(BlockState.FREE if block.block_hash is None else BlockState.CACHED)

    def _tell(self, renamed: dict[int, int]) -> None:
        try:
            if self.watched is not None:
                self.watched.moved(renamed)
        except Exception as error:  # noqa: BLE001 - the move is made, and whoever watches must not undo half of it
            log.error("a move of %d blocks was not shown: %r", len(renamed), error)
