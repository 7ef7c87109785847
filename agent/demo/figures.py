"""What the demo computes: how large its pools should be, and the figures of each engine over the run. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from agent.wire import EngineSummary
from engine_shim.errors import SettingsError
from engine_shim.workload import Workload

TOKENS_PER_SECOND = 30.0  # decoding of one sequence
LIVE_SHARE = 0.36  # decoding alone; prefill and transfers add about a tenth
BLOCK_TOKENS = 16
LEAST_BLOCKS, MOST_BLOCKS = 1024, 131_072


def suggest_blocks(workload: Workload) -> int:
    """Blocks of which decoding sequences hold LIVE_SHARE on average, to whole hundreds.

    Little's law: mean live tokens = sum over requests of (tokens held on average * seconds held) / trace seconds. No
    pool is smaller than two of the largest requests; traces without end in sight get the largest.
    """
    requests = workload.requests
    span = max(requests[-1].arrival_s - requests[0].arrival_s, 1.0)
    held = sum((r.prompt_tokens + r.output_tokens / 2) * r.output_tokens / TOKENS_PER_SECOND for r in requests)
    largest = max(r.prompt_tokens + r.output_tokens for r in requests)
    wanted = max(held / span / LIVE_SHARE, 2 * largest) / BLOCK_TOKENS
    return int(min(max(round(wanted, -2), LEAST_BLOCKS), MOST_BLOCKS))


def live_share(engine: EngineSummary) -> float | None:
    """Used and pinned blocks over usable ones; None for a pool without usable blocks."""
    if not engine.usable_blocks:
        return None
    return (engine.blocks.used + engine.blocks.pinned) / engine.usable_blocks


@dataclass(slots=True)
class EngineFigures:
    """One engine's samples, taken from the agent once a second."""

    engine_id: str
    policy: str = ""
    live_shares: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, engine: EngineSummary) -> None:
        """Take one sample."""
        self.policy = engine.policy
        if (share := live_share(engine)) is not None:
            self.live_shares.append(share)
        if (rate := engine.fragmentation.rate) is not None:
            self.rates.append(rate)

    def summary(self, report: dict[str, Any]) -> dict[str, Any]:
        """What is said at the end: the engine's own report, and fragmentation and live share as the agent saw them."""
        query = report["prefix_query_tokens"]
        return {
            "engine": self.engine_id,
            "policy": self.policy,
            "kv_bytes": report["kv_bytes"],
            "served_requests": report["served_requests"],
            "rejected_requests": report["rejected_requests"],
            "computed_tokens": report["computed_tokens"],
            "output_tokens": report["output_tokens"],
            "tokens_per_second": round(report["tokens_per_second"]),
            "preemptions": report["preemptions"],
            "prefix_hit_ratio": round(report["prefix_hit_tokens"] / query, 4) if query else None,
            "relocation_copies": report["relocation_copies"],
            "transferred_sequences": report["transfers"]["sequences"],
            "skipped_transfers": report["transfers"]["skipped"],
            "verified_tokens": report["verified_tokens"],
            "mismatched_blocks": report["mismatched_blocks"],
            **self.shares(),
        }

    def shares(self) -> dict[str, float | None]:
        """What the agent saw; None for what it never did."""
        return {
            "live_share_p50": _rounded(self.live_shares),
            "live_share_max": round(max(self.live_shares), 4) if self.live_shares else None,
            "fragmentation_rate_p50": _rounded(self.rates),
            "fragmentation_rate_last": round(self.rates[-1], 4) if self.rates else None,
        }


def require_positive(name: str, value: float | None) -> None:
    """SettingsError where a given number is not above 0, or is no number."""
    if value is not None and not 0 < value < math.inf:
        raise SettingsError(f"{name}={value} must be above 0, and finite")


def _rounded(values: list[float]) -> float | None:
    return round(median(values), 4) if values else None
