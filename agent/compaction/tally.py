"""Counts what was decided and done about each pool, and renders that as metrics with closed sets of labels."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from agent.compaction.model import Decision
from engine_shim.compaction.report import Outcome
from engine_shim.errors import ControlMalformed, ControlRefused, ControlTimeout, ControlUnavailable

SECONDS_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# How a run may end: as its report says, or why there is no report.
OUTCOMES = (*(one.value for one in Outcome), "busy", "unavailable", "timeout", "rejected", "other")


def outcome_of(error: Exception) -> str:
    """The word for a request that got no report."""
    if isinstance(error, ControlTimeout):
        return "timeout"
    if isinstance(error, ControlUnavailable):
        return "unavailable"
    if isinstance(error, ControlRefused):
        return error.error if error.error in ("busy", "refused") else "rejected"
    return "rejected" if isinstance(error, ControlMalformed) else "failed"


@dataclass(slots=True)
class Tally:
    """One pool, since the agent first saw it. Not for several threads."""

    decisions: Counter[Decision] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    moved_blocks: int = 0
    seconds_counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    seconds_sum: float = 0.0

    def run_ended(self, outcome: str, moved_blocks: int, seconds: float) -> None:
        self.outcomes[outcome if outcome in OUTCOMES else "other"] += 1
        self.moved_blocks += moved_blocks
        self.seconds_counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.seconds_sum += seconds

    def copy(self) -> Tally:
        return Tally(
            Counter(self.decisions),
            Counter(self.outcomes),
            self.moved_blocks,
            list(self.seconds_counts),
            self.seconds_sum,
        )


def tally_families(
    pools: Sequence[tuple[tuple[str, ...], str]], tallies: Mapping[str, Tally], prefix: str, labels: Sequence[str]
) -> list[Metric]:
    """Families for `pools`, pairs of label values and id; what has not happened yet is 0."""
    runs = CounterMetricFamily(
        f"{prefix}compactions",
        "Compaction runs that this agent asked for, by how they ended.",
        labels=[*labels, "outcome"],
    )
    moved = CounterMetricFamily(
        f"{prefix}compaction_moved_blocks", "Live blocks moved by runs that this agent asked for.", labels=labels
    )
    seconds = HistogramMetricFamily(f"{prefix}compaction_seconds", "Time that those runs took.", labels=labels)
    decisions = CounterMetricFamily(
        f"{prefix}compaction_decisions",
        "Decisions of the compaction policy, one a sample.",
        labels=[*labels, "decision"],
    )
    for values, id in pools:
        tally = tallies.get(id) or Tally()
        for outcome in OUTCOMES:
            runs.add_metric([*values, outcome], tally.outcomes[outcome])
        for decision in Decision:
            decisions.add_metric([*values, decision.name.lower()], tally.decisions[decision])
        moved.add_metric(values, tally.moved_blocks)
        seconds.add_metric(values, _cumulative(tally), tally.seconds_sum)
    return [runs, moved, seconds, decisions]


def _cumulative(tally: Tally) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*map(repr, SECONDS_BOUNDS), "+Inf"), tally.seconds_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
