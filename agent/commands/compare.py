"""`kvatlas simulate --compare`: one trace under several policies at several pool sizes, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_shim.errors import SettingsError
from engine_shim.simulator import DEFAULT_BLOCKS, PolicyResult, SimulationReport

SCHEMA = "kvatlas.simulate-compare/v1"
COMPARED_POLICIES = ("vllm", "lowest-any", "relocating")
NAMED_POOLS: Mapping[str, tuple[int, ...]] = {
    "mooncake-conversation": (60_000, 120_000, 240_000),
    "azure-conv": (5_000, 8_000),
}
"""Blocks of 16 tokens: pools from crowded to roomy for a bundled trace."""


def pool_sizes(trace: str, blocks: int | None) -> tuple[int, ...]:
    """The sizes to compare at: what was asked for, else those named for the trace, else the simulator's default."""
    return (blocks,) if blocks is not None else NAMED_POOLS.get(trace, (DEFAULT_BLOCKS,))


def comparison_json(reports: Sequence[SimulationReport]) -> dict[str, Any]:
    """All reports of one trace, one a pool size, as one object."""
    return {"schema": SCHEMA, "trace": reports[0].trace, "pools": [report.to_json() for report in reports]}


def render_comparison(reports: Iterable[SimulationReport]) -> str:
    """A table of pool sizes and policies. F is settled: without the pool's first filling and last draining."""
    head = f"{'blocks':>9}{'live':>7}  {'policy':<13}{'F p10':>7}{'p50':>7}{'p90':>7}{'hits':>8}{'evictions':>12}"
    lines = [f"{head}{'copies/blk':>12}{'desc/blk':>10}"]
    for report in reports:
        for name, result in report.policies.items():
            rate = result.settled_fragmentation_rate
            lines.append(
                f"{report.blocks:>9,}{_cell(result.live_share_mean, 7, 2)}  {name:<13}{_cell(rate.p10, 7, 2)}"
                f"{_cell(rate.p50, 7, 2)}{_cell(rate.p90, 7, 2)}{_cell(_hits(result), 8, 3)}{result.evictions:>12,}"
                f"{_cell(result.copies_per_allocated_block, 12, 2)}{_cell(result.descriptors_per_block, 10, 3)}"
            )
    return "\n".join(lines)


def require_plotting() -> None:
    """SettingsError where plotly, which comes with the dashboard, is not installed: said before a long simulation."""
    if find_spec("plotly") is None:
        raise SettingsError("a plot needs plotly; pip install 'kvatlas[dashboard]', or leave --plot out")


def write_plot(reports: Sequence[SimulationReport], path: Path) -> None:
    """One HTML file that needs nothing else: four panels, pool sizes along each, one colour a policy.

    SettingsError where plotly is missing or the file cannot be written.
    """
    require_plotting()
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("F, settled: p50, p10 to p90", "Prefix hits of tokens asked for", "Copies per allocated block",
              "Descriptors per prompt block")  # fmt: skip
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles)
    sizes = [f"{report.blocks:,}" for report in reports]
    colors = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Tol's bright scheme
    for name, color in zip(reports[0].policies, colors, strict=False):
        results = [report.policies[name] for report in reports]
        rates = [result.settled_fragmentation_rate for result in results]
        spread = {
            "type": "data",
            "array": [_difference(rate.p90, rate.p50) for rate in rates],
            "arrayminus": [_difference(rate.p50, rate.p10) for rate in rates],
        }
        panels: list[tuple[list[float | None], dict[str, Any]]] = [
            ([rate.p50 for rate in rates], {"error_y": spread}),
            ([_hits(result) for result in results], {}),
            ([result.copies_per_allocated_block for result in results], {}),
            ([result.descriptors_per_block for result in results], {}),
        ]
        for index, (values, extra) in enumerate(panels):
            bar = go.Bar(
                x=sizes, y=values, name=name, legendgroup=name, showlegend=index == 0, marker_color=color, **extra
            )
            figure.add_trace(bar, row=index // 2 + 1, col=index % 2 + 1)
    figure.update_xaxes(type="category", title_text="blocks")
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(title=f"{reports[0].trace}: allocation policies", barmode="group", template="plotly_white")
    try:
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"the plot cannot be written to {path}: {error.strerror or error}") from error


def _hits(result: PolicyResult) -> float | None:
    return result.prefix_hit_tokens / result.prefix_query_tokens if result.prefix_query_tokens else None


def _difference(high: float | None, low: float | None) -> float | None:
    return None if high is None or low is None else high - low


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
