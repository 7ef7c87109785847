"""What engines tell of torch's allocator, as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agent.allocator.polling import AllocatorSample

PREFIX = "kvatlas_torch_allocator_"
_LABELS = ["engine_id", "model", "rank", "device"]


def allocator_families(samples: Iterable[AllocatorSample]) -> list[Metric]:
    """One series a device that a process uses; what it does not tell is absent."""
    sizes = GaugeMetricFamily(
        PREFIX + "bytes",
        "Memory of torch's allocator: reserved is live, pending and free; stuck is a part of free, requested of live.",
        labels=[*_LABELS, "kind"],
    )
    ratio = GaugeMetricFamily(
        PREFIX + "fragmentation_ratio",
        "Share of the allocator's free bytes that stand beside live ones in their segment, and cannot be given back.",
        labels=_LABELS,
    )
    retries = CounterMetricFamily(
        PREFIX + "retries", "Times that the driver refused memory and the cache was emptied.", labels=_LABELS
    )
    ooms = CounterMetricFamily(PREFIX + "ooms", "Allocations that failed for want of memory.", labels=_LABELS)
    seen: set[tuple[str, ...]] = set()
    for sample in samples:
        for device, told in sample.devices.items():
            labels = (sample.engine_id, sample.model, sample.rank, device)
            if labels in seen:
                continue  # two processes that call themselves the same: the first, as elsewhere
            seen.add(labels)
            for kind, size in parts(told).items():
                sizes.add_metric([*labels, kind], size)
            if (share := stuck_share(told)) is not None:
                ratio.add_metric(list(labels), share)
            for name, family in (("retries", retries), ("ooms", ooms)):
                if name in told:
                    family.add_metric(list(labels), told[name])
    return [sizes, ratio, retries, ooms]


def parts(told: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind, of one device's statistics: those that follow from others are worked out."""
    reserved, live, active = (told.get(f"{name}_bytes") for name in ("reserved", "live", "active"))
    found = {"reserved": reserved, "live": live, "requested": told.get("requested_bytes")}
    found["stuck"] = told.get("stuck_bytes")
    if active is not None and live is not None:
        found["pending"] = max(0, active - live)
    if reserved is not None and active is not None:
        found["free"] = max(0, reserved - active)
    return {kind: size for kind, size in found.items() if size is not None}


def stuck_share(told: Mapping[str, int]) -> float | None:
    """0 to 1; None where nothing is free, or it is not told."""
    sizes = parts(told)
    free, stuck = sizes.get("free"), sizes.get("stuck")
    return None if not free or stuck is None else min(1.0, stuck / free)
