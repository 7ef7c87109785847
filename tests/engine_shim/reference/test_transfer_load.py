"""The demo's transfers on the demo's load: what they pin stays a small share of the pool, however fragmented it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agent.demo.figures import suggest_blocks
from agent.demo.run import LEAST_KV_MIB, TRANSFER_BYTES_PER_SECOND, TRANSFER_EVERY
from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.build import EngineSettings, arrivals
from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.geometry import Geometry, smallest_filling
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.transfer import PINNED_SHARE, FolderTarget, Transfers
from engine_shim.workload import load_workload

SMALLEST = Geometry("one-head", 1, 1, 4, 1, 4, 4, 16, "ours, for this test")
SPEED = 2.0
DEADLINE_SECONDS = 120.0


class SharedClock:
    """Virtual time of the engine and of its sending thread: it passes only while both wait."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: float | None = None  # where the sending thread waits: until when
        self._changed = threading.Condition()
        self.sent = 0
        self.started: Callable[[], int] = lambda: 0

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        """The engine's wait: lets the sending thread go on whenever its time has come."""
        with self._changed:
            until = self._now + max(0.0, seconds)
            while True:
                waits = self._changed.wait_for(
                    lambda: self._due is not None or self.sent == self.started(), DEADLINE_SECONDS
                )
                assert waits, "the sending thread neither waits nor is done"
                if self._due is None or self._due > until:
                    break
                self._now, self._due = max(self._now, self._due), None
                self._changed.notify_all()
            self._now = until

    def wait_as_sender(self, seconds: float) -> None:
        with self._changed:
            self._due = self._now + seconds
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._due is None, DEADLINE_SECONDS)

    def wake(self) -> None:
        with self._changed:
            self.sent += 1
            self._changed.notify_all()


def pinned_shares(policy: str, folder: Path, *, seconds: float) -> list[float]:
    """Pinned over all blocks at each step of the demo's engine, for so many seconds of the demo's clock."""
    workload = load_workload("mooncake-conversation")
    blocks = suggest_blocks(workload)
    pool = BlockPool(blocks, policy=policy, reserved=(0,))
    cache = KVCache(SMALLEST, blocks)
    real = smallest_filling(
        blocks, block_tokens=16, token_bytes=lambda one: one.token_bytes(2), least_bytes=LEAST_KV_MIB << 20
    )
    scale = SMALLEST.token_bytes(2) / real.token_bytes(2)  # as many blocks a second as the demo sends
    clock = SharedClock()
    transfers = Transfers(
        pool, cache, FolderTarget(folder), bytes_per_second=TRANSFER_BYTES_PER_SECOND * scale * SPEED,
        wake=clock.wake, clock=clock.now, wait=clock.wait_as_sender,
    )  # fmt: skip
    clock.started = lambda: transfers.in_flight + transfers.totals.sequences + transfers.totals.failed
    engine = Engine(pool, cache, PatternContent(cache), clock=clock, transfers=transfers, transfer_every=TRANSFER_EVERY)
    shares: list[float] = []

    def stop() -> bool:
        shares.append(pool.num_pinned / blocks)
        return clock.now() >= seconds

    engine.serve(arrivals(workload, EngineSettings(engine_id="load")), Pace(speed=SPEED), stop=stop)
    assert transfers.totals.sequences > 50
    assert transfers.totals.skipped == 0
    return shares


def test_what_is_in_transfer_stays_a_small_share(tmp_path: Path) -> None:
    """Under `vllm` nearly each block is a run of its own. With a wait for each, half of the pool was pinned."""
    shares = pinned_shares("vllm", tmp_path, seconds=60.0)
    assert 0.001 < np.mean(shares) < 0.04
    assert max(shares) <= PINNED_SHARE
