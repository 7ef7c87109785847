"""Devices and host as Prometheus families: what is not known is absent, not zero."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from agent.allocator.families import allocator_families
from agent.devices.model import DevicesView, DeviceView, LibraryState

PREFIX = "kvatlas_"


def device_families(view: DevicesView) -> list[Metric]:
    """Families of one view; empty ones carry no sample."""
    memory = GaugeMetricFamily(
        PREFIX + "gpu_memory_bytes",
        "Device memory by what holds it; all kinds but total sum to total. A MIG slice counts as a device.",
        labels=["gpu", "kind"],
    )
    up = GaugeMetricFamily(
        PREFIX + "gpu_up",
        "1 while the device answers, 0 while it is lost; absent where it may not be asked.",
        labels=["gpu"],
    )
    info = GaugeMetricFamily(
        PREFIX + "gpu_info", "Always 1; tells what a device is.", labels=["gpu", "name", "bus_id", "index"]
    )
    nvml = GaugeMetricFamily(PREFIX + "nvml_up", "1 while NVML answers; absent where there is none, or it is off.")
    host = GaugeMetricFamily(
        PREFIX + "host_memory_bytes",
        "Host memory. available is what can be had without swapping; used and free leave caches out.",
        labels=["kind"],
    )
    process = GaugeMetricFamily(
        PREFIX + "engine_process_memory_bytes",
        "Host memory of an engine's process, and of the control group that limits it.",
        labels=["engine_id", "rank", "kind"],
    )
    if view.nvml.state not in (
        LibraryState.STARTING,
        LibraryState.OFF,
        LibraryState.RECORDING,
        LibraryState.NO_LIBRARY,
    ):
        nvml.add_metric([], view.nvml.state is LibraryState.OK)
    seen: set[str] = set()
    for device in _flat(view.devices):
        sample, key = device.sample, device.sample.key
        if key in seen:
            continue  # two that told no UUID, at one index of two parents: one series can be of one alone
        seen.add(key)
        if sample.state.answers or sample.state.broken:
            up.add_metric([key], sample.state.answers)
        info.add_metric([key, sample.name or "", sample.bus_id or "", str(sample.index)], 1)
        if device.attribution is None or sample.memory is None:
            continue
        memory.add_metric([key, "total"], sample.memory.total_bytes)
        for kind in dict.fromkeys(row.kind for row in device.attribution.rows):
            memory.add_metric([key, kind.value], device.attribution.bytes_of(kind) or 0)
    if view.host is not None:
        parts = (
            ("total", view.host.total_bytes),
            ("available", view.host.available_bytes),
            ("used", view.host.used_bytes),
            ("free", view.host.free_bytes),
            ("swap_total", view.host.swap_total_bytes),
            ("swap_used", view.host.swap_used_bytes),
        )
        for name, size in parts:
            host.add_metric([name], size)
    # Two that call themselves the same, as from two folders, give one series.
    for labels, engine in {(one.engine_id, one.rank): one for one in view.engines}.items():
        group = engine.cgroup
        figures = {"resident": engine.rss_bytes}
        if group is not None:
            figures |= {"cgroup_limit": group.limit_bytes, "cgroup_used": group.usage_bytes}
            figures["cgroup_working_set"] = group.working_set_bytes
        for name, figure in figures.items():
            if figure is not None:
                process.add_metric([*labels, name], figure)
    return [memory, up, info, nvml, host, process, *allocator_families(view.allocators)]


def _flat(devices: tuple[DeviceView, ...]) -> Iterator[DeviceView]:
    for device in devices:
        yield device
        yield from _flat(device.slices)
