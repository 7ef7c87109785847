"""How fast blocks are copied on this host: moves as plans make them, beside one large `copy_`.

Each pool shape of plan_moves.py is planned, its first moves are copied in every tensor of a cache, and the best of
several rounds counts, taken in turns with the large copy. The bar is a share of the large copy's bandwidth.

    python benchmarks/block_copy.py [--rounds 15] [--mib 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan_moves import aged, islands, random
from engine_shim.compaction.planning import plan_moves
from engine_shim.reference.geometry import Geometry, named_geometry
from engine_shim.reference.kv_cache import KVCache

BAR = 0.70
LIVE = 0.6
POOL_BYTES = 1 << 30
LARGE_BYTES = 128 << 20  # beyond every cache
MODELS = ("stories260K", "Qwen2.5-0.5B", "SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B")
SHAPES: tuple[Callable[..., Any], ...] = (islands, aged, random)


def best(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each action, in seconds, taken in turns."""
    shortest = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            shortest[name] = min(shortest[name], time.perf_counter() - began)
    return shortest


def measure(geometry: Geometry, rounds: int, copied_bytes: int) -> list[dict[str, Any]]:
    """One row for each pool shape."""
    blocks = POOL_BYTES // (16 * geometry.token_bytes(2))
    cache = KVCache(geometry, blocks)
    size = cache.block_bytes // len(cache.tensors)
    flat = torch.ones(2 * LARGE_BYTES, dtype=torch.uint8)
    rows = []
    for shape in SHAPES:
        columns = shape(blocks, LIVE, np.random.default_rng(1))
        plan = plan_moves(columns.states, owners=columns.owners, positions=columns.positions)
        moves = plan.moves[: max(1, copied_bytes // cache.block_bytes)]
        count = len(moves)
        sources, destinations = moves[:, 0], moves[:, 1]
        runs = 1 + int(np.count_nonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)))
        half = count * cache.block_bytes

        def moved(sources: Any = sources, destinations: Any = destinations) -> None:
            cache.copier.copy(sources, destinations)

        seconds = best({"large": lambda: flat[LARGE_BYTES:].copy_(flat[:LARGE_BYTES]), "moves": moved}, rounds)
        rows.append(
            {
                "model": geometry.name,
                "row_bytes": size,
                "pool": shape.__name__,
                "moves": count,
                "blocks_per_run": count / runs,
                "large_gb_per_second": LARGE_BYTES / seconds["large"] / 1e9,
                "moves_gb_per_second": half / seconds["moves"] / 1e9,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=16, help="copied in one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in MODELS for row in measure(named_geometry(name), options.rounds, options.mib << 20)]
    # Of the large copy the best of the whole run: it takes so long that on a busy machine hardly any is undisturbed.
    large = max(row["large_gb_per_second"] for row in rows)
    print(f"one large copy_: {large:.1f} GB/s (bytes copied a second)")
    print("model          bytes a row  pool     moves  blocks/run  moves GB/s  share (bar 0.70)")
    for row in rows:
        row["share"] = row["moves_gb_per_second"] / large
        shape = f"{row['model']:14} {row['row_bytes']:11,}  {row['pool']:7} {row['moves']:6,}"
        print(f"{shape}  {row['blocks_per_run']:10.1f}  {row['moves_gb_per_second']:10.1f}  {row['share']:5.2f}")
    if options.json:
        options.json.write_text(json.dumps({"bar": BAR, "large_gb_per_second": large, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
