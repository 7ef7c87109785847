"""Engines for the agent's benchmarks: pools with real maps in a process of their own, at a steady modest rate.

python benchmarks/_engines.py FOLDER ENGINES BLOCKS STEPS_PER_SECOND
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine_shim import MapObserver, MapSpec  # noqa: E402 - needs the path above
from engine_shim.pool.block_pool import BlockPool  # noqa: E402

MAX_SEQUENCES = 64


class Engine:
    """Sequences of random length come and go, so that about half of the pool is in use."""

    def __init__(self, folder: Path, number: int, blocks: int) -> None:
        spec = MapSpec(
            engine_id=f"engine-{number}",
            kind="benchmark",
            model="some-org/some-model-8b-instruct",
            pool="kv",
            total_blocks=blocks,
            block_tokens=16,
            block_bytes=2 * 2**20,
            dtype="bfloat16",
            headroom_blocks=blocks // 10,
            policy="vllm",
        )
        self._observer = MapObserver.create(spec, folder)
        if self._observer.path is None:
            sys.exit(f"no map: {self._observer.reason}")
        self._pool = BlockPool(blocks, reserved=(0,), observer=self._observer)
        self._live: deque[tuple[int, list[int]]] = deque()
        self._dice = random.Random(number)
        self._mean_blocks = max(1, blocks // (2 * MAX_SEQUENCES))
        self._count = 0

    def step(self) -> None:
        """One sequence comes, the oldest goes where there are enough; then everything is published."""
        size = self._dice.randint(1, 2 * self._mean_blocks - 1)
        owner = self._observer.open_owner(f"request-{self._count}")
        self._count += 1
        blocks = self._pool.allocate(size, owner=owner).blocks
        tokens = 16 * size - self._dice.randrange(16)
        self._observer.wrote(blocks, [16] * (size - 1) + [tokens - 16 * (size - 1)], tokens)
        self._observer.progressed([owner], [tokens])
        self._live.append((owner, blocks))
        if len(self._live) > MAX_SEQUENCES:
            owner, blocks = self._live.popleft()
            self._pool.release(blocks[::-1], owner=owner)
            self._observer.close_owner(owner)
        self._observer.step_ended(len(self._live), 0)

    def close(self) -> None:
        self._observer.close()


def start(folder: Path, engines: int, blocks: int, steps_per_second: float) -> subprocess.Popen[str]:
    """The process, once all maps are there. End it with terminate()."""
    command = [sys.executable, __file__, str(folder), str(engines), str(blocks), str(steps_per_second)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        sys.exit("the benchmark's engines did not start")
    return process


def main() -> None:
    folder, engines, blocks, rate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    running = [Engine(folder, number, blocks) for number in range(engines)]
    for _ in range(2 * MAX_SEQUENCES):
        for engine in running:
            engine.step()
    print("ready", flush=True)
    try:
        # The engines take turns, so that not all publish at the same moment.
        pause = 1 / (rate * engines)
        due = time.monotonic()
        while True:
            for engine in running:
                engine.step()
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))
    finally:
        for engine in running:
            engine.close()


if __name__ == "__main__":
    main()
