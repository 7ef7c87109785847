"""From a view to readings: the named numbers of each pool, or why they are not known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from agent.alerting.numbers import POOL_LABELS
from agent.alerting.windows import BestLately, Gain, Window, median_bound
from agent.compaction.model import Decision
from agent.compaction.record import PoolStanding
from agent.engine_metrics.model import EngineMetricsView
from agent.forecast import HORIZON_SECONDS
from agent.sampling.model import AgentView, PoolSample
from alerts.readings import Reading
from engine_shim.layout import HISTOGRAM_BOUNDS_SECONDS

RATE_SECONDS = 60.0
PREFIX_SECONDS = 120.0
TORN_SECONDS = 30.0
LEAST_QUERY_TOKENS = 1024  # in a window, below which a hit ratio says nothing
LEAST_EVICTIONS = 32  # likewise for how long evicted blocks had been idle
# What the policy decides when it has acted, or may not: F that stays up now stays up.
_LEFT_ALONE = frozenset(
    {
        Decision.HOLD_OFF,
        Decision.HOLD_NO_CONSUMER,
        Decision.HOLD_REFUSED,
        Decision.HOLD_COOLDOWN,
        Decision.HOLD_BACKOFF,
        Decision.HOLD_NO_GAIN,
        Decision.HOLD_BUDGET,
    }
)
_OF_SOURCE = ("engine_gone", "engine_stalled", "map_stale", "map_torn_ratio", "map_degraded")
_COUNTED = (
    "preemptions",
    "allocation_failures",
    "blocks_allocated",
    "blocks_evicted",
    "prefix_query_tokens",
    "prefix_hit_tokens",
)
NO_SAMPLE = "the agent takes no samples"


@dataclass(slots=True)
class _Memory:
    """What is kept of one pool between views."""

    rates: Window = field(default_factory=lambda: Window(RATE_SECONDS))
    prefixes: Window = field(default_factory=lambda: Window(PREFIX_SECONDS))
    best_hit: BestLately = field(default_factory=BestLately)
    incarnation: int | None = None
    torn_reads: int = 0
    reads: deque[tuple[float, bool]] = field(default_factory=deque)  # time, and whether it was torn

    def torn(self, sample: PoolSample, now: float) -> bool:
        """Whether the read of this sample gave no whole snapshot."""
        incarnation = sample.identity.incarnation
        torn = sample.torn_reads > self.torn_reads and incarnation == self.incarnation
        if incarnation != self.incarnation:
            self.reads.clear()
        self.incarnation, self.torn_reads = incarnation, sample.torn_reads
        self.reads.append((now, torn))
        while self.reads[0][0] < now - TORN_SECONDS:
            self.reads.popleft()
        return torn

    @property
    def torn_ratio(self) -> float:
        return sum(torn for _, torn in self.reads) / len(self.reads)


class PoolFeed:
    """Readings of every pool. One thread's: it remembers counters from one view to the next."""

    def __init__(
        self,
        standing: Callable[[PoolSample], PoolStanding | None],
        *,
        consumers: tuple[str, ...] = (),
        metrics: Callable[[], EngineMetricsView] = EngineMetricsView,
        link: str = "",
    ) -> None:
        """`standing` is how the compaction policy stands to a pool, where it knows it; `consumers` are those that the
        operator declares; `metrics` is what the engines say of themselves; `link` is the address of the page that shows
        a pool, but for its id at the end."""
        self._standing, self._declared, self._metrics, self._link = standing, consumers, metrics, link
        self._memory: dict[str, _Memory] = {}

    def readings(self, view: AgentView, now: float, *, fresh: bool = True) -> Iterator[Reading]:
        """One of each pool of a view, at a monotonic time; not `fresh` says that the view is an old one."""
        for id in [id for id in self._memory if id not in view.samples]:
            del self._memory[id]
        told: set[tuple[str, ...]] = set()
        # A copy of a map, whose writer is nowhere, must not speak for the engine that is there.
        for id, sample in sorted(view.samples.items(), key=lambda item: item[1].state == "gone"):
            identity = sample.identity
            values = (identity.engine_id, identity.model, identity.pool, sample.rank)
            if values in told:
                continue  # of two that call themselves the same, the first, as in the metrics
            told.add(values)
            yield self._reading(id, sample, dict(zip(POOL_LABELS, values, strict=True)), now, fresh)

    def _reading(self, id: str, sample: PoolSample, labels: dict[str, str], now: float, fresh: bool) -> Reading:
        numbers: dict[str, float | None] = dict.fromkeys(_OF_SOURCE)
        texts = {
            "reason": sample.reason or sample.state,
            "disagreement": self._disagreement(id),
            "decision": "nothing was decided yet",
            "consumers": ", ".join(self._declared) or "none",
        }
        why, void = NO_SAMPLE, ""
        if fresh:
            memory = self._memory.setdefault(id, _Memory())
            torn = memory.torn(sample, now)
            numbers |= _of_source(sample, memory)
            why, void = _why_unknown(sample, torn), _why_void(sample)
            if not why and not void:
                numbers |= _of_contents(sample)
                numbers |= _of_counters(sample, memory, now)
                numbers["engine_metrics_disagreement"] = self._metrics().disagreement_ratio(id)
            if not void and (standing := self._standing(sample)) is not None:
                consumers = self._consumers(standing)
                numbers |= _of_compaction(standing, known=not why) | {"pool_consumers": float(len(consumers))}
                texts |= {"decision": _last_decision(standing), "consumers": ", ".join(consumers) or "none"}
        return Reading(
            source=id,
            labels=labels,
            numbers=numbers,
            texts=texts,
            incarnation=f"{sample.identity.incarnation:016x}",
            unknown=why,
            void=void,
            link=self._link + quote(id, safe="") if self._link else None,
        )

    def _disagreement(self, id: str) -> str:
        joined = self._metrics().by_pool.get(id)
        return (joined.comparison.reason if joined is not None else "") or "none"

    def _consumers(self, standing: PoolStanding) -> tuple[str, ...]:
        status = standing.answer.status
        found = str(status.details.get("consumer") or "") if status is not None else ""
        return (*self._declared, found) if found else self._declared


def _why_unknown(sample: PoolSample, torn: bool) -> str:
    """Why nothing is known of what is in the pool now; "" where it is."""
    if sample.snapshot.flags.degraded:
        return "the shim has stopped following the pool"
    if sample.state not in ("live", "sleeping"):
        return sample.reason or f"the engine is {sample.state}"
    return "no whole snapshot could be had" if torn else ""


def _why_void(sample: PoolSample) -> str:
    """Why what was in the pool is nobody's concern any more."""
    if sample.state == "gone" and sample.snapshot.flags.closing:
        return "the engine ended in good order"
    return "the engine sleeps: it has given its KV memory back" if sample.state == "sleeping" else ""


def _of_source(sample: PoolSample, memory: _Memory) -> dict[str, float | None]:
    state, flags = sample.state, sample.snapshot.flags
    ended = state == "gone" and flags.closing
    steps = state in ("live", "sleeping", "stalled") or ended
    return {
        "engine_gone": float(state == "gone" and not flags.closing),
        "engine_stalled": float(state == "stalled") if steps else None,
        "map_stale": float(state in ("stale", "unreadable")) if state != "gone" or ended else None,
        # A map that is torn for good is stale, which says it all.
        "map_torn_ratio": 0.0 if state == "gone" else memory.torn_ratio if state in ("live", "sleeping") else None,
        "map_degraded": float(flags.degraded and not ended),
    }


def _of_contents(sample: PoolSample) -> dict[str, float | None]:
    report, snapshot, headroom = sample.report, sample.snapshot, sample.identity.headroom_blocks
    idle = snapshot.running_requests == 0 and snapshot.waiting_requests == 0
    held = report.used_blocks + report.pinned_blocks
    waste, forecast = sample.waste, sample.forecast
    exhaustion = forecast.seconds
    if exhaustion is None and forecast.known:
        exhaustion = HORIZON_SECONDS
    pinned = sample.oldest_pinned_seconds
    if pinned is None and snapshot.touched_ms is not None:
        pinned = 0.0
    missing = max(0, headroom - report.allocatable_blocks)
    return {
        "pool_fragmentation_ratio": report.fragmentation_rate,
        "pool_used_ratio": held / report.usable_blocks if report.usable_blocks else None,
        "pool_exhaustion_seconds": exhaustion,
        "pool_headroom_missing_ratio": missing / headroom if headroom > 0 else 0.0,
        "pool_admission_blocked": float(sample.admission.blocked),
        "pool_leaked_blocks": float(report.used_blocks if idle else 0),
        "pool_oldest_pinned_seconds": pinned,
        "pool_tail_waste_ratio": (waste.tokens / waste.slots if waste.slots else 0.0) if waste is not None else None,
        "pool_tail_waste_bytes": float(waste.bytes) if waste is not None else None,
        "pool_accounting_residual_blocks": float(sample.residual_blocks),
        "engine_running_requests": float(snapshot.running_requests),
        "engine_waiting_requests": float(snapshot.waiting_requests),
    }


def _of_counters(sample: PoolSample, memory: _Memory, now: float) -> dict[str, float | None]:
    incarnation, snapshot = sample.identity.incarnation, sample.snapshot
    counters = {name: snapshot.counters.get(name, 0) for name in _COUNTED}
    idle = snapshot.histograms.get("idle_before_evict")
    rates = memory.rates.take(now, incarnation, counters, None)
    prefixes = memory.prefixes.take(now, incarnation, counters, idle)
    numbers: dict[str, float | None] = {}
    if rates is not None:
        numbers["preemptions_per_minute"] = rates.per_minute("preemptions")
        numbers["allocation_failures_per_minute"] = rates.per_minute("allocation_failures")
    if prefixes is not None:
        numbers |= _of_prefixes(prefixes, memory, now)
    return numbers


def _of_prefixes(gain: Gain, memory: _Memory, now: float) -> dict[str, float | None]:
    hit, lost = None, None
    queries = gain.counters["prefix_query_tokens"]
    if queries >= LEAST_QUERY_TOKENS:
        hit = gain.counters["prefix_hit_tokens"] / queries
        best = memory.best_hit.take(now, hit)
        lost = 1.0 - hit / best if best > 0 else 0.0
    elif queries == 0:
        lost = 0.0  # nobody asks, so nobody misses anything
    enough = sum(gain.evicted_idle) >= LEAST_EVICTIONS
    return {
        "prefix_evictions_per_allocation": gain.ratio("blocks_evicted", "blocks_allocated") or 0.0,
        "prefix_evicted_idle_seconds": (
            median_bound(gain.evicted_idle, HISTOGRAM_BOUNDS_SECONDS) if enough else HORIZON_SECONDS
        ),
        "prefix_hit_ratio": hit,
        "prefix_hit_lost_ratio": lost,
    }


def _of_compaction(standing: PoolStanding, *, known: bool) -> dict[str, float | None]:
    """`known`: whether F is. What came of runs matters as long as it is up."""
    status = standing.answer.status
    numbers: dict[str, float | None] = {
        "compaction_verify_failed": None if status is None else float(bool(status.details.get("moving_failed")))
    }
    if known and standing.verdicts:
        state = standing.state
        undone = state.undone if state.episode_since is not None else 0
        checked = not numbers["compaction_verify_failed"]  # a check that failed is told as such
        numbers["compaction_run_failed"] = float(undone > 0 and state.undone_failed and checked)
        numbers["compaction_undone_runs"] = float(undone)
        numbers["compaction_left_alone"] = float(standing.verdicts[-1].decision in _LEFT_ALONE)
    return numbers


def _last_decision(standing: PoolStanding) -> str:
    """Why the agent does about this pool what it does."""
    status, verdicts = standing.answer.status, standing.verdicts
    if status is not None and status.details.get("moving_failed"):
        return status.reason
    if standing.state.undone:
        return standing.state.undone_reason
    return (verdicts[-1].reason or verdicts[-1].decision.value) if verdicts else "nothing was decided yet"
