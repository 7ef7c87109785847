"""A view of devices with one of everything in it."""

from __future__ import annotations

from agent.allocator.polling import AllocatorSample
from agent.devices.model import (
    Attribution,
    CgroupMemory,
    DeviceMemory,
    DeviceProcess,
    DeviceSample,
    DeviceState,
    DevicesView,
    DeviceView,
    EngineProcess,
    HostMemory,
    LibraryState,
    MemoryRow,
    NamedProcess,
    NvmlReading,
    RowKind,
)

GIB = 2**30


def full_view() -> DevicesView:
    """One of everything: a device in slices, a lost one, a process that nobody sees, figures that are not told."""
    memory = DeviceMemory(24 * GIB, 4 * GIB, 19 * GIB, GIB, "nvml v2")
    listed = (DeviceProcess(12, 3 * GIB, 1), DeviceProcess(13, None))
    small = DeviceSample(0, "MIG-1", None, None, DeviceState.PARTIAL, "no", memory, listed, True, 1)
    rows = (MemoryRow(RowKind.KV_POOL, GIB, "engine", "dp0"), MemoryRow(RowKind.FREE, 23 * GIB))
    named = (NamedProcess(12, 3 * GIB, "engine", "python"), NamedProcess(13, None, "", ""))
    one = DeviceView(small, Attribution(rows, ("a note",)), ("engine",), named)
    whole = DeviceSample(0, "GPU-1", "Test GPU", "0:1", DeviceState.OK, "", memory, listed, True, None, (small,))
    lost = DeviceSample(1, None, None, None, DeviceState.LOST, "it fell off")
    group = CgroupMemory(2, "/pod", None, GIB, None, 3)
    numbers = {"reserved_bytes": 9, "live_bytes": 5, "active_bytes": 6, "ooms": 1, "segments": 77}
    return DevicesView(
        taken_unix=1_999_999_998.0,
        taken_monotonic=98.5,
        nvml=NvmlReading(LibraryState.OK, "", (whole, lost), 2, "999.1"),
        devices=(DeviceView(whole, None, ("engine",), named, (one,)), DeviceView(lost, None, ())),
        host=HostMemory(8 * GIB, 6 * GIB, 2 * GIB, GIB, 0, 0),
        host_reason="",
        cgroup=None,
        cgroup_reason="not in one",
        engines=(EngineProcess("engine", "dp0", 12, 5, group), EngineProcess("two", "dp0", None, None, None, "no")),
        allocators=(AllocatorSample("engine", "org/model", "dp0", "", "native", {"0": numbers}),),
    )
