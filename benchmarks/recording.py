"""What a recording costs: CPU and bytes an hour, beside a pool of 100,000 blocks at 1,000 changes a second.

    python benchmarks/recording.py [--blocks N] [--changes N] [--seconds S] [--json FILE]

Blocks are taken from all over a pool that is full of prefixes, so that nearly each change is an event of its own: the
worst case, since an event tells a whole run of blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine_shim import MapObserver, MapSpec  # noqa: E402 - needs the path above
from engine_shim.pool.block_pool import BlockPool  # noqa: E402

STEPS_PER_SECOND = 25
LIVE_SEQUENCES = 64
BAR_CPU_SHARE = 0.05
BAR_MB_PER_HOUR = 100.0


class Engine:
    """Sequences come and go in a pool in which nothing is free: each block that one takes is evicted first."""

    def __init__(self, folder: Path, blocks: int, changes: int) -> None:
        spec = MapSpec(
            engine_id="engine",
            kind="benchmark",
            model="some-org/some-model-8b-instruct",
            pool="kv",
            total_blocks=blocks,
            block_tokens=16,
            block_bytes=2 * 2**20,
            dtype="bfloat16",
            policy="vllm",
        )
        self._observer = MapObserver.create(spec, folder)
        self._pool = BlockPool(blocks, headroom=0.0, observer=self._observer)
        self._live: deque[tuple[int, list[int]]] = deque()
        self._hash = self._count = 0
        taken = self._pool.allocate(blocks).blocks
        self._register(taken)
        random.Random(1).shuffle(taken)
        self._pool.release(taken)
        # An eviction and an allocation for each block that comes, a release for each that goes.
        self._size = max(1, changes // (3 * STEPS_PER_SECOND))
        for _ in range(2 * LIVE_SEQUENCES):
            self.step()

    def _register(self, blocks: list[int]) -> None:
        self._pool.register_blocks(blocks, range(self._hash, self._hash + len(blocks)))
        self._hash += len(blocks)

    def step(self) -> None:
        observer, size = self._observer, self._size
        owner = observer.open_owner(f"request-{self._count}")
        self._count += 1
        blocks = self._pool.allocate(size, owner=owner).blocks
        self._register(blocks)
        observer.wrote(blocks, [16] * size, 16 * size)
        self._live.append((owner, blocks))
        observer.progressed([one for one, _ in self._live], [16 * len(held) for _, held in self._live])
        if len(self._live) > LIVE_SEQUENCES:
            owner, blocks = self._live.popleft()
            self._pool.release(blocks[::-1], owner=owner)
            observer.close_owner(owner)
        observer.step_ended(len(self._live), 0)


def run_engine(folder: Path, blocks: int, changes: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = Engine(folder, blocks, changes)
    print("ready", flush=True)
    due = time.monotonic()
    while True:
        engine.step()
        due += 1 / STEPS_PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))


def measure(folder: Path, blocks: int, changes: int, seconds: float) -> dict[str, float]:
    """CPU share of the recorder, its memory, and what it wrote; the first seconds are left out."""
    command = [sys.executable, __file__, "--engine", str(folder), "--blocks", str(blocks), "--changes", str(changes)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = folder / "engine.kvrec"
    try:
        assert engine.stdout is not None
        if engine.stdout.readline() != "ready\n":
            sys.exit("the benchmark's engine did not start")
        (path,) = folder.glob("*.kvmap")
        command = [sys.executable, "-m", "engine_shim.launcher", "record", str(path), "-o", str(output), "--json"]
        recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert recorder.stderr is not None
        recorder.stderr.readline()
        time.sleep(2)
        process = psutil.Process(recorder.pid)
        part = output.with_name(output.name + ".part")
        before, size, began = process.cpu_times(), part.stat().st_size, time.monotonic()
        time.sleep(seconds)
        after, passed = process.cpu_times(), time.monotonic() - began
        grown, resident = part.stat().st_size - size, process.memory_info().rss
        recorder.send_signal(signal.SIGINT)
        told = json.loads(recorder.communicate(timeout=60)[0])
    finally:
        engine.terminate()
        engine.wait(60)
    spent = after.user + after.system - before.user - before.system
    return {
        "blocks": blocks,
        "events_per_second": round(told["events"] / (passed + 2), 1),
        "lost_events": told["lost_events"],
        "cpu_share": round(spent / passed, 4),
        "resident_mb": round(resident / 1e6, 1),
        "mb_per_hour": round(grown / passed * 3600 / 1e6, 2),
        "bytes_per_event": round(grown / max(1.0, told["events"] * passed / (passed + 2)), 2),
    }


def main() -> int:
    """Show what was measured; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Measure what a recording costs.")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--changes", type=int, default=1000, help="of blocks in a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine(options.engine, options.blocks, options.changes)
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder:
        found = measure(Path(folder), options.blocks, options.changes, options.seconds)
    for name, value in found.items():
        print(f"{name:<20}{value:>12,}")
    fine = not found["lost_events"] and found["cpu_share"] <= BAR_CPU_SHARE and found["mb_per_hour"] <= BAR_MB_PER_HOUR
    if options.json:
        options.json.write_text(json.dumps({**found, "fine": fine}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
