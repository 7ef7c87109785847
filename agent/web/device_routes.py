"""The route of devices: who holds their memory, the host's, and what torch's allocators hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import FastAPI, Response

from agent.allocator.families import parts, stuck_share
from agent.allocator.polling import AllocatorSample
from agent.devices.model import CgroupMemory, DevicesView, DeviceView, EngineProcess
from agent.sampling.model import Clock
from agent.web.errors import json_response
from agent.wire import devices as wire

ROUTE = "/v1/devices"


def add_devices(app: FastAPI, view: Callable[[], DevicesView], clock: Clock) -> None:
    """`view` is the latest; it waits for nothing."""

    @app.get(ROUTE, response_model=wire.DeviceList, tags=["devices"])
    async def devices() -> Response:
        """GPUs with their memory by who holds it, the host's memory, engines' processes and their torch allocators."""
        return json_response(describe_devices(view(), clock))


def describe_devices(view: DevicesView, clock: Clock) -> wire.DeviceList:
    """The view as the API tells it."""
    taken = view.taken_monotonic
    return wire.DeviceList(
        now_unix=clock.wall(),
        age_seconds=None if taken is None else max(0.0, clock.monotonic() - taken),
        nvml=view.nvml.state.value,
        nvml_reason=view.nvml.reason,
        driver_version=view.nvml.driver_version,
        expected_devices=view.nvml.expected,
        devices=[_device(one) for one in view.devices],
        host=None if view.host is None else wire.HostMemory(**asdict(view.host)),
        host_reason=view.host_reason,
        cgroup=_cgroup(view.cgroup),
        cgroup_reason=view.cgroup_reason,
        engines=[_engine(one) for one in view.engines],
        allocators=[_allocator(one) for one in view.allocators],
    )


def _device(device: DeviceView) -> wire.Device:
    sample, attribution = device.sample, device.attribution
    rows = None
    if attribution is not None:
        rows = [
            wire.MemoryRow(kind=row.kind.value, bytes=row.bytes, engine_id=row.engine_id, rank=row.rank)
            for row in attribution.rows
        ]
    return wire.Device(
        gpu=sample.key,
        uuid=sample.uuid,
        index=sample.index,
        name=sample.name,
        bus_id=sample.bus_id,
        state=sample.state.value,
        reason=sample.reason,
        memory=None if sample.memory is None else wire.DeviceMemory(**asdict(sample.memory)),
        rows=rows,
        notes=[] if attribution is None else list(attribution.notes),
        engines=list(device.engines),
        processes=None if device.processes is None else [wire.DeviceProcess(**asdict(one)) for one in device.processes],
        mig=sample.mig,
        slices=[_device(one) for one in device.slices],
    )


def _cgroup(group: CgroupMemory | None) -> wire.CgroupMemory | None:
    return None if group is None else wire.CgroupMemory(**asdict(group))


def _engine(engine: EngineProcess) -> wire.EngineProcess:
    return wire.EngineProcess(
        engine_id=engine.engine_id,
        rank=engine.rank,
        pid=engine.pid,
        resident_bytes=engine.rss_bytes,
        cgroup=_cgroup(engine.cgroup),
        reason=engine.reason,
    )


def _allocator(sample: AllocatorSample) -> wire.EngineAllocator:
    devices = []
    for device, told in sample.devices.items():
        sizes = parts(told)
        devices.append(
            wire.TorchAllocator(
                device=device,
                reserved_bytes=sizes.get("reserved"),
                live_bytes=sizes.get("live"),
                pending_bytes=sizes.get("pending"),
                free_bytes=sizes.get("free"),
                stuck_bytes=sizes.get("stuck"),
                requested_bytes=sizes.get("requested"),
                fragmentation_rate=stuck_share(told),
                retries=told.get("retries"),
                ooms=told.get("ooms"),
            )
        )
    return wire.EngineAllocator(
        engine_id=sample.engine_id, rank=sample.rank, backend=sample.backend, reason=sample.reason, devices=devices
    )
