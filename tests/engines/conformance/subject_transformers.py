"""Transformers takes part: continuous batching over a tiny hybrid model, driven step by step in this thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny_models  # type: ignore[import-not-found]  # beside Transformers' own tests
from contract import BlockFact, Look, PoolFacts, Pools  # type: ignore[import-not-found]
from generation import Generation, requests  # type: ignore[import-not-found]

from engine_shim.adapters import transformers as adapter
from engine_shim.compaction.compactor import Compactor
from engine_shim.layout import BlockState


class TransformersSubject:
    """See `contract.Subject`. `kind` as in tiny_models: the full model shares prefixes, the hybrid one has sectors."""

    faults = ("publish", "no room", "call")

    def __init__(self, work: Path, kind: str) -> None:
        adapter.register()
        self._model = tiny_models.make(kind)
        self._blocks = 30 if kind == "full" else 40

    def start(self, *, watched: bool, moves: bool = False) -> None:
        os.environ["KVATLAS_DISABLE"] = "0" if watched else "1"
        self._one = Generation(self._model, blocks=self._blocks, answer=12)
        for name, tokens in requests(14).items():
            self._one.manager.add_request(tokens, request_id=name)
        self._answers: dict[str, list[int]] = {}

    def step(self, look: Look) -> bool:
        manager, processor = self._one.manager, self._one.processor
        if not processor.prepare_next_batch():
            look()
            return False
        manager._generation_step()
        processor.update_batch()
        look()
        while not manager.output_router.output_queue.empty():
            output = manager.output_router.output_queue.get()
            self._answers[output.request_id] = list(output.generated_tokens)
        return True

    def pools(self) -> Pools:
        cache, scheduler = self._one.processor.cache, self._one.processor.scheduler
        readers = self._one.readers()
        allocators = list(cache.cache_allocators.values())
        unit = readers[0].read().identity.block_bytes
        per_sector = cache.bytes_per_sector // unit
        sectors = cache.num_sectors + cache.pool.num_reserved_sectors
        blocks = {
            number: BlockFact(BlockState.RESERVED) for number in range(cache.pool.num_reserved_sectors * per_sector)
        }
        for allocator in allocators:
            width = allocator.bytes_per_block // unit
            holders: dict[int, dict[str, int]] = {}
            for name, table in allocator.block_table.items():
                for place, block in enumerate(table):
                    for part in range(width):
                        holders.setdefault(block * width + part, {})[name] = place * width + part
            for number, names in holders.items():
                blocks[number] = BlockFact(BlockState.USED, len(names), names)
            for block in allocator.ledger.cached_blocks:
                for part in range(width):
                    blocks[block * width + part] = BlockFact(BlockState.CACHED)
        queues = len(scheduler.active_requests), len(scheduler.waiting_requests)
        found = [(readers[0], PoolFacts(sectors * per_sector, blocks, *queues))]
        if len(readers) > 1:
            tiers: dict[int, BlockFact] = {}
            for number, fact in blocks.items():
                sector, state = number // per_sector, BlockFact(fact.state, int(fact.state is BlockState.USED))
                if sector not in tiers or fact.state is BlockState.USED:
                    tiers[sector] = state
            found.append((readers[1], PoolFacts(sectors, tiers, *queues)))
        return found

    def answers(self) -> Any:
        return self._answers

    def hooks(self) -> int:
        processor = self._one.processor
        objects = [processor, processor.scheduler, processor.cache]
        for allocator in processor.cache.cache_allocators.values():
            objects += [allocator, allocator.ledger]
        return sum(hasattr(value, "__kvatlas_hook__") for one in objects for value in vars(one).values())

    def compactor(self) -> Compactor | None:
        return None

    def stop(self) -> None:
        self._one.stop()
