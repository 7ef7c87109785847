"""What watching SGLang's slot pool costs: its real allocator and radix cache on a recorded trace, watched against not.

Each round serves the same requests over a fresh tree, once watched (every operation noted, every 100 ms published to a
real map) and once not, in an order that turns; the result is the CPU time of the one thread, watched over not, as the
median over the rounds. Pools of 20,000 and of 1,000,000 slots of one token, and one of pages.

    python benchmarks/sglang_allocator.py [--rounds 15] [--json FILE]

It runs with what scripts/vllm_env.sh and scripts/sglang_env.sh print, and builds both where they are not there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.05
STEPS = 360  # by then a pool of a million slots is nearly full
POOLS = {"token, 20,000 slots": ("token", 20_000), "token, 1,000,000 slots": ("token", 1_000_000),
         "paged, 1,000,000 slots": ("paged", 1_000_000)}  # fmt: skip


def measure(rounds: int) -> dict[str, Any]:
    """Everything; runs inside the environment with SGLang."""
    from real_sglang import Driver, make  # type: ignore[import-not-found]  # beside SGLang's own tests

    from engine_shim.adapters import sglang as adapter

    def one(kind: str, size: int, watched: bool) -> float:
        tree = make(kind, size)
        attachment = adapter.attach(tree) if watched else None
        if watched and attachment is None:
            sys.exit("nothing is watched")
        driver = Driver(tree, prompt_share=0.2, concurrent=12)
        spent = 0.0
        for _ in range(STEPS):
            began = time.thread_time()
            driver.step()
            if attachment is not None:
                attachment.step(len(driver.running), 0)
            spent += time.thread_time() - began
        if attachment is not None:
            attachment.stop("the round is over")
        return spent

    gc.collect()
    gc.freeze()  # as SGLang's server does: else whoever makes objects pays for looking through all that was imported
    rows = []
    for name, (kind, size) in POOLS.items():
        one(kind, size, True)
        ratios, bare = [], []
        for turn in range(rounds):
            order = (True, False) if turn % 2 else (False, True)
            found = {watched: one(kind, size, watched) for watched in order}
            ratios.append(found[True] / found[False])
            bare.append(found[False])
        ratios.sort()
        median = statistics.median(ratios)
        rows.append(
            {
                "pool": name,
                "milliseconds_a_step": 1000 * statistics.median(bare) / STEPS,
                "ratio": median,
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                "met": median <= BAR,
            }
        )
    return {"rounds": rounds, "bar": BAR, "rows": rows}


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this Python, which has SGLang")
    options = parser.parse_args()
    if not options.here:
        found = []
        for script in ("vllm_env.sh", "sglang_env.sh"):
            run = subprocess.run([ROOT / "scripts" / script], stdout=subprocess.PIPE, text=True, check=False)
            if run.returncode:
                return run.returncode
            found.append(run.stdout.strip())
        command = [found[0], str(Path(__file__).resolve()), "--here", "--rounds", str(options.rounds)]
        command += ["--json", str(options.json.resolve())] if options.json else []
        folders = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "engines" / "sglang"), found[1]))
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as maps:
            environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "KVATLAS_DIR": maps}
            return subprocess.run(command, env=environment, check=False).returncode
    result = measure(options.rounds)
    for row in result["rows"]:
        low, high = row["quartiles"]
        print(
            f"{row['pool']:>24}: {row['milliseconds_a_step']:>7.2f} ms a step not watched, watched {row['ratio']:.3f} "
            f"of that (quartiles {low:.3f} to {high:.3f}), bar {BAR}: {'met' if row['met'] else 'MISSED'}"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if all(row["met"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
