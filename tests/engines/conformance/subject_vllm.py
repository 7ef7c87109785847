"""vLLM takes part: an engine in this process, prefix sharing, preemption, moves of live blocks."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from contract import BlockFact, Look, PoolFacts, Pools  # type: ignore[import-not-found]
from drive_in_process import Engine  # type: ignore[import-not-found]  # beside vLLM's own tests

from engine_shim.adapters import vllm as adapter
from engine_shim.compaction.compactor import Compactor
from engine_shim.layout import BlockState


class VllmSubject:
    """See `contract.Subject`."""

    faults = ("publish", "no room", "call")

    def __init__(self, work: Path) -> None:
        adapter.register()

    def start(self, *, watched: bool, moves: bool = False) -> None:
        os.environ["KVATLAS_DISABLE"] = "0" if watched else "1"
        os.environ["KVATLAS_VLLM_COMPACTION"] = "1" if moves else "0"
        self._engine = Engine(blocks=40)
        self._look: Look | None = None
        self._engine.at_each_step(self._shown)
        dice = random.Random(6)
        prefix = [dice.randrange(3, 1000) for _ in range(96)]
        for number in range(12):
            start = prefix if number % 2 else prefix[:32]
            self._engine.add(f"r{number}", start + [dice.randrange(3, 1000) for _ in range(10 + 12 * number)], 10)

    def _shown(self) -> None:
        if self._look is not None:
            self._look()

    def step(self, look: Look) -> bool:
        self._look = look
        self._engine.step()
        self._look = None
        return bool(self._engine.engine.has_unfinished_requests())

    def pools(self) -> Pools:
        scheduler = self._engine.scheduler
        cache = scheduler.kv_cache_manager
        holders: dict[int, dict[str, int]] = {}
        for manager in cache.coordinator.single_type_managers:
            for name, table in manager.req_to_blocks.items():
                for place, block in enumerate(table):
                    if not block.is_null:
                        holders.setdefault(block.block_id, {})[name] = place
        blocks: dict[int, BlockFact] = {}
        for block in cache.block_pool.blocks:
            number = block.block_id
            if block.is_null:
                blocks[number] = BlockFact(BlockState.RESERVED)
            elif block.ref_cnt:
                blocks[number] = BlockFact(BlockState.USED, block.ref_cnt, holders.get(number, {}))
            elif block.block_hash is not None:
                blocks[number] = BlockFact(BlockState.CACHED)
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        facts = PoolFacts(len(cache.block_pool.blocks), blocks, len(scheduler.running), waiting)
        assert self._engine.reader is not None
        return [(self._engine.reader, facts)]

    def answers(self) -> Any:
        return dict(self._engine.tokens)

    def hooks(self) -> int:
        scheduler = self._engine.scheduler
        objects = [scheduler, scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool]
        objects += scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(hasattr(value, "__kvatlas_hook__") for one in objects for value in vars(one).values())

    def compactor(self) -> Compactor | None:
        attachment = self._engine.attachment
        return None if attachment is None else attachment.steering.compactor

    def stop(self) -> None:
        for one in adapter.attachments():
            one.stop("the next variant begins")
