"""The agent's settings that are about devices."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from agent.devices.monitor import MonitorSettings


class DeviceSettings(BaseSettings):
    """Whether and how often devices are read."""

    devices: bool = Field(default=True, description="read GPUs through NVML, where there is one")
    devices_seconds: float = Field(
        default=5.0, ge=0.5, le=300, description="time between two readings of devices, host and torch's allocators"
    )
    devices_timeout_seconds: float = Field(
        default=10.0, ge=0.5, le=300, description="how long the driver may take before it is said to hang"
    )

    def device_monitor(self) -> MonitorSettings:
        """The same, for the monitor."""
        return MonitorSettings(self.devices, self.devices_seconds, self.devices_timeout_seconds)
