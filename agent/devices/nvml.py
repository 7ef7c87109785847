"""One NVML session: opened, kept, and opened anew where devices come and go or the driver was in trouble."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from agent.devices.model import DeviceSample, DeviceState, LibraryState, NvmlReading
from agent.devices.nvml_device import Asker, Refused, Say, SystemMemory, read_device
from agent.devices.nvml_errors import LIBRARY_NOT_FOUND

LIBRARY = "libnvidia-ml.so.1"
RETRY_SECONDS = 30.0  # between attempts to open a session, and between those to mend one
GONE_SECONDS = 300.0  # how long a device that is no longer listed is told of


def device_nodes() -> tuple[str, ...]:
    """What changes when a device is plugged in, taken out, or given to this container."""
    found: list[str] = []
    for folder, prefix in (("/proc/driver/nvidia/gpus", ""), ("/dev", "nvidia")):
        with suppress(OSError):
            found += [f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(prefix)]
    return tuple(sorted(found))


class NvmlReader:
    """Reads every device on each call. For one thread, which NVML may keep for as long as it likes."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        system: SystemMemory,
        nodes: Callable[[], tuple[str, ...]] = device_nodes,
        retry_seconds: float = RETRY_SECONDS,
        gone_seconds: float = GONE_SECONDS,
    ) -> None:
        """`system` tells the host's memory for devices that share it; `nodes` what a change of devices shows in."""
        self._monotonic, self._system, self._nodes = monotonic, system, nodes
        self._retry_seconds, self._gone_seconds = retry_seconds, gone_seconds
        self._nvml: Any = None
        self._open = False
        self._nodes_seen: tuple[str, ...] = ()
        self._start_at = self._mend_at = 0.0  # not before
        self._last = NvmlReading(LibraryState.STARTING, "devices were not read yet")
        self._driver: str | None = None
        self._count = 0
        self._by_index: dict[int, DeviceSample] = {}
        self._seen: dict[str, tuple[DeviceSample, float]] = {}  # by key, with when it was last listed

    def read(self, say: Say) -> NvmlReading:
        """A round over all devices, or why there is none. Does not raise for anything that NVML says."""
        nodes, now = self._nodes(), self._monotonic()
        if self._open and nodes != self._nodes_seen:
            self._close(say)
            self._by_index.clear()
        if not self._open:
            if now < self._start_at and nodes == self._nodes_seen:
                return self._failed(self._last)
            self._nodes_seen = nodes
            failure = self._start(say)
            if failure is not None:
                self._start_at = now + self._retry_seconds
                return self._failed(failure)
        return self._round(say, now)

    def _start(self, say: Say) -> NvmlReading | None:
        say("loading of NVML")
        try:
            # Here, since most of the agent's hosts in development have no GPU, and the module is large.
            self._nvml = import_module("pynvml")
        except ImportError:
            return NvmlReading(LibraryState.NO_BINDINGS, "the module pynvml is missing; install nvidia-ml-py")
        ask = Asker(self._nvml, say)
        try:
            ask("nvmlInit")
        except Refused as error:
            broken = _why_not_loaded() if error.code == LIBRARY_NOT_FOUND else ""
            if broken is None:
                return self._last  # whatever is there, it could not be looked at now
            return (
                NvmlReading(LibraryState.FAILED, broken) if broken else NvmlReading(error.meaning.library, str(error))
            )
        self._open = True
        with suppress(Refused):
            self._driver = str(ask("nvmlSystemGetDriverVersion"))
        return None

    def _round(self, say: Say, now: float) -> NvmlReading:
        ask = Asker(self._nvml, say)
        try:
            count = int(ask("nvmlDeviceGetCount"))
        except Refused as error:
            self._close(say)
            self._start_at = now + self._retry_seconds
            return self._failed(NvmlReading(error.meaning.library, str(error)))
        if count != self._count:
            self._by_index.clear()  # those behind one that came or went stand elsewhere now
            self._count = count
        devices = [read_device(ask, index, self._by_index.get(index), self._system) for index in range(count)]
        for device in devices:
            if device.uuid is not None:
                self._by_index[device.index] = device
                self._seen[device.uuid] = (device, now)
        listed = frozenset(device.key for device in devices)
        if any(device.state.broken for device in devices) and now >= self._mend_at:
            # After a reset, or once its device file is back, only a new session finds the device again.
            self._mend_at = now + self._retry_seconds
            self._close(say)
            self._start_at = now
        return NvmlReading(
            LibraryState.OK, "", (*devices, *self._gone(listed, now)), expected=count, driver_version=self._driver
        )

    def _failed(self, reading: NvmlReading) -> NvmlReading:
        """The same with the devices that were read before, which cannot be told of now: without figures."""
        self._last = replace(reading, devices=())
        state = DeviceState.DEGRADED if reading.state is LibraryState.DEGRADED else DeviceState.FAILED
        return replace(reading, devices=tuple(without_figures(one, state, reading.reason) for one in self._known()))

    def _known(self) -> list[DeviceSample]:
        return sorted((device for device, _ in self._seen.values()), key=lambda device: device.index)

    def _gone(self, listed: frozenset[str], now: float) -> tuple[DeviceSample, ...]:
        """Devices that were listed before and are not now, for a while and without their last figures."""
        missing = []
        for key, (device, seen_at) in list(self._seen.items()):
            if key in listed:
                continue
            if now - seen_at > self._gone_seconds:
                del self._seen[key]
                continue
            reason = (
                f"no longer listed by NVML since {now - seen_at:.0f} s; it was taken out, or this container lost it"
            )
            missing.append(without_figures(device, DeviceState.GONE, reason))
        return tuple(missing)

    def _close(self, say: Say) -> None:
        if self._open:
            self._open = False
            with suppress(Refused):
                Asker(self._nvml, say)("nvmlShutdown")


def _why_not_loaded() -> str | None:
    """Why a library that is there is not loaded, which the binding calls not found; "" where there is none, and None
    where this process is too short of descriptors or memory to tell."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        text = str(error)
        if any(os.strerror(code) in text for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)):
            return None
        if not (text.startswith(LIBRARY) and "No such file" in text):  # of itself, not of one that it needs
            return f"{LIBRARY} is there and cannot be loaded: {text[:200]}. Install the driver's libraries again"
    return ""


def without_figures(device: DeviceSample, state: DeviceState, reason: str) -> DeviceSample:
    """The same device in another state. Its last figures are not repeated: they are true no longer."""
    return DeviceSample(device.index, device.uuid, device.name, device.bus_id, state, reason)


def meminfo(path: Path = Path("/proc/meminfo")) -> tuple[int, int] | None:
    """Total and available bytes of the host, for devices that share its memory; None where they are not told.

    Available, not free: free leaves out caches that give way, so that a machine would look full when it is not.
    """
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total is None or available is None or not 0 <= available <= total:
        return None
    return total, available
