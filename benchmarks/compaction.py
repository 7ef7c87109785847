"""What compaction costs the reference engine while it serves, and what it gives.

One engine serves a steady number of sequences. Windows of steps with runs of compaction (B) and without (A) follow
each other as A B B A; every step is timed, by the clock and in CPU time of its thread, which a busy machine disturbs
less. A step of a run is any that does part of it: looking at the pool, planning, waiting for a plan that another thread
makes, moving a chunk, measuring at the end; not one that only waits so that runs keep to their share of the time. It is
compared with the median of steps of an equal batch outside runs, throughput by pairs of windows, relative to such
medians. What runs owe of their share is paid off before the next window begins, so that no window without them pays for
one with them. Contents are verified at the end. The same is done with a pool of 91,200 blocks and long prompts, where
whole runs follow each other. *Elastic* and *transfer* are measured on another engine: predicted beside realised, and
descriptors before and after.

In pattern mode no model runs: a step takes some 0.3 ms, and whatever is added to it weighs as much as it ever can. With
`--content model` a small decoder runs, as it does in an engine.

    python benchmarks/compaction.py [--content model] [--rounds 5] [--steps N] [--large-rounds 3] [--budget-ms 2]
        [--time-share 0.0125] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_shim.compaction.report import CompactionReport
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE
from engine_shim.observer import NullObserver
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.consumers import transfer_cost
from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest

SEQUENCES = 48
BLOCKS = 3000
LARGE_BLOCKS, LARGE_GEOMETRY, LARGE_SCALE = 91_200, "stories260K", 24
POOLS = {BLOCKS: "110 kB blocks", LARGE_BLOCKS: "10 kB blocks"}  # what the table calls them
MOVED_SHARE = 0.06  # of the live blocks, by the runs of a window, if they get so far
BAR_THROUGHPUT = 0.98
BAR_ELASTIC = 0.95


def build(
    geometry: str,
    *,
    blocks: int = BLOCKS,
    elastic: bool = False,
    policy: str = "vllm",
    budget: float = 0.002,
    content: str = "pattern",
    time_share: float = 1.0,
) -> Engine:
    settings = EngineSettings(
        engine_id="benchmark",
        blocks=blocks,
        model_geometry=geometry,
        device="cpu",
        content=content,
        policy=policy,
        prefix_cache=not elastic,
        elastic=elastic,
        compaction=RunSettings(max_step_seconds=budget),
        moving_time_share=time_share,
    )
    return build_engine(settings, VirtualClock(), observer=NullObserver())[0]


class Load:
    """Keeps so many sequences in the engine; prompts of 10 to 40 blocks, `scale` times as long, answers of up to 20."""

    def __init__(self, engine: Engine, seed: int = 1, scale: int = 1) -> None:
        self.engine, self.dice, self.count, self.scale = engine, random.Random(seed), 0, scale
        model_reads = not isinstance(engine.runner, PatternContent)
        self.vocabulary = engine.cache.geometry.vocabulary if model_reads else None

    def refill(self) -> None:
        scheduler = self.engine.scheduler
        while len(scheduler.running) + len(scheduler.waiting) < SEQUENCES:
            self.count += 1
            prompt, output = self.dice.randint(160, 640), self.dice.randint(40, 320)
            own = range(2 * self.scale)  # what follows the first 512 tokens, which others may have too
            hash_ids = (self.dice.randrange(200), *(1000 + self.count + 1_000_000 * part for part in own))
            request = TraceRequest(self.count, 0.0, prompt * self.scale, output, hash_ids)
            self.engine.submit(sequence_of(request, 16, vocabulary=self.vocabulary))


class Step(NamedTuple):
    """One step: its sequences and tokens, whether part of a run was done, and how long it took."""

    batch: tuple[int, int]
    moving: bool  # was part of a run done?
    seconds: Sequence[float]  # by the clock, and of CPU time
    work: float  # CPU seconds of the run itself


class Window:
    """Steps of one kind."""

    def __init__(self, load: Load, steps: int, *, moving: bool) -> None:
        engine = load.engine
        self.reports: list[CompactionReport] = []
        self.steps: list[Step] = []
        self.live = engine.pool.num_used
        advance = engine.compaction.step
        work = 0.0

        def timed(*, idle: bool = False) -> bool:
            nonlocal work
            begun = time.thread_time()
            going = advance(idle=idle)
            work = time.thread_time() - begun
            return going

        most = math.ceil(MOVED_SHARE * self.live)
        limits = replace(engine.compaction.defaults, max_replans=0)
        for _ in range(steps):
            load.refill()
            # In this pool a run ends early, since the next allocations lie anywhere: another one follows.
            if moving and not engine.compaction.active and self.moved < most:
                engine.compaction.start(replace(limits, max_moves=most - self.moved), done=self.reports.append)
            busy = engine.compaction.active
            before, start, cpu_start = engine.report().computed_tokens, time.perf_counter(), time.thread_time()
            engine.compaction.step = timed  # type: ignore[method-assign]
            engine.step()
            engine.compaction.step = advance  # type: ignore[method-assign]
            seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
            batch = (len(engine.scheduler.running), engine.report().computed_tokens - before)
            worked = busy and not engine.compaction.rested
            self.steps.append(Step(batch, worked, (seconds, cpu_seconds), work))
        while engine.compaction.active or engine.compaction.owes:
            engine.step()
            load.refill()

    @property
    def moved(self) -> int:
        return sum(report.moved_blocks for report in self.reports)


def quiet_medians(windows: list[Window], column: int) -> dict[tuple[int, int], float]:
    """The median seconds of steps outside runs, by batch: its sequences and its tokens. By the clock (column 0) or
    of CPU time (1); batches that were seen fewer than eight times are left out."""
    quiet = defaultdict(list)
    for window in windows:
        for step in window.steps:
            if not step.moving:
                quiet[step.batch].append(step.seconds[column])
    return {batch: statistics.median(times) for batch, times in quiet.items() if len(times) >= 8}


def excess_ms(windows: list[Window], column: int) -> tuple[list[float], list[float]]:
    """Milliseconds over the median quiet step of an equal batch: of steps of a run, and of the others."""
    medians = quiet_medians(windows, column)
    busy: list[float] = []
    quiet: list[float] = []
    for window in windows:
        for step in window.steps:
            if step.batch in medians:
                (busy if step.moving else quiet).append(1000 * (step.seconds[column] - medians[step.batch]))
    return busy, quiet


def relative_speed(window: Window, medians: dict[tuple[int, int], float], column: int) -> float:
    """What the window's steps would take as quiet medians of equal batches, over what they took: its throughput,
    without the chance of which requests it met."""
    steps = [step for step in window.steps if step.batch in medians]
    return sum(medians[step.batch] for step in steps) / sum(step.seconds[column] for step in steps)


def served(
    geometry: str,
    rounds: int,
    steps: int,
    budget: float,
    *,
    blocks: int = BLOCKS,
    scale: int = 1,
    content: str = "pattern",
    time_share: float,
) -> dict[str, Any]:
    engine = build(geometry, blocks=blocks, budget=budget, content=content, time_share=time_share)
    load = Load(engine, scale=scale)
    while engine.pool.num_free or engine.report().steps < 600:  # until it is full of prefixes, and lengths are mixed
        Window(load, 100, moving=False)
    gc.collect()
    gc.freeze()  # as servers do: else collections of all that was made so far fall into steps at random
    windows: list[tuple[bool, Window]] = []
    for _ in range(rounds):
        windows += [(moving, Window(load, steps, moving=moving)) for moving in (False, True, True, False)]
    every = [window for _, window in windows]
    ratios: dict[int, list[float]] = {}
    for column in (0, 1):
        medians = quiet_medians(every, column)
        speeds = [(moving, relative_speed(window, medians, column)) for moving, window in windows]
        pairs = [dict(speeds[i : i + 2]) for i in range(0, len(speeds), 2)]
        ratios[column] = [pair[True] / pair[False] for pair in pairs]
    mismatches = engine.verify_all() if content == "pattern" else None  # a model's contents are in its tokens alone
    moving_windows = [window for moving, window in windows if moving]
    reports = [report for window in moving_windows for report in window.reports]
    with_chunk, without = excess_ms(every, 0)
    cpu_with_chunk, cpu_without = excess_ms(every, 1)
    work = [1000 * step.work for window in every for step in window.steps if step.moving]
    of_runs = sum(step.work for window in moving_windows for step in window.steps)
    of_steps = sum(step.seconds[1] for window in moving_windows for step in window.steps)
    result: dict[str, Any] = {
        "geometry": geometry,
        "blocks": blocks,
        "block_bytes": engine.cache.block_bytes,
        "live_blocks": statistics.mean(window.live for window in moving_windows),
        "moved_blocks": sum(report.moved_blocks for report in reports),
        "moved_share_per_window": statistics.mean(window.moved / window.live for window in moving_windows),
        "runs": len(reports),
        "outcomes": sorted({report.outcome.value for report in reports}),
        "fragmentation_before": statistics.median(report.before.fragmentation or 0.0 for report in reports),
        "fragmentation_after": statistics.median(report.after.fragmentation or 0.0 for report in reports),
        "steps_of_runs": len(with_chunk),
        "excess_p50_ms": float(np.percentile(with_chunk, 50)),
        "excess_p99_ms": float(np.percentile(with_chunk, 99)),
        "excess_p99_without_ms": float(np.percentile(without, 99)),
        "excess_cpu_p50_ms": float(np.percentile(cpu_with_chunk, 50)),
        "excess_cpu_p99_ms": float(np.percentile(cpu_with_chunk, 99)),
        "excess_cpu_p99_without_ms": float(np.percentile(cpu_without, 99)),
        "work_cpu_p99_ms": float(np.percentile(work, 99)),
        "work_cpu_max_ms": max(work),
        "boundary_longest_ms": [1000 * report.longest_stall_seconds for report in reports],
        "budget_ms": 1000 * budget,
        "time_share_bound": time_share,
        "time_share_cpu": of_runs / of_steps,
        "throughput_ratio": statistics.median(ratios[0]),
        "throughput_cpu_ratio": statistics.median(ratios[1]),
        "throughput_pairs": len(ratios[0]),
        "cached_lost": sum(report.cached_lost for report in reports),
        "mismatches": None if mismatches is None else len(mismatches),
    }
    result["boundary_p50_ms"] = statistics.median(result["boundary_longest_ms"])
    engine.close()
    return result


def gains(geometry: str) -> dict[str, Any]:
    engine = build(geometry, elastic=True, policy="fifo")
    load = Load(engine, seed=2)
    Window(load, 500, moving=False)
    assert engine.elastic is not None
    before = transfer_cost(engine.scheduler.running)
    held = engine.elastic.resident_bytes()
    reports: list[CompactionReport] = []
    engine.compaction.start(RunSettings(target=0.02), done=reports.append)
    while engine.compaction.active:
        engine.compaction.step()
    after = transfer_cost(engine.scheduler.running)
    realised = held - engine.elastic.resident_bytes()
    mismatches = engine.verify_all()
    engine.close()
    report = reports[0]
    predicted = report.given_back_bytes_predicted or 0
    return {
        "geometry": geometry,
        "moved_blocks": report.moved_blocks,
        "fragmentation_before": report.before.fragmentation,
        "fragmentation_after": report.after.fragmentation,
        "predicted_bytes": predicted,
        "realised_bytes": realised,
        "realised_share": realised / predicted if predicted else None,
        "runs_per_sequence_before": before.runs_per_sequence,
        "runs_per_sequence_after": after.runs_per_sequence,
        "descriptors_before": before.runs,
        "descriptors_after": after.runs,
        "mismatches": len(mismatches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of A B B A; 0 to leave them out")
    parser.add_argument("--steps", type=int, help="of one window; by default 8000, or 1000 where a model runs")
    parser.add_argument(
        "--large-rounds", type=int, default=3, help="of A B B A, as many steps each; 0 to leave them out"
    )
    parser.add_argument("--budget-ms", type=float, default=2.0)
    parser.add_argument("--time-share", type=float, default=MAX_TIME_SHARE, help="of the engine's time, for all runs")
    parser.add_argument("--geometry", default="stories15M")
    parser.add_argument(
        "--content",
        choices=("pattern", "model"),
        default="pattern",
        help="model: a decoder runs, so a step takes longer",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    budget = options.budget_ms / 1000
    # What runs may take is a share of a window's seconds, and they begin with nothing owed: a short one overstates it.
    steps = {"pattern": options.steps or 8000, "model": options.steps or 1000}
    share = options.time_share
    costs = []
    if options.rounds:
        content = options.content
        costs.append(
            served(options.geometry, options.rounds, steps[content], budget, content=content, time_share=share)
        )
    if options.large_rounds:
        large = {"blocks": LARGE_BLOCKS, "scale": LARGE_SCALE, "time_share": share}
        costs.append(served(LARGE_GEOMETRY, options.large_rounds, steps["pattern"], budget, **large))
    gain = gains(options.geometry)
    for cost in costs:
        show_cost(cost)
    show_gain(gain)
    if options.json:
        options.json.write_text(json.dumps({"costs": costs, "gain": gain}, indent=1) + "\n")


def show_cost(cost: dict[str, Any]) -> None:
    print(
        f"{cost['geometry']}, {cost['blocks']:,} blocks of {cost['block_bytes']:,} bytes, "
        f"{cost['live_blocks']:.0f} live: {cost['runs']} runs ({', '.join(cost['outcomes'])}) moved "
        f"{cost['moved_blocks']} blocks, {100 * cost['moved_share_per_window']:.0f} % of the live ones in each window; "
        f"F {cost['fragmentation_before']:.2f} -> {cost['fragmentation_after']:.2f}, "
        f"{cost['cached_lost']} prefixes lost, "
        + ("contents not compared" if cost["mismatches"] is None else f"{cost['mismatches']} blocks differ")
    )
    budget, pairs = f"bar {cost['budget_ms']:g} ms", cost["throughput_pairs"]
    steps = cost["steps_of_runs"]
    show(
        (f"step of a run over median of equal batch, p99 of {steps}", f"{cost['excess_p99_ms']:.2f} ms", budget),
        ("  p50", f"{cost['excess_p50_ms']:.2f} ms", ""),
        ("  steps outside runs, p99: the machine's noise", f"{cost['excess_p99_without_ms']:.2f} ms", ""),
        ("the same in CPU time, p99", f"{cost['excess_cpu_p99_ms']:.2f} ms", budget),
        ("  p50", f"{cost['excess_cpu_p50_ms']:.2f} ms", ""),
        ("  steps outside runs, p99", f"{cost['excess_cpu_p99_without_ms']:.2f} ms", ""),
        ("work of a run in one step, CPU time, p99", f"{cost['work_cpu_p99_ms']:.2f} ms", budget),
        ("  longest", f"{cost['work_cpu_max_ms']:.2f} ms", ""),
        ("longest boundary of a run, median over runs", f"{cost['boundary_p50_ms']:.2f} ms", ""),
        (
            f"throughput with over without, median of {pairs} pairs",
            f"{cost['throughput_ratio']:.3f}",
            f"bar {BAR_THROUGHPUT}",
        ),
        ("  in CPU time", f"{cost['throughput_cpu_ratio']:.3f}", f"bar {BAR_THROUGHPUT}"),
        (
            "share of the windows' CPU time that runs took",
            f"{cost['time_share_cpu']:.4f}",
            f"{cost['time_share_bound']}",
        ),
    )


def show_gain(gain: dict[str, Any]) -> None:
    before, after = gain["fragmentation_before"], gain["fragmentation_after"]
    show(
        ("elastic: predicted", f"{gain['predicted_bytes'] / 2**20:.1f} MiB", ""),
        ("elastic: given back by smaps", f"{gain['realised_share'] or 0:.3f}", f"bar {BAR_ELASTIC}"),
        ("runs a sequence, before", f"{gain['runs_per_sequence_before']:.1f}", ""),
        ("runs a sequence, after", f"{gain['runs_per_sequence_after']:.1f}", ""),
        ("descriptors, before", f"{gain['descriptors_before']}", ""),
        ("descriptors, after", f"{gain['descriptors_after']}", ""),
        ("F of that engine in one whole run", f"{before:.2f} -> {after:.2f}", f"{gain['moved_blocks']} moved"),
    )


def show(*rows: tuple[str, str, str]) -> None:
    for what, value, bar in rows:
        print(f"{what:56} {value:>12}  {bar}")


if __name__ == "__main__":
    main()
