"""Every metric that an agent may export, with its type, labels and meaning, from the code that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric

from agent.alerting.families import alert_families
from agent.compaction.tally import tally_families
from agent.devices.families import device_families
from agent.devices.model import NOTHING_READ
from agent.engine_metrics.model import EngineMetricsView
from agent.engine_metrics.presenter import metric_families
from agent.exporter import LABELS, PREFIX, pool_families, sample_families
from agent.history.families import families as history_families
from agent.web.gate import gate_families


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One family, under the name that its samples have, less the endings of a histogram's."""

    name: str
    kind: str  # "gauge", "counter" or "histogram"
    labels: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Part:
    """Families of one part of the agent."""

    title: str
    families: tuple[MetricFamily, ...]


def catalogue() -> tuple[Part, ...]:
    """All parts; every family once."""
    return (
        Part("Engines and pools", _listed(pool_families([], 0.0))),
        Part("Compaction", _listed(tally_families([], {}, PREFIX, LABELS))),
        Part("What engines report themselves", _listed(metric_families(EngineMetricsView(), [], 0.0, PREFIX, LABELS))),
        Part("Devices, hosts and torch's allocator", _listed(device_families(NOTHING_READ))),
        Part("Alerts", _listed(alert_families({}, {}, PREFIX))),
        Part("The agent", _listed([*sample_families(0.0, 0.0), *history_families(PREFIX), *gate_families({}, PREFIX)])),
    )


def _listed(families: Iterable[Metric]) -> tuple[MetricFamily, ...]:
    return tuple(
        MetricFamily(
            name=family.name + ("_total" if family.type == "counter" else ""),
            kind=family.type,
            labels=tuple(family._labelnames),  # type: ignore[attr-defined]
            meaning=family.documentation,
        )
        for family in families
    )
