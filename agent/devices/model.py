"""What is known of devices, host and processes at one instant: frozen values, each with a state and a reason.

A figure that is not known is None, never 0; the reason says why. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent.allocator.polling import AllocatorSample


class LibraryState(StrEnum):
    """How NVML as a whole stands. Only OK gives devices."""

    STARTING = "starting"  # nothing was read yet
    OFF = "off"  # by setting
    RECORDING = "recording"  # what is served is played back, and holds no devices
    OK = "ok"
    NO_BINDINGS = "no_bindings"
    NO_LIBRARY = "no_library"
    NO_DRIVER = "no_driver"
    NO_PERMISSION = "no_permission"
    VERSION_MISMATCH = "version_mismatch"
    DEGRADED = "degraded"  # it answers with errors that it gives no cause for
    HUNG = "hung"
    FAILED = "failed"

    @property
    def failed(self) -> bool:
        """Is something there that should answer, and does not? A host without a driver's library has not failed."""
        return self not in (
            LibraryState.STARTING,
            LibraryState.OFF,
            LibraryState.RECORDING,
            LibraryState.OK,
            LibraryState.NO_BINDINGS,
            LibraryState.NO_LIBRARY,
        )


class DeviceState(StrEnum):
    """How one device, or one MIG slice, stands. OK, PARTIAL and UNIFIED come with memory figures."""

    OK = "ok"
    PARTIAL = "partial"  # some of what was asked is refused; the reason names it
    UNIFIED = "unified"  # shares the host's memory, of which the figures are
    LOST = "lost"
    RESET_REQUIRED = "reset_required"
    NO_PERMISSION = "no_permission"
    NOT_SUPPORTED = "not_supported"
    DEGRADED = "degraded"
    GONE = "gone"  # was there before, and is no longer listed
    FAILED = "failed"

    @property
    def answers(self) -> bool:
        """Does the device tell something of itself?"""
        return self in (DeviceState.OK, DeviceState.PARTIAL, DeviceState.UNIFIED)

    @property
    def broken(self) -> bool:
        """Did the device itself fail, rather than decline to say?"""
        return self in (DeviceState.LOST, DeviceState.RESET_REQUIRED, DeviceState.DEGRADED, DeviceState.GONE)


class RowKind(StrEnum):
    """What a part of a device's memory is. The rows of one device sum to its total."""

    KV_POOL = "kv_pool"
    ENGINE_OTHER = "engine_other"  # an engine's weights, activations, graphs and contexts: all but its pool
    OTHER_PROCESSES = "other_processes"
    RESERVED = "reserved"  # by driver and firmware
    UNATTRIBUTED = "unattributed"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`total = reserved + used + free` where `reserved` is known; else `used` holds it too."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    source: str  # "nvml v2", "nvml v1", or "system" for unified memory


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process as NVML names it: `pid` may be one of another namespace."""

    pid: int
    used_bytes: int | None
    gpu_instance: int | None = None  # of a device that is cut into MIG slices


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device or MIG slice. `uuid` is its identity; an index is only where it stood when it was read."""

    index: int
    uuid: str | None
    name: str | None
    bus_id: str | None
    state: DeviceState
    reason: str
    memory: DeviceMemory | None = None
    processes: tuple[DeviceProcess, ...] | None = None  # None: not told; the reason says why
    mig: bool | None = None  # None: not known
    gpu_instance: int | None = None  # of a slice; slices with the same one share its memory
    slices: tuple[DeviceSample, ...] = ()

    @property
    def key(self) -> str:
        """The UUID; for a device that never told one, where it stands."""
        return self.uuid or f"index-{self.index}"


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """One round over all devices. `expected` counts those that NVML lists, whether or not they could be read."""

    state: LibraryState
    reason: str
    devices: tuple[DeviceSample, ...] = ()
    expected: int | None = None
    driver_version: str | None = None


@dataclass(frozen=True, slots=True)
class EngineHere:
    """What a map says of the process that holds KV pools; several pools of one process are one of these."""

    engine_id: str
    rank: str
    pid: int  # in the engine's own namespace
    pid_start_ticks: int
    gpu_uuids: tuple[str, ...]
    medium: str
    pool_bytes: int  # on each device; 0 while the engine sleeps


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A part of a device's memory. `engine_id` is given for the two kinds that belong to an engine."""

    kind: RowKind
    bytes: int
    engine_id: str = ""
    rank: str = ""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Rows that sum to the device's total, and what a reader should know about them."""

    rows: tuple[MemoryRow, ...]
    notes: tuple[str, ...] = ()

    def bytes_of(self, kind: RowKind) -> int | None:
        """The sum of one kind's rows; None where there is no such row."""
        found = [row.bytes for row in self.rows if row.kind is kind]
        return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Of the whole machine. `available` is what can be had without swapping: more than `free`."""

    total_bytes: int
    available_bytes: int
    used_bytes: int
    free_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest memory limit above a process, and what counts against it."""

    version: int  # 1 or 2
    path: str  # as the process's own file says
    limit_bytes: int | None  # None: without limit
    usage_bytes: int
    working_set_bytes: int | None  # usage without inactive file pages, which is what an orchestrator evicts by
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine's process as this machine sees it. Figures are None where it is not visible; the reason says why."""

    engine_id: str
    rank: str
    pid: int | None  # in this namespace
    rss_bytes: int | None
    cgroup: CgroupMemory | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NamedProcess:
    """A process on a device, as far as it can be told whose it is."""

    pid: int  # as NVML tells it
    used_bytes: int | None
    engine_id: str  # "" where it is of no engine that is visible here
    name: str  # "" where it is not visible here


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device with its memory attributed. `slices` are views of the same kind."""

    sample: DeviceSample
    attribution: Attribution | None  # None: no figures, or (of a MIG parent) its slices have them
    engines: tuple[str, ...]  # ids of engines that are on it
    processes: tuple[NamedProcess, ...] | None = None  # None: not told
    slices: tuple[DeviceView, ...] = ()


@dataclass(frozen=True, slots=True)
class DevicesView:
    """Everything at one instant, in wall time and by a clock that is never set."""

    taken_unix: float
    taken_monotonic: float | None  # None: nothing was read yet
    nvml: NvmlReading
    devices: tuple[DeviceView, ...]
    host: HostMemory | None
    host_reason: str  # why there is none
    cgroup: CgroupMemory | None  # the agent's own
    cgroup_reason: str
    engines: tuple[EngineProcess, ...]
    allocators: tuple[AllocatorSample, ...] = ()


NOTHING_READ = DevicesView(
    0.0,
    None,
    NvmlReading(LibraryState.STARTING, "devices were not read yet"),
    (),
    None,
    "not read yet",
    None,
    "not read yet",
    (),
)

NOTHING_RECORDED = DevicesView(
    0.0,
    None,
    NvmlReading(LibraryState.RECORDING, "a recording has no devices"),
    (),
    None,
    "a recording does not hold its host's memory",
    None,
    "a recording has no control group",
    (),
)
"""Of a replay of a recording without devices: those of the machine that it is played back on are another's."""
