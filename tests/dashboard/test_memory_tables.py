"""Memory as text of the page: every figure once, and where there is none, why."""

from __future__ import annotations

from typing import Any

import pytest

from agent.devices.model import NOTHING_READ, NOTHING_RECORDED
from agent.sampling.model import Clock
from agent.web.device_routes import describe_devices
from agent.wire.devices import (
    CgroupMemory,
    Device,
    DeviceList,
    DeviceMemory,
    DeviceProcess,
    EngineAllocator,
    EngineProcess,
    HostMemory,
    MemoryRow,
    RowWord,
    TorchAllocator,
)
from dashboard import memory_tables as tables
from dashboard.palette import LIGHT

GIB = 2**30
BAD = "<b>x</b>"


def device(**changes: Any) -> Device:
    rows: list[tuple[RowWord, int, str]] = [("kv_pool", 40, "vllm-7"), ("engine_other", 20, "vllm-7")]
    rows += [("other_processes", 6, ""), ("reserved", 1, "")]
    rows += [("unattributed", 3, ""), ("free", 10, "")]
    fields: dict[str, Any] = {
        "gpu": "GPU-1",
        "uuid": "GPU-1",
        "index": 0,
        "name": "A card",
        "bus_id": "0000:01",
        "state": "ok",
        "reason": "",
        "memory": DeviceMemory(
            total_bytes=80 * GIB, used_bytes=69 * GIB, free_bytes=10 * GIB, reserved_bytes=GIB, source="nvml v2"
        ),
        "rows": [MemoryRow(kind=kind, bytes=n * GIB, engine_id=who, rank="dp0.tp0.pp0") for kind, n, who in rows],
        "notes": [],
        "engines": ["vllm-7"],
        "processes": [
            DeviceProcess(pid=11, used_bytes=60 * GIB, engine_id="vllm-7", name="python"),
            DeviceProcess(pid=12, used_bytes=None, engine_id="", name=""),
        ],
        "mig": False,
        "slices": [],
    }
    return Device(**{**fields, **changes})


def listing(*devices: Device, **changes: Any) -> DeviceList:
    given: dict[str, Any] = {
        "now_unix": 1.0,
        "age_seconds": 2.0,
        "nvml": "ok",
        "nvml_reason": "",
        "driver_version": "999.1",
        "expected_devices": len(devices),
        "devices": list(devices),
        "host": None,
        "host_reason": "no /proc",
        "cgroup": None,
        "cgroup_reason": "not in one",
        "engines": [],
        "allocators": [],
    }
    return DeviceList(**{**given, **changes})


def test_rows_of_a_device_and_who_shares_it() -> None:
    text = tables.devices_html(listing(device()), LIGHT)
    for part in ("KV pool of vllm-7", "40.0 GiB", "50.0 %", "co-tenants of the device", "unattributed", "driver 999.1"):
        assert part in text
    assert "<td>12</td><td>another</td><td>not visible to the agent</td><td>not told by NVML</td>" in text
    assert text.count('title="') == 12  # each row in the bar and in the table


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "lost", "reason": "it does not answer", "memory": None, "rows": None}, "it does not answer"),
        ({"state": "no_permission", "memory": None, "rows": None}, "Its memory is not known: no_permission."),
        ({"rows": None, "reason": "processes refused"}, "not told apart: processes refused"),
        ({"rows": None, "slices": [device(gpu="MIG-1", uuid="MIG-1")]}, "in the rows of its slices"),
        ({"processes": None}, "NVML does not tell them here"),
        ({"processes": []}, "No process is on it."),
    ],
)
def test_what_is_not_known_has_its_reason_and_no_zero(changes: dict[str, Any], why: str) -> None:
    text = tables.devices_html(listing(device(**changes)), LIGHT)
    assert why in text
    assert "0 B" not in text


def test_without_a_library_it_says_why() -> None:
    text = tables.devices_html(listing(nvml="no_library", nvml_reason="libnvidia-ml.so.1 is not there"), LIGHT)
    assert "No device is shown: libnvidia-ml.so.1 is not there." in text


def test_a_recording_waits_for_no_reading() -> None:
    found = describe_devices(NOTHING_RECORDED, Clock())
    text = tables.devices_html(found, LIGHT) + tables.host_html(found)
    text += tables.allocators_html(found.allocators, recorded=True)
    assert "a recording has no devices" in text
    assert "not read yet" not in text
    assert "No engine" not in text
    starting = describe_devices(NOTHING_READ, Clock())
    assert "not read yet" in tables.devices_html(starting, LIGHT)


def test_host_and_processes() -> None:
    nothing = tables.host_html(listing(engines=[process(resident_bytes=None, reason="another user's")]))
    assert "not known: no /proc" in nothing
    assert "not known: not in one" in nothing
    assert "not known: another user&#x27;s" in nothing
    host = HostMemory(
        total_bytes=8 * GIB,
        available_bytes=6 * GIB,
        used_bytes=2 * GIB,
        free_bytes=GIB,
        swap_total_bytes=0,
        swap_used_bytes=0,
    )
    group = CgroupMemory(
        version=2, path="/pod", limit_bytes=4 * GIB, usage_bytes=GIB, working_set_bytes=None, oom_kills=None
    )
    text = tables.host_html(listing(host=host, cgroup=group, engines=[process(cgroup=group)]))
    for part in ("2.00 GiB used (25.0 %) of 8.00 GiB", "no swap", "1.00 GiB used (25.0 %)", "OOM kills not told"):
        assert part in text
    assert "512 MiB resident" in text


@pytest.mark.parametrize(
    ("kills", "words"), [(0, "0 OOM kills"), (1, "1 OOM kill "), (2, "2 OOM kills"), (None, "OOM kills not told")]
)
def test_kills_are_counted(kills: int | None, words: str) -> None:
    group = CgroupMemory(
        version=2, path="/pod", limit_bytes=None, usage_bytes=GIB, working_set_bytes=None, oom_kills=kills
    )
    assert words in tables.host_html(listing(cgroup=group))


@pytest.mark.parametrize(("expected", "words"), [(1, "1 of 1 device "), (2, "1 of 2 devices ")])
def test_devices_are_counted(expected: int, words: str) -> None:
    assert words in tables.devices_html(listing(device(), expected_devices=expected), LIGHT)


def process(**changes: Any) -> EngineProcess:
    fields: dict[str, Any] = {"engine_id": "vllm-7", "rank": "dp0.tp0.pp0", "pid": 11, "resident_bytes": GIB // 2}
    return EngineProcess(**{**fields, "cgroup": None, "reason": "", **changes})


def test_torchs_allocator_or_why_it_is_silent() -> None:
    one = TorchAllocator(
        device="0",
        reserved_bytes=GIB,
        live_bytes=GIB // 2,
        pending_bytes=None,
        free_bytes=GIB // 2,
        stuck_bytes=GIB // 4,
        requested_bytes=None,
        fragmentation_rate=0.5,
        retries=1,
        ooms=None,
    )
    told = EngineAllocator(engine_id="a", rank="dp0.tp0.pp0", backend="native", reason="", devices=[one])
    silent = EngineAllocator(engine_id="b", rank="dp1.tp0.pp0", backend="", reason="torch is not loaded", devices=[])
    text = tables.allocators_html([told, silent])
    assert "<td>1.00 GiB</td><td>512 MiB</td><td>—</td><td>512 MiB</td><td>256 MiB</td><td>0.500</td><td>1</td>" in text
    assert "b dp1.tp0.pp0" in text
    assert "torch is not loaded" in text
    assert "control socket" in tables.allocators_html([])


def test_files_hold_the_same_figures_and_no_markup_comes_through() -> None:
    found = listing(device(name=BAD, reason=BAD, slices=[device(gpu="MIG-1", memory=None, rows=None, processes=None)]))
    rows = tables.rows_of(found)
    assert sum(row["bytes"] for row in rows if row["gpu"] == "GPU-1" and row["what"] != "process") == 80 * GIB
    assert [row["bytes"] for row in rows if row["gpu"] == "MIG-1"] == [None]
    assert BAD not in tables.devices_html(found, LIGHT)
