"""How fast blocks are copied on this host: moves as plans make them, beside one large `copy_`.

Each pool shape of plan_moves.py is planned, and its first moves are copied in a cache. The large copy takes as many
bytes, between two halves of the same storage, in the same process and thread. Both begin with caches that other memory
has filled, are taken in turns, and the best of several rounds counts: the bar is a share of the large copy's bandwidth.

*Calls alone* is the time of the same calls for one byte each, as a share of the large copy's time: what no way of
calling copies one by one can be rid of. Where blocks are small and lie singly, it is what is lost.

    python benchmarks/block_copy.py [--rounds 15] [--mib 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
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
EVICTING_BYTES = 64 << 20  # read and written between two measurements: beyond every cache
MODELS = ("stories260K", "stories15M", "Qwen2.5-0.5B", "SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B")
SHAPES: tuple[Callable[..., Any], ...] = (islands, aged, random)


def best(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each action, in seconds, taken in turns, with cold caches."""
    other = torch.ones(2 * EVICTING_BYTES, dtype=torch.uint8)
    shortest = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            other[EVICTING_BYTES:].copy_(other[:EVICTING_BYTES])
            began = time.perf_counter()
            action()
            shortest[name] = min(shortest[name], time.perf_counter() - began)
    return shortest


def measure(geometry: Geometry, rounds: int, copied_bytes: int) -> list[dict[str, Any]]:
    """One row for each pool shape."""
    blocks = POOL_BYTES // (16 * geometry.token_bytes(2))
    cache = KVCache(geometry, blocks)
    if cache.memory is None:
        raise RuntimeError("the cache is not on the host")
    move, size = cache.memory.move, cache.block_bytes
    rows = []
    for shape in SHAPES:
        columns = shape(blocks, LIVE, np.random.default_rng(1))
        plan = plan_moves(columns.states, owners=columns.owners, positions=columns.positions)
        moves = plan.moves[: max(1, copied_bytes // size)]
        count = len(moves)
        sources, destinations = moves[:, 0], moves[:, 1]
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
        begins = moves[np.concatenate(([0], breaks))] * size

        def large(count: int = count) -> None:
            cache.blocks[blocks // 2 : blocks // 2 + count].copy_(cache.blocks[:count])

        def moved(sources: Any = sources, destinations: Any = destinations) -> None:
            cache.copier.copy(sources, destinations)

        def called(begins: Any = begins) -> None:
            deque(map(move, begins[:, 1].tolist(), begins[:, 0].tolist(), repeat(1)), maxlen=0)

        seconds = best({"large": large, "moves": moved, "calls": called}, rounds)
        rows.append(
            {
                "model": geometry.name,
                "block_bytes": size,
                "pool": shape.__name__,
                "moves": count,
                "blocks_per_run": count / len(begins),
                "large_gb_per_second": count * size / seconds["large"] / 1e9,
                "moves_gb_per_second": count * size / seconds["moves"] / 1e9,
                "share": seconds["large"] / seconds["moves"],
                "calls_alone": seconds["calls"] / seconds["large"],
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
    print("model          bytes a block  pool     moves  blocks/run  large GB/s  moves GB/s  share (0.70)  calls alone")
    for row in rows:
        shape = f"{row['model']:14} {row['block_bytes']:13,}  {row['pool']:7} {row['moves']:6,}"
        speeds = (
            f"{row['blocks_per_run']:10.1f}  {row['large_gb_per_second']:10.1f}  {row['moves_gb_per_second']:10.1f}"
        )
        print(f"{shape}  {speeds}  {row['share']:12.2f}  {row['calls_alone']:11.2f}")
    if options.json:
        options.json.write_text(json.dumps({"bar": BAR, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
