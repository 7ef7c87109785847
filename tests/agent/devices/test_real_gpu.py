"""The same on a real card, with its own driver and library."""

from __future__ import annotations

import time

import pytest

from agent.devices.model import DeviceState, LibraryState
from agent.devices.nvml import NvmlReader, meminfo


@pytest.mark.gpu
def test_a_real_card_is_read_and_its_memory_adds_up() -> None:
    reading = NvmlReader(monotonic=time.monotonic, system=meminfo).read(lambda doing: None)
    if reading.state in (LibraryState.NO_LIBRARY, LibraryState.NO_DRIVER):
        pytest.skip(f"no NVIDIA driver here: {reading.reason}")
    assert reading.state is LibraryState.OK, reading.reason
    assert reading.devices, "the driver lists no device"
    for device in reading.devices:
        assert device.state in (DeviceState.OK, DeviceState.PARTIAL, DeviceState.UNIFIED), device.reason
        assert (device.uuid or "").startswith("GPU-")
        memory = device.memory
        assert memory is not None
        assert 0 < memory.free_bytes <= memory.total_bytes
        parts = memory.used_bytes + memory.free_bytes + (memory.reserved_bytes or 0)
        assert abs(parts - memory.total_bytes) <= 2**20  # NVML rounds each by itself
