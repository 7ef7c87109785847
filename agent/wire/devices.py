"""What the agent says of devices, host and torch's allocators over HTTP. Sizes are bytes; null: not known."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent.wire import WireModel

RowWord = Literal["kv_pool", "engine_other", "other_processes", "reserved", "unattributed", "free"]


class DeviceMemory(WireModel):
    """`total = reserved + used + free` where `reserved` is known; else `used` holds it too."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    source: str  # "nvml v2", "nvml v1", or "system": of a device that shares the host's memory


class MemoryRow(WireModel):
    """What holds a part of a device's memory."""

    kind: RowWord
    bytes: int
    engine_id: str  # of the first two kinds; "" of the others
    rank: str


class DeviceProcess(WireModel):
    """A process on a device. `pid` is as NVML tells it; no name and no engine: it is not visible to the agent."""

    pid: int
    used_bytes: int | None
    engine_id: str
    name: str


class Device(WireModel):
    """One device, or one slice of it. `uuid` is its identity; an index is only where it stood when it was read."""

    gpu: str  # the UUID, or "index-N" of a device that never told one; as in the metrics
    uuid: str | None
    index: int
    name: str | None
    bus_id: str | None
    state: str  # "ok", "partial", "unified", "lost", "reset_required", "no_permission", "not_supported", ...
    reason: str  # "" where all is well
    memory: DeviceMemory | None
    rows: list[MemoryRow] | None  # they sum to the total; null without figures, and where slices have them
    notes: list[str]  # on the rows
    engines: list[str]  # ids of engines on it
    processes: list[DeviceProcess] | None  # null: NVML does not tell
    mig: bool | None
    slices: list[Device]


class HostMemory(WireModel):
    """Of the whole machine."""

    total_bytes: int
    available_bytes: int
    used_bytes: int
    free_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int


class CgroupMemory(WireModel):
    """The tightest memory limit above a process."""

    version: int
    path: str
    limit_bytes: int | None  # null: without limit
    usage_bytes: int
    working_set_bytes: int | None
    oom_kills: int | None


class EngineProcess(WireModel):
    """An engine's process; without figures, and with a reason, where it is not visible to the agent."""

    engine_id: str
    rank: str
    pid: int | None
    resident_bytes: int | None
    cgroup: CgroupMemory | None
    reason: str


class TorchAllocator(WireModel):
    """One device of torch's allocator in an engine's process."""

    device: str  # CUDA index in that process, which names no GPU
    reserved_bytes: int | None
    live_bytes: int | None
    pending_bytes: int | None  # freed, and held until another stream is through
    free_bytes: int | None
    stuck_bytes: int | None  # of free: beside live blocks in the same segment
    requested_bytes: int | None  # of live: what the program asked for
    fragmentation_rate: float | None  # stuck / free
    retries: int | None
    ooms: int | None


class EngineAllocator(WireModel):
    """What an engine tells of torch's allocator."""

    engine_id: str
    rank: str
    backend: str
    reason: str  # why there are no devices, or what to beware of
    devices: list[TorchAllocator]


class DeviceList(WireModel):
    """Everything at one instant; `age_seconds` is null before the first reading."""

    schema_: Literal["kvatlas.devices/v1"] = Field(default="kvatlas.devices/v1", alias="schema")
    now_unix: float
    age_seconds: float | None
    nvml: str  # "ok", "off", "starting", "recording" (a replay of none), "no_library", "no_driver", ...
    nvml_reason: str
    driver_version: str | None
    expected_devices: int | None  # that NVML lists, readable or not
    devices: list[Device]
    host: HostMemory | None
    host_reason: str
    cgroup: CgroupMemory | None  # the agent's own
    cgroup_reason: str
    engines: list[EngineProcess]
    allocators: list[EngineAllocator]
