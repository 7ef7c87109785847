"""A real agent beside a real engine process: devices and allocators over HTTP, in the metrics and at the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.cli import main
from agent.client import AgentClient
from tests.agent.conftest import Agent, StartAgent
from tests.agent.devices.conftest import GIB, ROOT, gpu

MIB = 2**20
UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
ClientOf = Callable[[Agent], AgentClient]


@pytest.fixture
def engine(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("allocator_engine.py"), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process
    process.communicate()


@pytest.fixture
def with_driver(tmp_path: Path, driver: Path, engine: subprocess.Popen[str]) -> dict[str, str]:
    """The environment of an agent that sees one GPU, on which the engine's process holds 3 GiB."""
    script = tmp_path / "script"
    keys = {"count": 1, **gpu(0, processes=f"{engine.pid}:{3 * GIB}")}
    script.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
    return {"LD_LIBRARY_PATH": str(driver), "FAKE_NVML": str(script)}


def test_devices_and_allocators_are_served(
    start_agent: StartAgent, client_of: ClientOf, with_driver: dict[str, str], wait_until: Callable[..., Any]
) -> None:
    agent = start_agent("--devices-seconds", "0.5", environment=with_driver)
    client = client_of(agent)
    told = wait_until(lambda: (one := client.devices()).devices and one.allocators and one.devices[0].engines and one)
    assert (told.nvml, told.driver_version, told.expected_devices) == ("ok", "999.1", 1)
    (device,) = told.devices
    assert device.gpu == UUID
    assert device.rows is not None
    assert {row.kind: row.bytes for row in device.rows} == {
        "kv_pool": GIB,
        "engine_other": 2 * GIB,
        "other_processes": 0,
        "reserved": GIB // 2,
        "unattributed": GIB,
        "free": 24 * GIB - 4 * GIB - GIB // 2,
    }
    assert device.processes is not None
    assert [(one.engine_id, one.used_bytes) for one in device.processes] == [("engine", 3 * GIB)]
    assert told.host is not None
    (process,) = told.engines
    assert process.resident_bytes is not None
    (allocator,) = told.allocators
    assert (allocator.engine_id, allocator.backend, allocator.reason) == ("engine", "native", "")
    (cuda,) = allocator.devices
    assert (cuda.device, cuda.reserved_bytes, cuda.live_bytes) == ("0", 60 * MIB, 30 * MIB)
    assert (cuda.pending_bytes, cuda.free_bytes, cuda.stuck_bytes) == (4 * MIB, 26 * MIB, 20 * MIB)
    assert cuda.fragmentation_rate == pytest.approx(20 / 26)

    series = {
        (one.name, one.labels.get("kind", "")): one
        for family in text_string_to_metric_families(wait_until(lambda: scraped(agent)))
        for one in family.samples
    }
    assert series["kvatlas_gpu_memory_bytes", "kv_pool"].labels == {"gpu": UUID, "kind": "kv_pool"}
    assert series["kvatlas_gpu_memory_bytes", "kv_pool"].value == GIB
    kinds = [kind for name, kind in series if name == "kvatlas_gpu_memory_bytes" and kind != "total"]
    total = series["kvatlas_gpu_memory_bytes", "total"].value
    assert sum(series["kvatlas_gpu_memory_bytes", kind].value for kind in kinds) == total
    assert series["kvatlas_host_memory_bytes", "total"].value == told.host.total_bytes
    assert series["kvatlas_torch_allocator_bytes", "live"].value == 30 * MIB
    labels = {"engine_id": "engine", "model": "org/model", "rank": "dp0.tp0.pp0", "device": "0"}
    assert series["kvatlas_torch_allocator_fragmentation_ratio", ""].labels == labels


def scraped(agent: Agent) -> str:
    """/metrics once it has what devices tell: a text may be two seconds old."""
    with urllib.request.urlopen(f"{agent.url}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text if "kvatlas_torch_allocator_bytes" in text else ""


def test_an_agent_without_devices_says_that_they_are_off(
    start_agent: StartAgent, client_of: ClientOf, with_driver: dict[str, str], wait_until: Callable[..., Any]
) -> None:
    client = client_of(start_agent("--no-devices", environment=with_driver))
    told = wait_until(lambda: (one := client.devices()).age_seconds is not None and one)
    assert (told.nvml, told.devices) == ("off", [])
    assert told.host is not None


def test_a_driver_that_fails_is_said_and_keeps_nobody_from_the_agent(
    start_agent: StartAgent, client_of: ClientOf, with_driver: dict[str, str], wait_until: Callable[..., Any]
) -> None:
    Path(with_driver["FAKE_NVML"]).write_text("nvmlInitWithFlags=18\n")
    agent = start_agent("--devices-seconds", "0.5", environment=with_driver)
    client = client_of(agent)
    wait_until(lambda: client.devices().nvml == "version_mismatch")
    for route, expected in (("readyz", "ready; devices are not: "), ("healthz", "ok\n")):
        with urllib.request.urlopen(f"{agent.url}/{route}", timeout=60) as answer:
            assert answer.status == 200
            assert answer.read().decode().startswith(expected)


@pytest.mark.parametrize(
    ("script", "timeout_seconds", "texts"),
    [
        (
            "count=2\ngpu0.uuid=GPU-7\ngpu0.total=4096\nnvmlDeviceGetHandleByIndex_v2.gpu1=15\n",
            30,
            ("NVML sees 2 devices: GPU-7, index-1", "lost: nvmlDeviceGetHandleByIndex"),
        ),
        ("nvmlInitWithFlags=9\n", 30, ("NVML does not answer: nvmlInit: Driver Not Loaded",)),
        ("nvmlInitWithFlags=hang\n", 0.3, ("NVML has not answered in 0.3 s",)),
    ],
)
def test_the_doctor_examines_devices(
    tmp_path: Path, driver: Path, script: str, timeout_seconds: float, texts: tuple[str, ...]
) -> None:
    (tmp_path / "script").write_text(script)
    program = f"from agent.doctor import examine_devices; print(examine_devices({timeout_seconds}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_NVML": str(tmp_path / "script")},
        timeout=120,
        check=True,
    )
    assert all(text in done.stdout for text in texts), done.stdout


def test_the_command_reads_a_live_engine(
    engine: subprocess.Popen[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVATLAS_DIR", str(folder))
    assert main(["allocator", "engine", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["live_bytes"], facts["free_bytes"]) == (2 * MIB, 18 * MIB)
    assert not any("history" in one for one in facts["warnings"])
    assert main(["allocator", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
