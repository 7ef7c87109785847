"""Named numbers about devices and host, for rules: what is not known has no number, and says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.devices.model import DevicesView, DeviceView, EngineProcess, LibraryState, RowKind


@dataclass(frozen=True, slots=True)
class Signal:
    """One number about one subject. Ratios are 0 to 1, conditions 0 or 1."""

    name: str
    labels: Mapping[str, str]
    value: float
    reason: str = ""  # in words, where the number alone does not say


def signals(view: DevicesView) -> Iterator[Signal]:
    """Everything that rules may judge:

    - `nvml_failed`: NVML is there and does not work (no library at all is no failure: the host may have no GPU, and a
      failure that was seen before is over);
    - `device_lost` per `gpu`: the device itself failed, or is no longer listed;
    - `device_memory_free_ratio`, `device_memory_unattributed_ratio` per `gpu` or MIG slice;
    - `host_memory_available_ratio`;
    - `cgroup_memory_used_ratio` per `engine_id` and `rank`: working set over the limit, where there is one.
    """
    nvml = view.nvml
    if nvml.state.failed:
        yield Signal("nvml_failed", {}, 1.0, nvml.reason)
    elif nvml.state in (LibraryState.OK, LibraryState.NO_LIBRARY):
        yield Signal("nvml_failed", {}, 0.0)
    for device in view.devices:
        yield from _device(device)
    if view.host is not None and view.host.total_bytes:
        yield Signal("host_memory_available_ratio", {}, view.host.available_bytes / view.host.total_bytes)
    for engine in view.engines:
        yield from _engine(engine)


def _device(device: DeviceView) -> Iterator[Signal]:
    sample = device.sample
    labels = {"gpu": sample.key}
    # What a container may not ask for is no fault of the device; nor is what it cannot tell.
    if sample.state.broken or sample.state.answers:
        yield Signal("device_lost", labels, float(sample.state.broken), sample.reason)
    if device.attribution is not None and sample.memory is not None:
        total = sample.memory.total_bytes
        yield Signal("device_memory_free_ratio", labels, sample.memory.free_bytes / total)
        unattributed = device.attribution.bytes_of(RowKind.UNATTRIBUTED)
        if unattributed is not None:
            notes = "; ".join(device.attribution.notes)
            yield Signal("device_memory_unattributed_ratio", labels, unattributed / total, notes)
    for one in device.slices:
        yield from _device(one)


def _engine(engine: EngineProcess) -> Iterator[Signal]:
    group = engine.cgroup
    if group is not None and group.limit_bytes:
        used = group.usage_bytes if group.working_set_bytes is None else group.working_set_bytes
        labels = {"engine_id": engine.engine_id, "rank": engine.rank}
        yield Signal("cgroup_memory_used_ratio", labels, used / group.limit_bytes, f"of group {group.path}")
