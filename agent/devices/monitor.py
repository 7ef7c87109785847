"""Reads devices, host and engines' processes on threads of their own and keeps the latest view of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from agent.allocator.polling import AllocatorControl, AllocatorPoll, AllocatorSample
from agent.compaction.control_client import EngineControl
from agent.devices.host import cgroup_memory, host_memory
from agent.devices.join import Join, engines_of
from agent.devices.model import (
    NOTHING_READ,
    DeviceSample,
    DeviceState,
    DevicesView,
    EngineHere,
    EngineProcess,
    LibraryState,
    NvmlReading,
)
from agent.devices.nvml import NvmlReader, meminfo, without_figures
from agent.devices.processes import LocalProcess, ProcessTable
from agent.devices.watcher import Say, Timing, Watched, Watcher
from agent.log import EventLog
from agent.sampling.model import AgentView, Clock

V = TypeVar("V")
_OFF = NvmlReading(LibraryState.OFF, "devices are not read: the setting `devices` is off")


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Seconds. `devices` off leaves NVML alone; host and processes are read all the same."""

    devices: bool = True
    interval_seconds: float = 5.0
    timeout_seconds: float = 10.0  # after which a call is said to hang


class DeviceMonitor:
    """`start()` begins; `view()` is the latest, at any time and from any thread, and waits for nothing."""

    def __init__(
        self,
        pools: Callable[[], AgentView],
        settings: MonitorSettings | None = None,
        *,
        clock: Clock | None = None,
        reader: NvmlReader | None = None,
        table: ProcessTable | None = None,
        control_of: Callable[[Path], AllocatorControl] = EngineControl,
    ) -> None:
        """`pools` tells which engines there are. The last three are for other sources than this machine's."""
        self.settings = settings or MonitorSettings()
        self._pools, self._clock = pools, clock or Clock()
        self._reader = reader or NvmlReader(monotonic=self._clock.monotonic, system=meminfo)
        self._table = table or ProcessTable(monotonic=self._clock.monotonic)
        self._log = EventLog(logging.getLogger("kvatlas.devices"))
        self._known: tuple[DeviceSample, ...] = ()  # as of the last good round, to name them while none comes
        timing = Timing(self.settings.interval_seconds, self.settings.timeout_seconds, self._clock.monotonic)
        self._local: Watcher[DevicesView] = Watcher("devices", self._read_all, timing)
        poll = AllocatorPoll(pools, control_of, monotonic=self._clock.monotonic)
        self._allocators: Watcher[tuple[AllocatorSample, ...]] = Watcher("allocators", poll.read, timing)
        self._nvml: Watcher[NvmlReading] = Watcher("nvml", self._read_nvml, timing, after=self._local.wake)

    def start(self) -> None:
        if self.settings.devices:
            self._nvml.start()
        self._allocators.start()
        self._local.start()

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """Let the threads end; one that hangs is left behind. The session is not closed, since that may hang too."""
        self._nvml.stop()
        self._allocators.stop()
        self._local.stop(timeout_seconds)

    def wait(self, rounds: int, timeout_seconds: float) -> bool:
        """Wait for that many rounds of NVML, then for one of the rest that tells of them."""
        if self.settings.devices and not self._nvml.wait(rounds, timeout_seconds):
            return False
        wanted = self._local.rounds + 2  # one may be under way that began before
        self._local.wake()
        return self._local.wait(wanted, timeout_seconds)

    def view(self) -> DevicesView:
        """The latest. Where even /proc does not answer, that is said in place of old figures."""
        latest = self._local.latest()
        if latest.stuck_seconds is not None:
            reason = f"this machine's /proc has not answered for {latest.stuck_seconds:.0f} s"
            return replace(NOTHING_READ, nvml=NvmlReading(LibraryState.HUNG, reason), host_reason=reason)
        return latest.value or NOTHING_READ

    def _read_nvml(self, say: Say) -> NvmlReading:
        try:
            return self._reader.read(say)
        except Exception as error:  # noqa: BLE001 - a fault of the binding, or of ours, must not end the thread
            return NvmlReading(LibraryState.FAILED, f"reading of devices failed: {type(error).__name__}: {error}")

    def _read_all(self, say: Say) -> DevicesView:
        try:
            return self._read_local(say)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.on_change("devices", "view", repr(error), level=logging.ERROR)
            reason = f"devices could not be told of: {type(error).__name__}: {error}"
            return replace(NOTHING_READ, nvml=NvmlReading(LibraryState.FAILED, reason), host_reason=reason)

    def _read_local(self, say: Say) -> DevicesView:
        say("reading of /proc")
        host, host_reason = _attempt(host_memory)
        cgroup, cgroup_reason = _attempt(cgroup_memory)
        engines = engines_of(self._pools())
        found = [(engine, self._table.engine(engine)) for engine in engines]
        nvml = self._reading(self._nvml.latest() if self.settings.devices else None)
        # Told apart by state alone: reasons hold ages, which would be news at each round.
        failed = nvml.state.value if nvml.state.failed else "ok"
        self._log.on_change("nvml", "library", failed, quiet_first="ok", reason=nvml.reason)
        for device in nvml.devices:
            self._log.on_change("device", device.key, device.state.value, quiet_first="ok", reason=device.reason)
        here = [(engine, process) for engine, process in found if process is not None]
        joined = Join(nvml.devices, engines, here, self._table)
        return DevicesView(
            taken_unix=self._clock.wall(),
            taken_monotonic=self._clock.monotonic(),
            nvml=nvml,
            devices=joined.views(),
            host=host,
            host_reason=host_reason,
            cgroup=cgroup,
            cgroup_reason=cgroup_reason,
            engines=tuple(_engine_process(engine, process) for engine, process in found),
            allocators=self._allocators.latest().value or (),
        )

    def _reading(self, watched: Watched[NvmlReading] | None) -> NvmlReading:
        """The last round, or what stands for it while there is none."""
        if watched is None:
            return _OFF
        if watched.stuck_seconds is not None:
            where = watched.stuck_in or "a call of the driver"
            reason = (
                f"{where} has not come back for {watched.stuck_seconds:.0f} s. The driver hangs: look at the kernel's "
                "log. Nothing else waits for it"
            )
            devices = tuple(without_figures(one, DeviceState.DEGRADED, reason) for one in self._known)
            return NvmlReading(LibraryState.HUNG, reason, devices)
        if watched.value is None:
            return NOTHING_READ.nvml
        if watched.value.state is LibraryState.OK:
            self._known = watched.value.devices
        return watched.value


def _engine_process(engine: EngineHere, process: LocalProcess | None) -> EngineProcess:
    if process is None:
        reason = f"pid {engine.pid} of the map is not visible here; share the engine's process namespace with the agent"
        return EngineProcess(engine.engine_id, engine.rank, None, None, None, reason)
    cgroup, reason = _attempt(lambda: cgroup_memory(process.pid))
    return EngineProcess(engine.engine_id, engine.rank, process.pid, process.rss_bytes, cgroup, reason)


def _attempt(read: Callable[[], V]) -> tuple[V | None, str]:
    """The value, or why there is none."""
    try:
        return read(), ""
    except OSError as error:
        return None, f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
    except ValueError as error:
        return None, str(error)
