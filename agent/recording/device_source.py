"""What a recorder tells of devices: read as the agent reads them, on threads that a driver may keep for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent.config import AgentSettings
from agent.descriptors import raise_limit, share_out
from agent.devices.model import DevicesView
from agent.devices.monitor import DeviceMonitor
from agent.history import MemoryHistory
from agent.log import ROOT
from agent.sampling.model import Clock
from agent.sampling.sampler import Sampler
from engine_shim.allocation_map.reader import MapReader

FIRST_SECONDS = 1.0
"""That a recording waits for a first reading of maps, and of devices; what takes longer is told of once it is there."""


class DeviceSource:
    """`start` begins; `view` is the latest, at any time and from any thread, and waits for nothing.

    The maps of all engines here are looked at as often as devices are: which engine a device's memory belongs to is
    told by them.
    """

    def __init__(self, settings: AgentSettings, folders: Sequence[Path], clock: Clock) -> None:
        """`folders` are looked through besides those that the agent looks through; `clock` is the recorder's."""
        seconds = settings.devices_seconds
        self._sampler = Sampler(
            lambda: tuple(dict.fromkeys((*settings.map_folders(), *folders))),
            MapReader,
            MemoryHistory(seconds=2 * seconds, interval_seconds=seconds),  # nobody asks for it
            settings=replace(settings.sampler(), interval_seconds=seconds, max_open=share_out(raise_limit()).maps),
            clock=clock,
        )
        self._monitor = DeviceMonitor(lambda: self._sampler.view, settings.device_monitor(), clock=clock)
        self._sampled = threading.Event()
        self._sampler.subscribe(self._sampled.set)
        self._thread = threading.Thread(target=self._sampler.run, name="maps", daemon=True)
        self._quiet = logging.NullHandler()

    def start(self) -> None:
        """Begin, and give the first reading a moment."""
        logging.getLogger(ROOT).addHandler(self._quiet)  # what is wrong stands in the recording, not between its words
        self._thread.start()
        self._sampled.wait(FIRST_SECONDS)
        self._monitor.start()
        self._monitor.wait(1, FIRST_SECONDS)

    def view(self) -> DevicesView:
        return self._monitor.view()

    def stop(self) -> None:
        """Let the threads end; one that hangs is left behind."""
        self._sampler.stop()
        self._monitor.stop()
        self._thread.join(FIRST_SECONDS)
        if not self._thread.is_alive():
            self._sampler.close()
        logging.getLogger(ROOT).removeHandler(self._quiet)
