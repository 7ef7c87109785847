"""A monitor over a reader and the maps of a folder, and all that it lets others see, as plain values."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

from agent.devices.families import device_families
from agent.devices.monitor import DeviceMonitor, MonitorSettings
from agent.devices.nvml import NvmlReader
from agent.devices.signals import signals
from agent.history import MemoryHistory
from agent.sampling.sampler import Sampler
from engine_shim.allocation_map.reader import MapReader


class Watch:
    """Started at once."""

    def __init__(self, reader: NvmlReader, maps: Path, timeout_seconds: float) -> None:
        self._sampler = Sampler(lambda: [maps], MapReader, MemoryHistory(seconds=60, interval_seconds=1))
        settings = MonitorSettings(interval_seconds=0.02, timeout_seconds=timeout_seconds)
        self._monitor = DeviceMonitor(lambda: self._sampler.view, settings, reader=reader)
        self._monitor.start()

    def after(self, rounds: int) -> dict[str, Any]:
        """The view once that many rounds are done, with the maps as they are now."""
        self._sampler.tick()
        assert self._monitor.wait(rounds, 120.0)
        return self.now()

    def now(self) -> dict[str, Any]:
        """The view as it is, with what is made of it."""
        view = self._monitor.view()
        families = device_families(view)
        return {
            **dataclasses.asdict(view),
            "signals": [dataclasses.asdict(one) for one in signals(view)],
            "metrics": [[one.name, one.labels, one.value] for family in families for one in family.samples],
            "threads": sorted(one.name for one in threading.enumerate() if one.name in ("nvml", "devices")),
        }
