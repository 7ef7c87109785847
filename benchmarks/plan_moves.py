"""How long `plan_moves` takes, how many moves it plans, and what they do to the runs of sequences.

Pools differ in how live blocks lie: *islands* are whole sequences scattered over a pool that is else allocatable,
*aged* is what sequences of mixed length leave behind in random order, *random* is every block by a throw of dice, which
no allocator does: the most moves there can be.

Times are by the clock; `cpu` is the CPU time of the thread, which a busy machine disturbs less. The first plan of a
case takes its memory from the system, and is the slowest.

    python benchmarks/plan_moves.py [--blocks 1000000] [--repeat 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim.compaction.planning import plan_moves
from engine_shim.layout import BlockState

CACHED_SHARE = 0.6  # of allocatable blocks, as in a pool with its prefix cache on
CACHED_PIECE = 40  # blocks


class Columns(NamedTuple):
    states: NDArray[np.uint8]
    owners: NDArray[np.uint32]
    positions: NDArray[np.uint32]


def islands(blocks: int, live: float, dice: np.random.Generator) -> Columns:
    """Sequences of 40 blocks, each in one run, at random places."""
    return _scatter(blocks, live, 40, dice)


def aged(blocks: int, live: float, dice: np.random.Generator) -> Columns:
    """Sequences of some 400 blocks in pieces of 3, at random places."""
    return _scatter(blocks, live, 3, dice, pieces=133)


def random(blocks: int, live: float, dice: np.random.Generator) -> Columns:
    """Single blocks at random places, of sequences of 400."""
    return _scatter(blocks, live, 1, dice, pieces=400)


def _scatter(blocks: int, live: float, piece: int, dice: np.random.Generator, pieces: int = 1) -> Columns:
    cached = np.repeat(dice.random(blocks // CACHED_PIECE + 1) < CACHED_SHARE, CACHED_PIECE)[:blocks]
    states = np.where(cached, BlockState.CACHED, BlockState.FREE).astype(np.uint8)
    owners, positions = np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32)
    places = dice.permutation(blocks // piece)[: round(blocks * live / piece)]
    index = np.arange(places.size)
    for offset in range(piece):
        states[places * piece + offset] = BlockState.USED
        owners[places * piece + offset] = index // pieces + 1
        positions[places * piece + offset] = index % pieces * piece + offset
    return Columns(states, owners, positions)


CASES: tuple[tuple[str, Callable[[int, float, np.random.Generator], Columns], float, bool, int | None], ...] = (
    ("islands, live 0.05", islands, 0.05, True, None),
    ("islands, live 0.60", islands, 0.60, True, None),
    ("aged, live 0.10", aged, 0.10, True, None),
    ("aged, live 0.60", aged, 0.60, True, None),
    ("aged, live 0.60, 20,000 moves at most", aged, 0.60, True, 20_000),
    ("aged, live 0.60, no owners", aged, 0.60, False, None),
    ("random, live 0.02", random, 0.02, True, None),
    ("random, live 0.50", random, 0.50, True, None),
    ("random, live 0.50, no owners", random, 0.50, False, None),
)


def measure(case: str, columns: Columns, with_owners: bool, max_moves: int | None, repeat: int) -> dict[str, Any]:
    """Plan `repeat` times and describe the plan."""
    owners, positions = (columns.owners, columns.positions) if with_owners else (None, None)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for _ in range(repeat):
        began, cpu_began = time.perf_counter(), time.thread_time()
        plan = plan_moves(columns.states, owners=owners, positions=positions, max_moves=max_moves)
        cpu_seconds.append(time.thread_time() - cpu_began)
        seconds.append(time.perf_counter() - began)
    return {
        "case": case,
        "blocks": columns.states.size,
        "ms_p50": round(statistics.median(seconds) * 1e3, 2),
        "ms_min": round(min(seconds) * 1e3, 2),
        "ms_max": round(max(seconds) * 1e3, 2),
        "cpu_ms_p50": round(statistics.median(cpu_seconds) * 1e3, 2),
        "cpu_ms_max": round(max(cpu_seconds) * 1e3, 2),
        "moves": len(plan.moves),
        "fragmentation_before": plan.fragmentation_before,
        "fragmentation_after": plan.fragmentation_after,
        "cached_lost": plan.cached_lost,
        "runs_before": plan.runs_before,
        "runs_after": plan.runs_after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(
        f"{'case':38} {'blocks':>8} {'ms p50':>7} {'min':>7} {'max':>7} {'cpu p50':>7} {'max':>7} "
        f"{'moves':>7} {'F':>6} {'after':>6} {'runs':>14}"
    )
    for blocks in options.blocks:
        for case, make, live, with_owners, max_moves in CASES:
            columns = make(blocks, live, np.random.default_rng(7))
            row = measure(case, columns, with_owners, max_moves, options.repeat)
            rows.append(row)
            runs = f"{row['runs_before']}>{row['runs_after']}" if with_owners else "-"
            print(
                f"{case:38} {blocks:8} {row['ms_p50']:7.2f} {row['ms_min']:7.2f} {row['ms_max']:7.2f} "
                f"{row['cpu_ms_p50']:7.2f} {row['cpu_ms_max']:7.2f} "
                f"{row['moves']:7} {row['fragmentation_before']:6.3f} {row['fragmentation_after']:6.3f} {runs:>14}"
            )
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "plan_moves", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
