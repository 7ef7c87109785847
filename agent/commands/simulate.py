"""`kvatlas simulate` for people: one line a policy."""

from __future__ import annotations

from engine_shim.simulator import SimulationReport


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
