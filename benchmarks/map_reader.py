"""A reader at 1 Hz beside a writer that never rests: are its snapshots whole and fresh, and is the writer slowed?

The writer runs our BlockPool with every column and event on, as fast as it goes, in steps; an operation is one block
allocated or freed. Reader ticks come in windows, on and off in turn, so that the writer's speed with and without
reader is compared within one run.

    python benchmarks/map_reader.py [--seconds 60] [--blocks 100000 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from engine_shim import MapObserver, MapReader, MapSpec
from engine_shim.allocation_map.folders import MEMORY_FOLDER
from engine_shim.errors import MapUnavailable
from engine_shim.pool.block_pool import BlockPool

STEP_SEQUENCES = 32
SEQUENCE_BLOCKS = 32
WINDOW_SECONDS = 5.0


def churn(connection: Connection, folder: str, blocks: int) -> None:
    """The writer process: steps without pause until told to stop; answers each message with its operations so far."""
    observer = MapObserver.create(
        MapSpec(
            engine_id=f"bench-{blocks}",
            kind="reference",
            model="none",
            pool="kv",
            total_blocks=blocks,
            block_tokens=16,
            block_bytes=1,
            dtype="none",
            events_per_second=500_000,
        ),
        Path(folder),
    )
    pool = BlockPool(blocks, observer=observer, headroom=0.0)
    dice = random.Random(7)
    live: list[list[int]] = []
    while pool.num_used < blocks // 2:
        live.append(pool.allocate(SEQUENCE_BLOCKS).blocks)
    observer.step_ended(len(live), 0)
    connection.send(str(observer.path) if observer.path else f"error: {observer.reason}")
    operations = 0
    while True:
        for _ in range(STEP_SEQUENCES):
            index = dice.randrange(len(live))
            pool.release(live[index])
            live[index] = pool.allocate(SEQUENCE_BLOCKS).blocks
        operations += 2 * STEP_SEQUENCES * SEQUENCE_BLOCKS
        observer.step_ended(len(live), 0)
        if connection.poll():
            if connection.recv() == "stop":
                break
            connection.send((time.monotonic(), operations, observer.reason))
    observer.close()


def measure(blocks: int, seconds: float) -> dict[str, Any]:
    """One pool size; the reader works in every second window."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as folder:
        writer = context.Process(target=churn, args=(there, folder, blocks))
        writer.start()
        path = here.recv()
        if path.startswith("error"):
            sys.exit(path)
        reader = MapReader(Path(path))
        ticks = whole = fresh = disagreeing = 0
        read_seconds: list[float] = []
        rates: dict[bool, list[float]] = {True: [], False: []}

        def mark() -> tuple[float, int]:
            here.send("mark")
            at, operations, reason = here.recv()
            if reason:
                sys.exit(f"the writer's observer failed: {reason}")
            return at, operations

        reading = False
        last_whole_ns = 0
        measured = 0.0
        while measured < seconds:
            reading = not reading
            began, before = mark()
            end = time.monotonic() + WINDOW_SECONDS
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                if not reading or end - time.monotonic() < 0:
                    continue
                ticks += 1
                start = time.perf_counter()
                try:
                    snapshot = reader.read(timeout_seconds=0.5)
                except MapUnavailable:
                    snapshot = None
                read_seconds.append(time.perf_counter() - start)
                if snapshot is not None:
                    whole += 1
                    last_whole_ns = snapshot.published_unix_ns
                    counted = np.bincount(snapshot.states, minlength=8)
                    disagreeing += tuple(counted.tolist()) != snapshot.state_counts
                fresh += time.time_ns() - last_whole_ns <= 2_000_000_000
            ended, after = mark()
            rates[reading].append((after - before) / (ended - began))
            measured += WINDOW_SECONDS if reading else 0
        here.send("stop")
        writer.join()
    # Each window with reader against the mean of its neighbours without: drift of the machine cancels.
    off = rates[False]
    ratios = [
        on / off[i] if i == 0 else 2 * on / (off[i - 1] + off[min(i, len(off) - 1)])
        for i, on in enumerate(rates[True])
        if off
    ]
    return {
        "blocks": blocks,
        "operations_per_second": round(statistics.median(rates[True])),
        "ticks": ticks,
        "whole_share": whole / ticks,
        "fresh_share": fresh / ticks,
        "disagreeing_snapshots": disagreeing,
        "torn_attempts_discarded": reader.torn_reads,
        "stale_column_segments": reader.stale_segments,
        "read_ms_p50": round(statistics.median(read_seconds) * 1e3, 3),
        "read_ms_max": round(max(read_seconds) * 1e3, 3),
        "writer_speed_with_reader": round(statistics.median(ratios), 4) if ratios else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of reading, for each pool size")
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(blocks, options.seconds) for blocks in options.blocks]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "map_reader", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
