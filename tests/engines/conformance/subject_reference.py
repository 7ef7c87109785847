"""Our reference engine takes part: torch on the CPU, a tiny model, prefix sharing, preemption, moves of live blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract import BlockFact, Look, PoolFacts, Pools  # type: ignore[import-not-found]

from engine_shim import MapObserver, MapReader
from engine_shim.compaction.compactor import Compactor
from engine_shim.layout import BlockState
from engine_shim.observer import NullObserver
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.workload import TraceRequest

BLOCKS, BLOCK_TOKENS, VOCABULARY = 48, 16, 512


class ReferenceSubject:
    """See `contract.Subject`."""

    faults = ("publish", "no room")

    def __init__(self, work: Path) -> None:
        self._folder = work / "reference"

    def start(self, *, watched: bool, moves: bool = False) -> None:
        settings = EngineSettings(
            engine_id="conformance",
            blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            model_geometry="test-tiny",
            dtype="float32",
            device="cpu",
            content="model",
            control=False,
            moving_time_share=1.0,
        )
        observer = None if watched else NullObserver()
        self._engine, self._observer = build_engine(
            settings, VirtualClock(), map_folder=self._folder, observer=observer
        )
        self._waiting = [self._sequence(index) for index in range(14)]
        self._sequences = list(self._waiting)

    @staticmethod
    def _sequence(index: int) -> Sequence:
        shared = index % 3 == 2  # a prefix of 512 tokens is too long for this pool: these share all of their prompt
        hashes = (7,) if shared else (100 + index,)
        return sequence_of(
            TraceRequest(index, 0.0, 60 + (0 if shared else 9 * index), 12 + 5 * (index % 4), hashes),
            BLOCK_TOKENS,
            vocabulary=VOCABULARY,
        )

    def step(self, look: Look) -> bool:
        if self._waiting:
            self._engine.submit(self._waiting.pop(0))
        self._engine.step()
        look()
        return bool(self._waiting or self._engine.scheduler.has_work or self._engine.compaction.active)

    def pools(self) -> Pools:
        assert isinstance(self._observer, MapObserver)
        assert self._observer.path is not None
        pool, scheduler = self._engine.pool, self._engine.scheduler
        holders: dict[int, dict[str, int]] = {}
        for sequence in scheduler.running:
            for place, block in enumerate(sequence.table):
                holders.setdefault(block, {})[sequence.request_id] = place
        blocks: dict[int, BlockFact] = {}
        for block, state in enumerate(BlockState(value) for value in pool.states().tolist()):
            if state is BlockState.RESERVED:
                blocks[block] = BlockFact(state)
            elif state is not BlockState.FREE:
                blocks[block] = BlockFact(state, pool.references(block), holders.get(block, {}))
        facts = PoolFacts(pool.num_blocks, blocks, len(scheduler.running), len(scheduler.waiting))
        return [(MapReader(self._observer.path), facts)]

    def answers(self) -> Any:
        return {sequence.request_id: sequence.tokens.tolist() for sequence in self._sequences}

    def hooks(self) -> int:
        return 0

    def compactor(self) -> Compactor | None:
        return self._engine.compaction

    def stop(self) -> None:
        self._engine.close()
        if isinstance(self._observer, MapObserver):
            self._observer.close()
