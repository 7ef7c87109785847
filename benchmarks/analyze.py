"""How long `analyze` takes for a whole column of block states: both sets, all counts and the histogram.

Each row is the median of 21 calls after one to warm up. The bars are for two cores; one is used.

    python benchmarks/analyze.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.fragmentation import analyze  # noqa: E402 - needs the path above

CALLS = 21
BARS_MS = {
    "1,000,000 blocks, 5,000 runs": 1.5,
    "1,000,000 blocks, random": 8.0,
    "16,000,000 blocks, 20,000 runs": 25.0,
}


def with_runs(blocks: int, runs: int, seed: int = 1) -> NDArray[np.uint8]:
    """`runs` stretches of random length, each of one random state."""
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(blocks - 1, runs - 1, replace=False)) + 1
    lengths = np.diff(np.concatenate(([0], cuts, [blocks])))
    return np.repeat(generator.integers(0, 4, runs).astype(np.uint8), lengths)


def random_states(blocks: int, seed: int = 1) -> NDArray[np.uint8]:
    """Every block of a state of its own: the worst there is."""
    return np.random.default_rng(seed).integers(0, 5, blocks).astype(np.uint8)


def measure(states: NDArray[np.uint8]) -> list[float]:
    """Milliseconds of each call, ascending."""
    analyze(states)
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        analyze(states)
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken)


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Time the analysis of a column of block states.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pools = (with_runs(1_000_000, 5_000), random_states(1_000_000), with_runs(16_000_000, 20_000))
    rows: list[dict[str, str | float]] = []
    met = True
    print(f"{'pool':<32}{'median ms':>10}{'fastest':>9}{'slowest':>9}{'bar':>7}")
    for (name, bar), states in zip(BARS_MS.items(), pools, strict=True):
        taken = measure(states)
        median = statistics.median(taken)
        met = met and median <= bar
        rows.append({"pool": name, "median_ms": median, "min_ms": taken[0], "max_ms": taken[-1], "bar_ms": bar})
        print(
            f"{name:<32}{median:>10.2f}{taken[0]:>9.2f}{taken[-1]:>9.2f}{bar:>7}{'' if median <= bar else '  MISSED'}"
        )
    if options.json:
        options.json.write_text(json.dumps({"calls": CALLS, "rows": rows}, indent=2, allow_nan=False) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
