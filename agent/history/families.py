"""Metrics of the lasting history."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.history.writer import HistoryWriter


def history_families(writer: HistoryWriter | None, prefix: str) -> list[Metric]:
    """None where there is no lasting history."""
    if writer is None:
        return []
    made = families(prefix)
    up, size, lost = made
    up.add_metric([], 0 if writer.trouble else 1)
    size.add_metric([], writer.size_bytes())
    for reason, count in writer.lost().items():
        lost.add_metric([reason], count)
    return list(made)


def families(prefix: str) -> tuple[GaugeMetricFamily, GaugeMetricFamily, CounterMetricFamily]:
    """Without their samples."""
    return (
        GaugeMetricFamily(f"{prefix}history_up", "1 while what is sampled is kept on the disk."),
        GaugeMetricFamily(f"{prefix}history_bytes", "Bytes of the lasting history that hold something."),
        CounterMetricFamily(
            f"{prefix}history_lost", "Samples, frames, marks and log lines that were not kept.", labels=["reason"]
        ),
    )
