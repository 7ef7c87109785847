"""`kvatlas simulate --sizes`: the share of prompt tokens that the prefix cache finds, against the size of the pool."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agent.commands.compare import require_plotting
from engine_shim.errors import SettingsError
from engine_shim.pool.block_pool import MAX_POOL_BLOCKS, check_shape
from engine_shim.simulator import PolicyResult, SimulationReport
from engine_shim.workload import Workload, request_block_hashes

SCHEMA = "kvatlas.simulate-sizes/v1"
SIZED_POLICIES = ("vllm",)
AUTO = "auto"
AUTO_SIZES = 8
MAX_SIZES = 64
MAX_AUTO_BLOCKS = 1 << 20

Simulate = Callable[[int], SimulationReport]
"""One simulation of a pool of so many blocks; picklable, since it may run in another process."""


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """Block counts, rising, each once; None for `auto`. Raises SettingsError."""
    if text.strip() == AUTO:
        return None
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingsError(f"--sizes {text}: give block counts with commas between them, or {AUTO}") from None
    if not 1 <= sizes[0] <= sizes[-1] <= MAX_POOL_BLOCKS or len(sizes) > MAX_SIZES:
        raise SettingsError(f"--sizes {text}: give 1 to {MAX_SIZES} counts from 1 to {MAX_POOL_BLOCKS:,}")
    return tuple(sizes)


def auto_sizes(least: int, most: int, count: int = AUTO_SIZES) -> tuple[int, ...]:
    """Up to `count` sizes from `least` to `most`, each the same multiple of the one before."""
    least = max(1, min(least, MAX_POOL_BLOCKS))
    most = max(least, min(most, MAX_POOL_BLOCKS))
    return tuple(sorted({round(float(size)) for size in np.geomspace(least, most, count)}))


def range_of_trace(workload: Workload, block_tokens: int, headroom: float) -> tuple[int, int]:
    """From the least pool in which every request of a trace can run, to one that never has to evict anything.

    Raises SettingsError for what no pool could be.
    """
    check_shape(block_tokens, headroom)
    distinct: set[int] = set()
    tails = largest = 0
    for request in workload.requests:
        tokens = request.prompt_tokens + request.output_tokens
        largest = max(
            largest, -(-tokens // block_tokens), int(-(-request.prompt_tokens // block_tokens) / (1 - headroom))
        )
        distinct.update(request_block_hashes(request, block_tokens))
        tails += tokens % block_tokens != 0
        if len(distinct) > MAX_AUTO_BLOCKS:
            break
    return largest + 1, min(round((len(distinct) + tails) / (1 - headroom)), MAX_AUTO_BLOCKS)


def simulate_sizes(run: Simulate, sizes: Sequence[int]) -> list[SimulationReport]:
    """One report a size, in that order, on as many processes as there are CPUs for this one."""
    workers = min(len(os.sched_getaffinity(0)), len(sizes))
    if workers < 2:
        return [run(size) for size in sizes]
    # Spawned: a process that has threads must not be forked. The largest first, since it takes longest.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as crew:
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        found = dict(zip(order, crew.map(run, [sizes[index] for index in order]), strict=True))
    return [found[index] for index in range(len(sizes))]


def hit_share(result: PolicyResult) -> float | None:
    """Prompt tokens found of those looked up; None where none were."""
    return result.prefix_hit_tokens / result.prefix_query_tokens if result.prefix_query_tokens else None


def sizes_json(reports: Sequence[SimulationReport], exact_up_to: int | None) -> dict[str, Any]:
    """All sizes as one object. Above `exact_up_to` blocks hits are the least that there would be."""
    return {
        "schema": SCHEMA,
        "trace": reports[0].trace,
        "requests": reports[0].requests,
        "block_tokens": reports[0].block_tokens,
        "headroom": reports[0].headroom,
        "prefix_cache": reports[0].prefix_cache,
        "sizes": [
            {
                "blocks": report.blocks,
                "rejected_requests": report.rejected_requests,
                "lower_bound": exact_up_to is not None and report.blocks > exact_up_to,
                "policies": {
                    name: {"prefix_hit_share": hit_share(result), **asdict(result)}
                    for name, result in report.policies.items()
                },
            }
            for report in reports
        ],
    }


def render_sizes(reports: Sequence[SimulationReport], exact_up_to: int | None) -> str:
    """A table of sizes and policies."""
    lines = [
        f"{'blocks':>11}  {'policy':<13}{'hits':>8}{'missed':>8}{'evictions':>13}{'preempted':>11}{'rejected':>10}"
    ]
    for report in reports:
        least = exact_up_to is not None and report.blocks > exact_up_to
        for name, result in report.policies.items():
            hits = hit_share(result)
            told = (f"{'-':>8}{'-':>8}") if hits is None else f"{hits:>8.3f}{1 - hits:>8.3f}"
            lines.append(
                f"{report.blocks:>11,}  {name:<13}{told}{result.evictions:>13,}{result.preemptions:>11,}"
                f"{report.rejected_requests:>10,}{'  at least' if least else ''}"
            )
    return "\n".join(lines)


def write_sizes_plot(reports: Sequence[SimulationReport], path: Path) -> None:
    """One HTML file that needs nothing else: the share of hits over the pool's size, a line for each policy.

    SettingsError where plotly is missing or the file cannot be written.
    """
    require_plotting()
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in reports[0].policies:
        figure.add_trace(
            go.Scatter(
                x=[report.blocks for report in reports],
                y=[hit_share(report.policies[name]) for report in reports],
                mode="lines+markers",
                name=name,
            )
        )
    figure.update_xaxes(type="log", title_text="blocks of the pool")
    figure.update_yaxes(rangemode="tozero", title_text="prompt tokens found in the prefix cache")
    figure.update_layout(title=f"{reports[0].trace}: prefix hits against pool size", template="plotly_white")
    try:
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"the plot cannot be written to {path}: {error.strerror or error}") from error
