"""Small engines and workloads for the tests of the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine_shim.layout import BlockState
from engine_shim.observer import NullObserver
from engine_shim.reference.build import EngineSettings, arrivals, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.engine import Engine
from engine_shim.workload import TraceRequest, Workload

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the KV memory lies: each test that asks for it runs once on each kind of device that is there."""
    name: str = request.param
    return name


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    """Build a tiny engine without a map, whose runs of compaction take what time they need; keyword arguments are
    those of EngineSettings, and `observer`."""
    built: list[Engine] = []

    def make(*, observer: Any = None, **settings: Any) -> Engine:
        values: dict[str, Any] = {
            "engine_id": "test",
            "blocks": 64,
            "model_geometry": "test-tiny",
            "device": "cpu",
            "moving_time_share": 1.0,
        } | settings
        engine, _ = build_engine(EngineSettings(**values), VirtualClock(), observer=observer or NullObserver())
        built.append(engine)
        return engine

    yield make
    for engine in built:
        engine.close()


@pytest.fixture
def serve() -> Server:
    """Serve requests to the end, in virtual time; keyword arguments are those of EngineSettings."""

    def run(engine: Engine, requests: list[TraceRequest], **settings: Any) -> None:
        values: dict[str, Any] = {"engine_id": "test", "model_geometry": "test-tiny"} | settings
        wanted = EngineSettings(**values)
        engine.serve(arrivals(Workload("test", tuple(requests), 0), wanted), wanted.pace, until_idle=True)

    return run


@pytest.fixture
def crowd() -> list[TraceRequest]:
    """Requests that arrive faster than a pool of 64 blocks can hold them; every third repeats an earlier prefix."""
    requests = []
    for index in range(24):
        shared = index % 3 == 2
        prompt = 600 if shared else 80 + 16 * (index % 5)
        hash_ids = (7, 100 + index) if shared else (1000 + index,)
        requests.append(TraceRequest(index, 0.2 * index, prompt if shared else min(prompt, 512), 40 + index, hash_ids))
    return requests


class StateObserver(NullObserver):
    """Follows the states of a pool by events alone, and every state that a block was in at a step's end."""

    def __init__(self, blocks: int) -> None:
        self.states = [BlockState.FREE] * blocks
        self.seen: set[BlockState] = set()
        self.counts: dict[str, int] = {}
        self.tokens = 0
        self.steps = 0
        self.live_owners: set[int] = set()
        self._next_owner = 1

    def open_owner(self, request_id: str, lora: str = "", cache_salt: str = "") -> int:
        self._next_owner += 1
        self.live_owners.add(self._next_owner)
        return self._next_owner

    def close_owner(self, owner: int) -> None:
        self.live_owners.remove(owner)

    def _set(self, blocks: Any, state: BlockState) -> None:
        for block in blocks:
            self.states[block] = state

    def allocated(self, blocks: Any, owner: int = 0, position: int = 0, group: int = 0) -> None:
        assert all(self.states[block] == BlockState.FREE for block in blocks)
        self._set(blocks, BlockState.USED)

    def reused(self, blocks: Any, owner: int = 0, position: int = 0, group: int = 0) -> None:
        assert all(self.states[block] == BlockState.CACHED for block in blocks)
        self._set(blocks, BlockState.USED)

    def freed(self, blocks: Any, owner: int = 0) -> None:
        self._set(blocks, BlockState.FREE)

    def cached(self, blocks: Any, owner: int = 0) -> None:
        self._set(blocks, BlockState.CACHED)

    def evicted(self, blocks: Any) -> None:
        self._set(blocks, BlockState.FREE)

    def pinned(self, blocks: Any) -> None:
        self._set(blocks, BlockState.PINNED)

    def unpinned(self, blocks: Any, *, cached: bool) -> None:
        self._set(blocks, BlockState.CACHED if cached else BlockState.USED)

    def reserved(self, blocks: Any) -> None:
        self._set(blocks, BlockState.RESERVED)

    def wrote(self, blocks: Any, block_tokens: Any, new_tokens: int) -> None:
        assert len(blocks) == len(block_tokens)
        assert all(1 <= tokens <= 16 for tokens in block_tokens)
        self.tokens += new_tokens

    def counted(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def step_ended(self, running: int, waiting: int) -> None:
        self.steps += 1
        self.seen.update(self.states)


@pytest.fixture
def state_observer() -> Callable[[int], StateObserver]:
    """Make an observer for a pool of so many blocks."""
    return StateObserver
