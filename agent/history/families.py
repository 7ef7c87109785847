"""Metrics of the lasting history."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.history.writer import HistoryWriter


def history_families(writer: HistoryWriter | None, prefix: str) -> list[Metric]:
    """None where there is no lasting history."""
    if writer is None:
        return []
    up = GaugeMetricFamily(f"{prefix}history_up", "1 while what is sampled is kept on the disk.")
    up.add_metric([], 0 if writer.trouble else 1)
    size = GaugeMetricFamily(f"{prefix}history_bytes", "Bytes of the lasting history that hold something.")
    size.add_metric([], writer.size_bytes())
    lost = CounterMetricFamily(
        f"{prefix}history_lost", "Samples, frames, marks and log lines that were not kept.", labels=["reason"]
    )
    for reason, count in writer.lost().items():
        lost.add_metric([reason], count)
    return [up, size, lost]
