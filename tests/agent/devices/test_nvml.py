"""Devices through the real binding and a stand-in for the driver's library: every refusal is a state with a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.devices.conftest import GIB, StartReader, gpu


def states(reading: dict[str, Any]) -> list[str]:
    return [device["state"] for device in reading["devices"]]


def test_devices_are_read_with_their_identity_and_memory(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 2}, gpu(0, processes="77:1048576,78"), gpu(1))
    reading = reader("read")
    assert (reading["state"], reading["expected"], reading["driver_version"]) == ("ok", 2, "999.1")
    first = reading["devices"][0]
    assert (first["state"], first["reason"]) == ("ok", "")
    assert first["uuid"] == "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    assert first["bus_id"] == "00000000:00:00.0"
    memory = first["memory"]
    assert memory["source"] == "nvml v2"
    assert memory["total_bytes"] == memory["reserved_bytes"] + memory["used_bytes"] + memory["free_bytes"] == 24 * GIB
    listed = [(one["pid"], one["used_bytes"]) for one in first["processes"]]
    assert listed == [(77, 1048576), (78, None)]  # "not available" is not 2**64 - 1 bytes, nor none at all
    assert reading["devices"][1]["processes"] == []


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (9, "no_driver", "not loaded"),
        (4, "no_permission", "may not ask"),
        (18, "version_mismatch", "different versions"),
        (999, "degraded", "restart the container"),
        (12345, "failed", "12345"),
    ],
)
def test_a_library_that_does_not_start_is_a_state(
    start_reader: StartReader, driver: Path, code: int, state: str, text: str
) -> None:
    reader = start_reader(driver)
    reader.script({"count": 1, "nvmlInitWithFlags": code}, gpu(0))
    reading = reader("read")
    assert reading["state"] == state
    assert text in reading["reason"]
    assert reading["devices"] == []
    reader.script({"count": 1}, gpu(0))
    assert reader("read")["state"] == state  # not asked again at once
    reader("advance", seconds=60)
    assert reader("read")["state"] == "ok"


@pytest.mark.parametrize("content", [b"", b"no library at all" * 100])
def test_a_library_that_cannot_be_loaded_is_a_fault(start_reader: StartReader, tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libnvidia-ml.so.1").write_bytes(content)
    reading = start_reader(broken)("read")
    assert reading["state"] == "failed"
    assert "libnvidia-ml.so.1 is there and cannot be loaded" in reading["reason"]


def test_want_of_descriptors_is_no_fault_of_the_library() -> None:
    script = """
import os, resource
from agent.devices import nvml
nvml.LIBRARY = "libkvatlas-absent.so.1"
assert nvml._why_not_loaded() == ""
highest = max(int(one) for one in os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
while True:
    try:
        os.dup(0)
    except OSError:
        break
print(nvml._why_not_loaded())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "None"


def test_words_that_are_no_text_cost_one_device_its_name_alone(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script(
        {"count": 3, "nvmlDeviceGetHandleByIndex_v2.gpu1": 31337}, gpu(0), gpu(1), gpu(2, name="Te\x1b[31mst")
    )
    reading = reader("read")
    assert [one["state"] for one in reading["devices"]] == ["ok", "failed", "ok"]
    assert "without words: error 31337" in reading["devices"][1]["reason"]
    assert reading["devices"][2]["name"] == "Te?[31mst"


def test_without_a_library_there_are_no_devices_and_no_fault(start_reader: StartReader) -> None:
    reader = start_reader(None)
    reading = reader("read")
    assert reading["state"] == "no_library"
    assert "libnvidia-ml.so.1" in reading["reason"]
    reader("watch", timeout=30)
    view = reader("view", rounds=1)
    signals = {one["name"]: one["value"] for one in view["signals"]}
    assert list(signals) == ["nvml_failed", "host_memory_available_ratio"]
    assert signals["nvml_failed"] == 0.0  # known, so that a failure seen before is told as over
    assert not [name for name, _, _ in view["metrics"] if "gpu" in name or "nvml" in name]
    assert view["host"]["total_bytes"] > 0


def test_an_old_driver_tells_no_reserved_part(start_reader: StartReader, old_driver: Path) -> None:
    reader = start_reader(old_driver)
    reader.script({"count": 1}, gpu(0, processes="77:4096"))
    device = reader("read")["devices"][0]
    assert device["state"] == "ok"
    assert (device["memory"]["source"], device["memory"]["reserved_bytes"]) == ("nvml v1", None)
    assert device["memory"]["used_bytes"] == 4 * GIB + GIB // 2
    assert [one["pid"] for one in device["processes"]] == [77]
    assert device["mig"] is False


@pytest.mark.parametrize(
    ("function", "code", "state"),
    [
        ("nvmlDeviceGetHandleByIndex_v2.gpu3", 15, "lost"),
        ("nvmlDeviceGetUUID.gpu3", 15, "lost"),
        ("nvmlDeviceGetMemoryInfo_v2.gpu3", 15, "lost"),
        ("nvmlDeviceGetComputeRunningProcesses_v3.gpu3", 16, "reset_required"),
        ("nvmlDeviceGetMigMode.gpu3", 999, "degraded"),
        ("nvmlDeviceGetHandleByIndex_v2.gpu3", 4, "no_permission"),
    ],
)
def test_one_broken_device_leaves_the_others(
    start_reader: StartReader, driver: Path, function: str, code: int, state: str
) -> None:
    reader = start_reader(driver)
    all_well: list[dict[str, object]] = [{"count": 8}, *(gpu(index) for index in range(8))]
    reader.script(*all_well)
    assert states(reader("read")) == ["ok"] * 8
    reader.script(*all_well, {function: code})
    for _ in range(3):  # it stays so, also when a session is opened anew
        reading = reader("read")
        assert reading["state"] == "ok"
        assert reading["expected"] == 8
        assert states(reading) == ["ok"] * 3 + [state] + ["ok"] * 4
        lost = reading["devices"][3]
        assert lost["uuid"] == "GPU-00000003-aaaa-bbbb-cccc-000000000000"  # named though it does not answer
        assert lost["memory"] is None  # the last figures are not repeated
        assert lost["reason"]
        reader("advance", seconds=40)
    reader.script(*all_well)
    assert states(reader("read")) == ["ok"] * 8


def test_a_device_that_was_never_read_is_named_by_where_it_stands(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 2, "nvmlDeviceGetHandleByIndex_v2.gpu1": 15}, gpu(0), gpu(1))
    reader("watch", timeout=30)
    view = reader("view", rounds=1)
    lost = [one for one in view["signals"] if one["name"] == "device_lost"]
    assert [(one["labels"]["gpu"], one["value"]) for one in lost] == [
        ("GPU-00000000-aaaa-bbbb-cccc-000000000000", 0.0),
        ("index-1", 1.0),
    ]


def test_access_that_is_taken_away_is_told_once_and_comes_back(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 1}, gpu(0))
    for _ in range(50):
        assert reader("read")["state"] == "ok"
    reader.script({"count": 1, "nvmlDeviceGetCount_v2": 999, "nvmlInitWithFlags": 999}, gpu(0))
    for _ in range(3):
        reading = reader("read")
        assert reading["state"] == "degraded"
        assert "restart the container" in reading["reason"]
        assert states(reading) == ["degraded"]
        assert reading["devices"][0]["memory"] is None
    reader.script({"count": 1}, gpu(0))
    reader("advance", seconds=60)
    assert states(reader("read")) == ["ok"]


def test_devices_that_come_and_go(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 2}, gpu(0), gpu(1))
    assert states(reader("read")) == ["ok", "ok"]
    reader.script({"count": 1}, gpu(0, uuid="GPU-00000001-aaaa-bbbb-cccc-000000000000"))  # what is left moves down
    reader("nodes", names=[])
    reading = reader("read")
    assert states(reading) == ["ok", "gone"]
    assert [one["uuid"][:12] for one in reading["devices"]] == ["GPU-00000001", "GPU-00000000"]
    reader("advance", seconds=1000)
    assert states(reader("read")) == ["ok"]
    reader.script({"count": 2}, gpu(0), gpu(1))
    reader("nodes", names=["nvidia0", "nvidia1"])
    assert states(reader("read")) == ["ok", "ok"]


def test_a_refused_parent_is_read_by_its_slice(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    refused = {f"{name}.gpu0": 4 for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")}
    slice_keys = {
        "gpu0.slices": 7,
        "gpu0.mig2.uuid": "MIG-5b6c",
        "gpu0.mig2.instance": 3,
        "gpu0.mig2.total": 20937965568,
        "gpu0.mig2.used": 15064236032,
        "gpu0.mig2.free": 20937965568 - 15064236032,
    }
    reader.script({"count": 1, "nvmlDeviceGetMigMode.gpu0": 4}, refused, gpu(0), slice_keys)
    reader("watch", timeout=30)
    view = reader("view", rounds=1)
    parent = view["devices"][0]
    assert parent["sample"]["state"] == "no_permission"
    assert parent["attribution"] is None
    (child,) = parent["slices"]
    assert child["sample"]["uuid"] == "MIG-5b6c"
    assert child["sample"]["memory"]["used_bytes"] == 15064236032
    assert sum(row["bytes"] for row in child["attribution"]["rows"]) == 20937965568
    assert ["kvatlas_gpu_memory_bytes", {"gpu": "MIG-5b6c", "kind": "total"}, 20937965568.0] in view["metrics"]
    # And refused as well: still a state, and the process goes on.
    reader.script(
        {"count": 1, "nvmlDeviceGetMigMode.gpu0": 4},
        refused,
        gpu(0),
        slice_keys,
        {f"{name}.gpu0.mig2": 4 for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")},
    )
    view = reader("view", rounds=10)
    assert view["devices"][0]["slices"][0]["sample"]["state"] == "no_permission"


def test_slices_of_one_instance_share_its_memory(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    keys: dict[str, object] = {"gpu0.mig": 1, "gpu0.slices": 2}
    for number in range(2):
        keys |= {f"gpu0.mig{number}.{key}": value for key, value in (("instance", 5), ("total", 4096), ("free", 96))}
        keys |= {f"gpu0.mig{number}.uuid": f"MIG-{number}"}
    reader.script({"count": 1}, gpu(0), keys)
    reader("watch", timeout=30)
    parent = reader("view", rounds=1)["devices"][0]
    assert parent["attribution"] is None  # its slices have it
    assert [one["attribution"] is not None for one in parent["slices"]] == [True, False]


def test_a_device_that_shares_the_hosts_memory(start_reader: StartReader, driver: Path, proc: Path) -> None:
    (proc / "meminfo").write_text(
        "MemTotal:       127600748 kB\nMemFree:         1000000 kB\nMemAvailable:   118566368 kB\n"
    )
    reader = start_reader(driver)
    unsupported = {"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetMemoryInfo_v2": 3}
    reader.script({"count": 1}, unsupported, gpu(0, name="NVIDIA GB10"))
    device = reader("read")["devices"][0]
    assert device["state"] == "unified"
    memory = device["memory"]
    assert memory["source"] == "system"
    assert memory["total_bytes"] == 127600748 * 1024
    assert memory["free_bytes"] == 118566368 * 1024
    assert memory["used_bytes"] + memory["free_bytes"] == memory["total_bytes"]
    (proc / "meminfo").write_text("MemTotal: nonsense\n")
    device = reader("read")["devices"][0]
    assert (device["state"], device["memory"]) == ("not_supported", None)


def test_a_partly_refused_device_keeps_its_memory(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 1, "nvmlDeviceGetComputeRunningProcesses_v3": 4}, gpu(0))
    device = reader("read")["devices"][0]
    assert device["state"] == "partial"
    assert "nvmlDeviceGetComputeRunningProcesses_v3" in device["reason"]
    assert device["processes"] is None
    assert device["memory"]["total_bytes"] == 24 * GIB


def test_a_memory_of_no_bytes_is_not_believed(start_reader: StartReader, driver: Path, proc: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 1}, gpu(0, total=0, free=0, used=0, reserved=0))
    device = reader("read")["devices"][0]
    assert (device["state"], device["memory"]) == ("not_supported", None)


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2.gpu1"])
def test_a_call_that_hangs_holds_up_nothing_else(start_reader: StartReader, driver: Path, function: str) -> None:
    reader = start_reader(driver)
    all_well: list[dict[str, object]] = [{"count": 2}, gpu(0), gpu(1)]
    hangs_at_first = function == "nvmlInitWithFlags"
    if hangs_at_first:
        reader.script(*all_well, {function: "hang"})
    else:
        reader.script(*all_well)
    reader("watch", timeout=2.0)
    if not hangs_at_first:
        assert [one["sample"]["state"] for one in reader("view", rounds=1)["devices"]] == ["ok", "ok"]
        reader.script(*all_well, {function: "hang"})
    while (view := reader("now"))["nvml"]["state"] != "hung":
        assert view["nvml"]["state"] in ("ok", "starting")
    assert function.partition("WithFlags")[0].partition("_v2")[0] in view["nvml"]["reason"]
    assert view["host"]["total_bytes"] > 0  # read on another thread
    assert view["threads"] == ["devices", "nvml"]  # the one that is stuck, and no second
    if not hangs_at_first:
        assert [one["sample"]["state"] for one in view["devices"]] == ["degraded"] * 2
        assert [one["sample"]["memory"] for one in view["devices"]] == [None] * 2
        assert "GPU 1" in view["nvml"]["reason"]
    assert {one["name"]: one["value"] for one in view["signals"]}["nvml_failed"] == 1.0
    reader.script(*all_well)  # lets the call come back
    while reader("now")["nvml"]["state"] != "ok":
        pass
    reader.script(*all_well, {function: "hang"})  # and ends all the same while one hangs


def test_a_hang_is_not_forgotten_by_asking_again(start_reader: StartReader, driver: Path) -> None:
    reader = start_reader(driver)
    reader.script({"count": 1, "nvmlDeviceGetCount_v2": "hang"}, gpu(0))
    reader("watch", timeout=2.0)
    while reader("now")["nvml"]["state"] != "hung":
        pass
    ages = [float(re.findall(r"for (\d+) s", reader("now")["nvml"]["reason"])[0]) for _ in range(3)]
    assert ages == sorted(ages)
    assert reader("now")["threads"] == ["devices", "nvml"]
