"""`kvatlas simulate`: a trace, or a recording, under allocation policies and in pools of several sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_shim.errors import SettingsError
from engine_shim.pool.policies import POLICIES
from engine_shim.simulator import DEFAULT_BLOCKS, SimulationReport
from engine_shim.simulator import simulate as run_trace
from engine_shim.workload import BUNDLED_TRACES, first_requests, load_workload

_BLOCK_SIZE, _HEADROOM, _MAX_SEQS = 16, 0.10, 256


def simulate(
    trace: Annotated[str, typer.Argument(help="A bundled trace by name, a trace file, or a recording.")],
    policy: Annotated[
        list[str] | None, typer.Option(envvar="KVATLAS_POLICY", help="Repeatable; all by default.")
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(envvar="KVATLAS_BLOCKS", help="Blocks of the pool; 60000, or the trace's or recording's own."),
    ] = None,
    block_size: Annotated[int, typer.Option(envvar="KVATLAS_BLOCK_SIZE", help="Tokens in a block.")] = _BLOCK_SIZE,
    headroom: Annotated[
        float, typer.Option(envvar="KVATLAS_HEADROOM", help="Share that new sequences leave.")
    ] = _HEADROOM,
    max_seqs: Annotated[int, typer.Option(envvar="KVATLAS_MAX_SEQS", help="Sequences that run at once.")] = _MAX_SEQS,
    prefix_cache: Annotated[bool, typer.Option(envvar="KVATLAS_PREFIX_CACHE", help="Keep freed prefixes.")] = True,
    requests: Annotated[
        int | None, typer.Option(envvar="KVATLAS_SIMULATE_REQUESTS", help="Only so many, the first; all by default.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", envvar="KVATLAS_SIMULATE_COMPARE", help="Table of policies at several pool sizes."),
    ] = False,
    sizes: Annotated[
        str | None,
        typer.Option(envvar="KVATLAS_SIMULATE_SIZES", help="Prefix hits against pool size: block counts, or auto."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(envvar="KVATLAS_SIMULATE_PLOT", help="With --compare or --sizes: write a plot to this HTML file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace, or what was recorded, against allocation policies and compare them."""
    from agent.commands.compare import COMPARED_POLICIES, comparison_json, render_comparison, require_plotting
    from agent.commands.compare import write_plot as write_comparison
    from agent.commands.sizes import (
        SIZED_POLICIES,
        parse_sizes,
        render_sizes,
        simulate_sizes,
        sizes_json,
        write_sizes_plot,
    )

    if compare and sizes is not None:
        raise SettingsError("give one of --compare and --sizes")
    if plot is not None and not compare and sizes is None:
        raise SettingsError("--plot draws a comparison, or hits against sizes; add --compare or --sizes")
    if plot is not None:
        require_plotting()
    chosen = parse_sizes(sizes) if sizes is not None else None
    default = SIZED_POLICIES if sizes is not None else COMPARED_POLICIES if compare else tuple(POLICIES)
    policies = tuple(policy or default)
    source = _source(trace, policies, block_size, headroom, max_seqs, prefix_cache, requests)
    more = source.more()
    if sizes is not None:
        reports = simulate_sizes(source.run, source.auto_sizes() if chosen is None else chosen)
        if plot is not None:
            write_sizes_plot(reports, plot)
        if as_json:
            _print(sizes_json(reports, source.exact_up_to) | more)
        else:
            print(render_sizes(reports, source.exact_up_to))
        return
    reports = [source.run(size) for size in source.pool_sizes(blocks, compare)]
    if plot is not None:
        write_comparison(reports, plot)
    if as_json:
        _print((comparison_json(reports) if compare else reports[0].to_json()) | more)
    else:
        print(render_comparison(reports) if compare else render_simulation(reports[0]))


@dataclass(frozen=True, slots=True)
class _Source:
    """What is simulated. `run` may be sent to another process."""

    run: Callable[[int], SimulationReport]
    pool_sizes: Callable[[int | None, bool], Sequence[int]]
    auto_sizes: Callable[[], Sequence[int]]
    more: Callable[[], dict[str, Any]]  # of the report, beside what every simulation tells
    exact_up_to: int | None = None  # blocks; above that the hits are a lower bound


def _source(
    trace: str,
    policies: Sequence[str],
    block_size: int,
    headroom: float,
    max_seqs: int,
    prefix_cache: bool,
    requests: int | None,
) -> _Source:
    from agent.recording.chunks import is_recording

    if trace not in BUNDLED_TRACES and is_recording(Path(trace)):
        if (block_size, headroom, max_seqs, requests) != (_BLOCK_SIZE, _HEADROOM, _MAX_SEQS, None):
            raise SettingsError("--block-size, --headroom, --max-seqs and --requests are of traces; leave them out")
        return _recorded(Path(trace), policies, prefix_cache)
    from agent.commands.compare import pool_sizes
    from agent.commands.sizes import auto_sizes, range_of_trace

    workload = first_requests(load_workload(trace), requests)

    def chosen(blocks: int | None, compare: bool) -> Sequence[int]:
        return pool_sizes(trace, blocks) if compare else (DEFAULT_BLOCKS if blocks is None else blocks,)

    run = partial(
        _simulate_trace,
        workload,
        policies=tuple(policies),
        block_tokens=block_size,
        headroom=headroom,
        max_sequences=max_seqs,
        prefix_cache=prefix_cache,
    )
    return _Source(run, chosen, lambda: auto_sizes(*range_of_trace(workload, block_size, headroom)), dict)


def _recorded(path: Path, policies: Sequence[str], prefix_cache: bool) -> _Source:
    from agent.commands.sizes import auto_sizes
    from agent.recording.reading import Recording
    from agent.recording.rerun import most_used_blocks, recorded_figures

    recording = Recording(path)
    try:
        total = recording.header.identity.total_blocks
        least = most_used_blocks(recording)
        facts = {
            "recording": {
                **asdict(recorded_figures(recording)),
                "engine": recording.header.id,
                "blocks": total,
                "events": recording.events,
                "lost_events": recording.lost_events,
                "dropped": recording.torn,
            }
        }
    finally:
        recording.close()
    return _Source(
        partial(_simulate_recording, path, policies=tuple(policies), prefix_cache=prefix_cache),
        lambda blocks, compare: (total if blocks is None else blocks,),
        lambda: auto_sizes(least, total),
        lambda: facts,
        exact_up_to=total,
    )


def _simulate_trace(workload: Any, size: int, **settings: Any) -> SimulationReport:
    return run_trace(workload, blocks=size, **settings)


def _simulate_recording(path: Path, size: int, **settings: Any) -> SimulationReport:
    from agent.recording.reading import Recording
    from agent.recording.rerun import rerun

    recording = Recording(path)
    try:
        return rerun(recording, blocks=size, **settings)
    finally:
        recording.close()


def render_simulation(report: SimulationReport) -> str:
    """A table of the policies of one simulation; a dash stands for what is undefined.

    F settled leaves out the pool's first filling and its last draining, as docs/policies.md does.
    """
    head = f"{report.trace}: {report.requests:,} requests, {report.rejected_requests:,} rejected"
    pool = f"{report.blocks:,} blocks of {report.block_tokens} tokens"
    lines = [
        f"{head}; {pool}",
        f"{'':<14}{'F settled':>24}{'F of all':>16}",
        f"{'policy':<14}{'p10':>8}{'p50':>8}{'p90':>8}{'p50':>8}{'p95':>8}{'live':>8}{'hits':>8}{'preempted':>11}{'copies':>8}",
    ]
    for name, result in report.policies.items():
        hits = result.prefix_hit_tokens / result.prefix_query_tokens if result.prefix_query_tokens else None
        settled, whole = result.settled_fragmentation_rate, result.fragmentation_rate
        lines.append(
            f"{name:<14}{_share(settled.p10)}{_share(settled.p50)}{_share(settled.p90)}"
            f"{_share(whole.p50)}{_share(whole.p95)}{_share(result.live_share_mean)}{_share(hits)}"
            f"{result.preemptions:>11,}{_share(result.copies_per_allocated_block)}"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:>8.3f}"


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))
