"""SGLang takes part with its allocator and radix cache on a recorded trace; its maps tell states, and no owners."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from contract import BlockFact, Look, PoolFacts, Pools  # type: ignore[import-not-found]
from drive_allocators import truth  # type: ignore[import-not-found]  # beside SGLang's own tests
from real_sglang import Driver, make  # type: ignore[import-not-found]

from engine_shim import MapReader
from engine_shim.adapters import sglang as adapter
from engine_shim.adapters.sglang.shape import pools_of
from engine_shim.compaction.compactor import Compactor
from engine_shim.layout import BlockState

STEPS = 60


class SglangSubject:
    """See `contract.Subject`."""

    faults = ("states", "no room")

    def __init__(self, work: Path) -> None: ...

    def start(self, *, watched: bool, moves: bool = False) -> None:
        self._tree = make("sliding", 3_000)
        self._one = adapter.attach(self._tree, {**os.environ, "KVATLAS_DISABLE": "0" if watched else "1"})
        self._driver = Driver(self._tree, prompt_share=0.04, concurrent=5)
        self._answers: list[list[int]] = []
        self._left = STEPS

    def step(self, look: Look) -> bool:
        self._left -= 1
        if self._left:
            self._driver.step()
        else:
            self._driver.drain()
        self._answers.append([int(slot) for one in self._driver.running for slot in one["slots"][-2:]])
        if self._one is not None:
            self._one.step(len(self._driver.running), 0)
        look()
        return self._left > 0

    def pools(self) -> Pools:
        assert self._one is not None
        found: Pools = []
        for pool, states in zip(self._one.pools, truth(self._tree), strict=True):
            blocks = {block: BlockFact(BlockState(state)) for block, state in enumerate(states.tolist()) if state}
            facts = PoolFacts(len(states), blocks, len(self._driver.running), 0)
            found.append((MapReader(pool.map.path), facts))
        return found

    def answers(self) -> Any:
        return self._answers

    def hooks(self) -> int:
        objects = [self._tree, *pools_of(self._tree.token_to_kv_pool_allocator)]
        return sum(hasattr(value, "__kvatlas_hook__") for one in objects for value in vars(one).values())

    def compactor(self) -> Compactor | None:
        return None

    def stop(self) -> None:
        if self._one is not None:
            self._one.stop("the next variant begins")
