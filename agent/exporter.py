"""Prometheus metrics, rendered from the latest view: what is gone is absent, not zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.compaction.tally import Tally, tally_families
from agent.sampling.model import AgentView, Clock, PoolSample
from engine_shim.layout import COUNTERS, HISTOGRAMS
from engine_shim.snapshot import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "kvatlas_"
# `rank` keeps apart the pools of one engine's ranks, which share the other three.
LABELS = ("engine_id", "model", "pool", "rank")
ORDERS = (1, 2, 4, 6, 8, 10, 12)
# A text that is older is rendered anew: ages must grow also where the sampler hangs.
MAX_TEXT_AGE_SECONDS = 2.0
# While somebody scrapes, each sample is rendered as it is taken, so that a scrape need not wait for that.
SCRAPED_LATELY_SECONDS = 60.0

_COUNTER_HELP = {
    "tokens_written": "Tokens whose KV was written to the pool.",
    "blocks_allocated": "Blocks that went from free to used.",
    "blocks_freed": "Blocks whose last reference was given up, whether or not they stayed cached.",
    "blocks_evicted": "Cached blocks whose contents were given up.",
    "blocks_reused": "Cached blocks that a prefix hit took into use.",
    "copy_on_write": "Shared blocks that were copied before a write.",
    "allocation_failures": "Allocations refused for want of blocks.",
    "preemptions": "Running sequences that were preempted.",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "steps": "Engine steps.",
    "live_moves": "Referenced blocks moved by compaction.",
    "live_move_bytes": "Bytes of referenced blocks moved by compaction.",
    "relocation_copies": "Cached blocks copied by relocating allocation.",
    "relocation_bytes": "Bytes copied by relocating allocation.",
    "events_dropped": "Events that found no room in the map's ring.",
    "repairs": "Times that the shim rebuilt the map from the pool.",
}
_HISTOGRAMS = {
    "lifetime": ("block_lifetime_seconds", "Time from a block's allocation until it is free or cached."),
    "idle_before_evict": ("block_idle_before_evict_seconds", "Time a cached block lay idle before its eviction."),
    "reuse_gap": ("block_reuse_gap_seconds", "Time a cached block lay idle before a prefix hit took it into use."),
}
assert set(_HISTOGRAMS) == set(HISTOGRAMS)  # noqa: S101 - a fault of ours, at import


# Families of another part: from the labels and ids of the pools, and the time in Unix seconds.
MoreFamilies = Callable[[Sequence[tuple[tuple[str, ...], str]], float], Iterable[Metric]]


class Exporter:
    """The text of /metrics. Each one has a registry of its own, so that any number may live in one process."""

    def __init__(
        self,
        view: Callable[[], AgentView],
        *,
        clock: Clock,
        tallies: Callable[[], Mapping[str, Tally]] = dict,
        more: Sequence[MoreFamilies] = (),
    ) -> None:
        """`tallies` are of compaction, by pool id; `more` is of parts that have metrics of their own."""
        self._clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(PoolCollector(view, clock, tallies, more))
        self._text: tuple[float, bytes] = (-math.inf, b"")  # when it was rendered; swapped as one
        self._asked = -math.inf

    def render(self) -> bytes:
        """Text format 0.0.4, at most MAX_TEXT_AGE_SECONDS old."""
        now = self._asked = self._clock.monotonic()
        rendered, text = self._text
        return text if now - rendered <= MAX_TEXT_AGE_SECONDS else self._render(now)

    def refresh(self) -> None:
        """There is a new view: render it, if anybody asked lately. From any thread."""
        now = self._clock.monotonic()
        if now - self._asked <= SCRAPED_LATELY_SECONDS:
            self._render(now)

    def _render(self, now: float) -> bytes:
        text = render_text(self.registry.collect())
        self._text = (now, text)
        return text


def render_text(metrics: Iterable[Metric]) -> bytes:
    """Text format 0.0.4, as prometheus_client's generate_latest gives it for labels and values without timestamps,
    in a sixth of its time: with 32 engines that is 10 ms instead of 60."""
    lines: list[str] = []
    escaped = _Escaped()
    for metric in metrics:
        name = metric.name + "_total" if metric.type == "counter" else metric.name
        text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n")
        for sample in metric.samples:
            labels = ",".join([f'{key}="{escaped[value]}"' for key, value in sample.labels.items()])
            head = f"{sample.name}{{{labels}}}" if labels else sample.name
            lines.append(f"{head} {float(sample.value)!r}\n")
    return "".join(lines).encode(errors="backslashreplace")


class _Escaped(dict[str, str]):
    """Label values as the format wants them; few values stand in thousands of lines."""

    def __missing__(self, value: str) -> str:
        self[value] = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        return self[value]


class PoolCollector(Collector):
    """Every family from one view; families that have no sample are left out."""

    def __init__(
        self,
        view: Callable[[], AgentView],
        clock: Clock,
        tallies: Callable[[], Mapping[str, Tally]],
        more: Sequence[MoreFamilies],
    ) -> None:
        self._view = view
        self._clock = clock
        self._tallies = tallies
        self._more = more

    def describe(self) -> Iterable[Metric]:
        return []  # else register() would already collect

    def collect(self) -> Iterator[Metric]:
        view, now = self._view(), self._clock.wall()
        pools = _present(view)
        by_id = [(labels, sample.id) for labels, sample in pools]
        compaction = tally_families(by_id, self._tallies(), PREFIX, LABELS)
        known = pool_families(pools, now)
        others = (family for families in self._more for family in families(by_id, now))
        for family in (*known, *compaction, *others):
            if family.samples:
                yield family
        taken = view.taken_monotonic
        yield from sample_families(view.sample_seconds, None if taken is None else self._clock.monotonic() - taken)


Labelled = Sequence[tuple[tuple[str, ...], PoolSample]]


def pool_families(pools: Labelled, now: float) -> list[Metric]:
    """Families of engines and their pools, at `now` in Unix seconds; those of which nothing is known have no sample."""
    return [*_engine_families(pools, now), *_pool_families(pools, now), *_counter_families(pools)]


def sample_families(sample_seconds: float, age_seconds: float | None) -> list[Metric]:
    """Of the sampler itself; `age_seconds` is None before its first sample."""
    took = GaugeMetricFamily(PREFIX + "sample_seconds", "Time that the last sample of all pools took.", sample_seconds)
    if age_seconds is None:
        return [took]
    # Of now, when it is asked for: all else stands still where the sampler hangs.
    age = "Time since the last sample of all pools began."
    return [took, GaugeMetricFamily(PREFIX + "sample_age_seconds", age, max(0.0, age_seconds))]


def _present(view: AgentView) -> list[tuple[tuple[str, ...], PoolSample]]:
    """Pools whose engine is not gone, with their labels; of two that call themselves the same, the first."""
    pools: dict[tuple[str, ...], PoolSample] = {}
    for sample in view.samples.values():
        if sample.state != "gone":
            identity = sample.identity
            pools.setdefault((identity.engine_id, identity.model, identity.pool, sample.rank), sample)
    return list(pools.items())


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels))


def _engine_families(pools: Labelled, now: float) -> list[Metric]:
    up = _gauge("engine_up", "1 while the engine's map can be read and its heartbeat is fresh.")
    stalled = _gauge("engine_stalled", "1 while requests run and no step ends.")
    heartbeat = _gauge("engine_heartbeat_age_seconds", "Time since the engine process last gave a sign of life.")
    age = _gauge("snapshot_age_seconds", "Time since the last instant that the numbers of this pool describe.")
    running = _gauge("engine_running_requests", "Requests that the engine runs.")
    waiting = _gauge("engine_waiting_requests", "Requests that wait in the engine.")
    sleeping = _gauge("engine_sleeping", "1 while the engine has given its KV memory back.")
    degraded = _gauge("engine_degraded", "1 once the shim has stopped following the pool.")
    info = _gauge("engine_info", "What runs; always 1.", "kind", "version", "policy", "medium", "dtype")
    torn = CounterMetricFamily(PREFIX + "snapshots_torn", "Reads that gave no whole snapshot.", labels=LABELS)
    for labels, sample in pools:
        snapshot, identity = sample.snapshot, sample.identity
        up.add_metric(labels, sample.state in ("live", "sleeping", "stalled"))
        stalled.add_metric(labels, sample.state == "stalled")
        heartbeat.add_metric(labels, sample.heartbeat_age_seconds(now))
        age.add_metric(labels, sample.snapshot_age_seconds(now))
        running.add_metric(labels, snapshot.running_requests)
        waiting.add_metric(labels, snapshot.waiting_requests)
        sleeping.add_metric(labels, snapshot.flags.sleeping)
        degraded.add_metric(labels, snapshot.flags.degraded)
        facts = (identity.kind, identity.version, identity.policy, identity.medium, identity.dtype)
        info.add_metric((*labels, *facts), 1)
        torn.add_metric(labels, sample.torn_reads)
    return [up, stalled, heartbeat, age, running, waiting, sleeping, degraded, info, torn]


def _pool_families(pools: Labelled, now: float) -> list[Metric]:
    """Numbers that belong to a snapshot; a sleeping engine and an unreadable map have none."""
    blocks = _gauge("pool_blocks", "Blocks by state; they sum to the size of the pool.", "state")
    used = _gauge("pool_used_ratio", "Used and pinned blocks of those that can be given to requests.")
    block_bytes = _gauge("pool_block_bytes", "Bytes of one block over all layers of this rank.")
    ratio = _gauge("pool_fragmentation_ratio", "1 - largest run / total, over free and cached or free blocks.", "set")
    largest = _gauge("pool_largest_run_blocks", "Blocks in the longest run of consecutive ids.", "set")
    runs = _gauge("pool_runs", "Runs of consecutive ids.", "set")
    unusable = _gauge("pool_unusable_ratio", "Share of allocatable blocks in runs shorter than 2**order.", "order")
    waste = _gauge("pool_tail_waste_bytes", "Bytes of empty token slots in used blocks.")
    headroom = _gauge("pool_headroom_blocks", "Allocatable blocks that new sequences may not take.")
    exhaustion = _gauge("pool_exhaustion_seconds", "Time until no block is allocatable at the present trend.")
    blocked = _gauge("pool_admission_blocked", "1 while requests wait and too few blocks are left for a new sequence.")
    residual = _gauge("pool_accounting_residual_blocks", "Blocks by which the engine's counts and states differ.")
    pinned = _gauge("pool_oldest_pinned_seconds", "Time since the longest pinned block was touched.")
    for labels, sample in pools:
        if sample.state == "unreadable" or not sample.fragmentation_known:
            continue
        report, identity = sample.report, sample.identity
        counts = (
            ("free", report.free_blocks),
            ("cached", report.cached_blocks),
            ("used", report.used_blocks),
            ("pinned", report.pinned_blocks),
            ("reserved", report.reserved_blocks),
            ("unknown", report.unknown_blocks),
        )
        for state, count in counts:
            blocks.add_metric((*labels, state), count)
        if report.usable_blocks:
            used.add_metric(labels, (report.used_blocks + report.pinned_blocks) / report.usable_blocks)
        block_bytes.add_metric(labels, identity.block_bytes)
        headroom.add_metric(labels, identity.headroom_blocks)
        residual.add_metric(labels, sample.residual_blocks)
        sets = (
            ("allocatable", report.fragmentation_rate, report.largest_allocatable_run, report.allocatable_runs),
            ("free", report.strict_fragmentation_rate, report.largest_free_run, report.free_runs),
        )
        for name, rate, longest, number in sets:
            if rate is not None:
                ratio.add_metric((*labels, name), rate)
            largest.add_metric((*labels, name), longest)
            runs.add_metric((*labels, name), number)
        for order in ORDERS:
            share = report.unusable_ratio(order)
            if share is not None:
                unusable.add_metric((*labels, str(order)), share)
        if sample.waste is not None:
            waste.add_metric(labels, sample.waste.bytes)
        if sample.forecast.seconds is not None:
            exhaustion.add_metric(labels, sample.forecast.seconds)
        blocked.add_metric(labels, sample.admission.blocked)
        if sample.oldest_pinned_seconds is not None:
            pinned.add_metric(labels, sample.oldest_pinned_seconds)
    sizes = [blocks, used, block_bytes, ratio, largest, runs, unusable, waste]
    return [*sizes, headroom, exhaustion, blocked, residual, pinned]


def _counter_families(pools: Labelled) -> list[Metric]:
    """The map's own counters and histograms, which go on from where they are when a map cannot be read."""
    counters = {
        name: CounterMetricFamily(PREFIX + name, _COUNTER_HELP[name], labels=LABELS)
        for name in COUNTERS
        if name in _COUNTER_HELP
    }
    cpu = CounterMetricFamily(PREFIX + "shim_cpu_seconds", "CPU time that the shim took in the engine.", labels=LABELS)
    histograms = {
        name: HistogramMetricFamily(PREFIX + metric, text, labels=LABELS)
        for name, (metric, text) in _HISTOGRAMS.items()
    }
    for labels, sample in pools:
        values = sample.snapshot.counters
        for name, family in counters.items():
            if name in values:
                family.add_metric(labels, values[name])
        if "shim_cpu_ns" in values:
            cpu.add_metric(labels, values["shim_cpu_ns"] / 1e9)
        for name, histogram in sample.snapshot.histograms.items():
            if name in histograms:
                histograms[name].add_metric(labels, _cumulative(histogram), histogram.sum_seconds)
    return [*counters.values(), cpu, *histograms.values()]


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds_seconds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return buckets
