"""What NVML's error codes mean to whoever runs the machine. Codes are those of nvml.h."""

from __future__ import annotations

from dataclasses import dataclass

from agent.devices.model import DeviceState, LibraryState

NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
UNKNOWN = 999


@dataclass(frozen=True, slots=True)
class Meaning:
    """One code. `library` and `device` are the state that it puts the library, or the device asked, into."""

    library: LibraryState
    device: DeviceState
    text: str


_RESTART = "restart the container, or the machine"
_MEANINGS = {
    1: Meaning(LibraryState.FAILED, DeviceState.FAILED, "NVML was shut down"),
    2: Meaning(LibraryState.FAILED, DeviceState.FAILED, "NVML does not take the call"),
    NOT_SUPPORTED: Meaning(LibraryState.FAILED, DeviceState.NOT_SUPPORTED, "this device does not tell"),
    4: Meaning(LibraryState.NO_PERMISSION, DeviceState.NO_PERMISSION, "this user, or this container, may not ask"),
    9: Meaning(
        LibraryState.NO_DRIVER,
        DeviceState.FAILED,
        "the NVIDIA driver is not loaded, or this container may not use its device files",
    ),
    10: Meaning(LibraryState.DEGRADED, DeviceState.DEGRADED, "the driver did not answer in its own time"),
    11: Meaning(LibraryState.DEGRADED, DeviceState.DEGRADED, "the driver has trouble with the device's interrupts"),
    LIBRARY_NOT_FOUND: Meaning(LibraryState.NO_LIBRARY, DeviceState.FAILED, "libnvidia-ml.so.1 is not there"),
    FUNCTION_NOT_FOUND: Meaning(LibraryState.VERSION_MISMATCH, DeviceState.NOT_SUPPORTED, "this driver is too old"),
    GPU_IS_LOST: Meaning(
        LibraryState.DEGRADED,
        DeviceState.LOST,
        "the GPU has fallen off the bus or is otherwise unreachable: move its work away and restart the machine; "
        "the kernel's log names the Xid",
    ),
    RESET_REQUIRED: Meaning(
        LibraryState.DEGRADED, DeviceState.RESET_REQUIRED, "the GPU must be reset before it can be used again"
    ),
    17: Meaning(LibraryState.NO_PERMISSION, DeviceState.NO_PERMISSION, "the operating system blocked the call"),
    18: Meaning(
        LibraryState.VERSION_MISMATCH,
        DeviceState.FAILED,
        f"driver and library are of different versions, as after an update in place: {_RESTART}",
    ),
    19: Meaning(LibraryState.FAILED, DeviceState.DEGRADED, "the GPU is in use by somebody who keeps others out"),
    20: Meaning(LibraryState.DEGRADED, DeviceState.FAILED, "NVML is out of memory"),
    25: Meaning(LibraryState.VERSION_MISMATCH, DeviceState.NOT_SUPPORTED, "this driver knows another version of it"),
    UNKNOWN: Meaning(
        LibraryState.DEGRADED,
        DeviceState.DEGRADED,
        "the driver gives no cause; in a container that could read it before, its device files were taken away (as by "
        f"a reload of systemd): {_RESTART}",
    ),
}


def meaning_of(code: int, name: str) -> Meaning:
    """The meaning, its text beginning with NVML's own name of the error."""
    found = _MEANINGS.get(code, Meaning(LibraryState.FAILED, DeviceState.FAILED, f"error {code}"))
    return Meaning(found.library, found.device, f"{name}: {found.text}")
