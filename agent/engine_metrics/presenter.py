"""Readings of engines' metrics into what goes over the wire and into our own metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent import wire
from agent.engine_metrics.model import (
    Comparison,
    EngineMetricsView,
    EngineReading,
    JoinedReading,
    RankReading,
    SourceReading,
    UnmappedEngine,
    Values,
    frozen_after,
)
from agent.engine_metrics.names import MEANINGS, Quantity

_LABELS = ("engine_id", "model", "rank", "kind", "source", "block_map")
_EXPORTED = {
    Quantity.KV_USAGE: ("engine_reported_kv_usage_ratio", "Share of the KV cache in use, as the engine reports it."),
    Quantity.RUNNING: ("engine_reported_running_requests", "Running requests, as the engine reports them."),
    Quantity.WAITING: ("engine_reported_waiting_requests", "Waiting requests, as the engine reports them."),
    Quantity.CAPACITY_TOKENS: ("engine_reported_capacity_tokens", "Tokens that its KV cache holds, as it reports."),
    Quantity.USED_TOKENS: ("engine_reported_used_tokens", "Tokens in its KV cache, as the engine reports them."),
    Quantity.PREFIX_HIT_RATIO: ("engine_reported_prefix_hit_ratio", "Prefix hit rate, as the engine reports it."),
    Quantity.MEMORY_BYTES: ("engine_reported_memory_bytes", "Memory of the loaded model, as the engine reports it."),
    Quantity.PREEMPTIONS: ("engine_reported_preemptions", "Preemptions, as the engine reports them."),
    Quantity.PREFIX_QUERY_TOKENS: ("engine_reported_prefix_query_tokens", "Prompt tokens looked up, as it reports."),
    Quantity.PREFIX_HIT_TOKENS: ("engine_reported_prefix_hit_tokens", "Prompt tokens found, as the engine reports."),
    Quantity.PROMPT_TOKENS: ("engine_reported_prompt_tokens", "Prompt tokens served, as the engine reports them."),
    Quantity.GENERATION_TOKENS: ("engine_reported_generation_tokens", "Tokens generated, as the engine reports them."),
}


def describe_sources(view: EngineMetricsView, now_unix: float) -> list[wire.MetricsSource]:
    """Every address that is asked."""
    return [
        wire.MetricsSource(
            source=one.source.name,
            engine_id=one.source.engine_id,
            up=one.up,
            fault=one.fault,
            age_seconds=one.age_seconds(now_unix),
            several_writers=one.several_writers,
            engines=len(one.engines),
        )
        for one in view.sources
    ]


def describe_joined(reading: JoinedReading, now_unix: float) -> wire.EngineMetrics:
    """What the metrics say of the engine of one pool."""
    return _metrics(reading.reading, reading.engine, reading.rank.rank, reading.rank.values, now_unix)


def describe_comparison(made: Comparison) -> wire.MetricsComparison:
    """How that and the map agree."""
    return wire.MetricsComparison(
        compared=made.ratio is not None,
        why_not=made.why_not or ("" if made.made_unix is not None else "the first readings are still to be compared"),
        disagrees=made.disagrees,
        disagreement_ratio=made.ratio,
        reason=made.reason,
        differences=[
            wire.MetricsDifference(
                quantity=one.quantity.value,
                metrics=one.metrics,
                map_low=one.map_low,
                map_high=one.map_high,
                disagreement_ratio=one.ratio,
                beyond_tolerance=one.beyond,
            )
            for one in made.differences
        ],
    )


def describe_unmapped(engine: UnmappedEngine, now_unix: float, interval_seconds: float) -> wire.UnmappedEngine:
    """An engine without a block map."""
    reading, frozen = engine.reading, engine.reading.frozen_seconds(engine.engine, now_unix)
    state, reason = "live", ""
    if not reading.up:
        state, reason = "unreachable", f"its metrics cannot be read: {reading.fault}"
    elif frozen > frozen_after(interval_seconds):
        state = "frozen"
        reason = f"it reports running requests, and nothing in its metrics has changed for {frozen:.0f} s"
    ranks = engine.engine.ranks
    return wire.UnmappedEngine(
        id=engine.id,
        engine_id=engine.engine_id,
        kind=engine.engine.kind,
        model=engine.engine.model,
        state=state,  # type: ignore[arg-type]
        reason=reason,
        metrics=_metrics(reading, engine.engine, None, engine.engine.total, now_unix),
        ranks=[_metrics(reading, engine.engine, one.rank, one.values, now_unix) for one in ranks]
        if len(ranks) > 1
        else [],
    )


def _metrics(
    reading: SourceReading, engine: EngineReading, rank: int | None, values: Values, now_unix: float
) -> wire.EngineMetrics:
    notes = list(engine.notes)
    if reading.several_writers:
        notes.append("several processes answer at this address in turn: each number is of whichever answered")
    if engine.kind == "sglang" and {Quantity.SLIDING_USAGE, Quantity.STATE_USAGE} & set(values):
        notes.append("the usage is that of its fullest pool")
    return wire.EngineMetrics(
        source=reading.source.name,
        age_seconds=reading.age_seconds(now_unix),
        frozen_seconds=reading.frozen_seconds(engine, now_unix),
        rank=rank,
        values={quantity.value: value for quantity, value in values.items()},
        notes=notes,
    )


def metric_families(
    view: EngineMetricsView,
    pools: Sequence[tuple[tuple[str, ...], str]],
    now_unix: float,
    prefix: str,
    pool_labels: Sequence[str],
) -> Iterator[Metric]:
    """Our own metrics on engines' metrics; numbers of an address that has not answered for long are absent.

    `pools` are the labels and the id of each pool that is exported.
    """
    up = GaugeMetricFamily(
        prefix + "engine_metrics_up", "1 if the last question to the address was answered.", labels=("source",)
    )
    age = GaugeMetricFamily(prefix + "engine_metrics_age_seconds", "Since its last good answer.", labels=("source",))
    failures = CounterMetricFamily(
        prefix + "engine_metrics_failures", "Questions to the address without a good answer.", labels=("source",)
    )
    for one in view.sources:
        up.add_metric((one.source.name,), float(one.up))
        failures.add_metric((one.source.name,), one.failures)
        if (seconds := one.age_seconds(now_unix)) is not None:
            age.add_metric((one.source.name,), seconds)
    disagreement = GaugeMetricFamily(
        prefix + "engine_metrics_disagreement_ratio",
        "How far an engine's own metrics and its block map lastingly differ beyond skew; 0 where they agree.",
        labels=pool_labels,
    )
    for labels, id in pools:
        if (ratio := view.disagreement_ratio(id)) is not None:
            disagreement.add_metric(labels, ratio)
    yield from (up, age, failures, disagreement)
    yield from _reported(view, now_unix, prefix)


def _reported(view: EngineMetricsView, now_unix: float, prefix: str) -> Iterator[Metric]:
    families: dict[Quantity, GaugeMetricFamily | CounterMetricFamily] = {
        quantity: (CounterMetricFamily if MEANINGS[quantity].is_counter else GaugeMetricFamily)(
            prefix + name, text, labels=_LABELS
        )
        for quantity, (name, text) in _EXPORTED.items()
    }
    rows: dict[tuple[str, ...], Values] = {}
    for engine_id, has_map, reading, engine, rank in _ranks(view):
        age = reading.age_seconds(now_unix)
        if age is not None and age <= view.stale_seconds:
            number = "" if rank.rank is None else f"dp{rank.rank}"
            source = reading.source.name
            rows[engine_id, engine.model, number, engine.kind, source, "true" if has_map else "false"] = rank.values
    for labels, values in rows.items():
        for quantity, family in families.items():
            if quantity in values:
                family.add_metric(labels, values[quantity])
    yield from families.values()


def _ranks(view: EngineMetricsView) -> Iterator[tuple[str, bool, SourceReading, EngineReading, RankReading]]:
    """Each rank with the engine's id, and whether that has a map."""
    for joined in view.by_pool.values():
        yield joined.engine_id, True, joined.reading, joined.engine, joined.rank
    for unmapped in view.unmapped:
        for rank in unmapped.engine.ranks:
            yield unmapped.id, False, unmapped.reading, unmapped.engine, rank
