"""Metrics of alerts and of their delivery, with closed sets of labels."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from alerts.model import Severity

STATES = ("pending", "firing", "muted")


def alert_families(
    open_alerts: Mapping[tuple[str, str], int], outcomes: Mapping[tuple[str, str], int], prefix: str
) -> list[Metric]:
    """`open_alerts` by severity and state, `outcomes` by sink and outcome; what there is none of is 0."""
    alerts = GaugeMetricFamily(
        f"{prefix}alerts", "Open alerts; a muted one fires, and nobody was told.", labels=["severity", "state"]
    )
    for severity in Severity:
        for state in STATES:
            alerts.add_metric([severity.value, state], open_alerts.get((severity.value, state), 0))
    notifications = CounterMetricFamily(
        f"{prefix}notifications",
        "Messages by what became of them, and changes of alerts by what was made of them before they were told.",
        labels=["sink", "outcome"],
    )
    for (sink, outcome), count in sorted(outcomes.items()):
        notifications.add_metric([sink, outcome], count)
    return [alerts, notifications]
