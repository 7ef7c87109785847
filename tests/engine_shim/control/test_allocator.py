"""What the control socket tells of torch's allocator, and why not, without an engine's thread and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_shim.control import allocator
from engine_shim.control.allocator import read_allocator
from engine_shim.control.messages import AllocatorReply, AllocatorRequest, ErrorReply, StatusReply, StatusRequest
from tests.engine_shim.control.conftest import Call, Serve
from tests.engine_shim.control.stand_in_torch import MIB, SEGMENTS, Cuda, torch_with


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({}, "torch is not loaded"),
        ({"torch": torch_with(Cuda([]), None)}, "built for the CPU"),
        ({"torch": torch_with(Cuda([], initialised=False))}, "has not initialised CUDA"),
        ({"torch": object()}, "torch is not loaded"),  # its import is under way, or broken
    ],
)
def test_where_there_is_no_allocator_the_reason_is_told(modules: dict[str, Any], reason: str) -> None:
    reply = read_allocator(modules)
    assert not reply.available
    assert reason in reply.reason
    assert reply.devices == {}


def test_statistics_of_devices_that_are_in_use() -> None:
    reply = read_allocator({"torch": torch_with(Cuda(SEGMENTS))})
    assert reply.available
    assert (reply.backend, reply.reason, reply.snapshot_file) == ("native", "", "")
    assert list(reply.devices) == ["0"]
    told = reply.devices["0"]
    assert isinstance(told, dict)
    assert set(told) == set(allocator.STATISTICS)
    assert (told["reserved_bytes"], told["live_bytes"], told["active_bytes"]) == (60 * MIB, 30 * MIB, 34 * MIB)
    assert (told["stuck_bytes"], told["retries"], told["ooms"]) == (20 * MIB, 2, 1)


def test_another_backend_is_said_so() -> None:
    reply = read_allocator({"torch": torch_with(Cuda(SEGMENTS, backend="cudaMallocAsync"))})
    assert "cudaMallocAsync" in reply.reason


def test_a_snapshot_is_light_and_stands_beside_the_map(tmp_path: Path) -> None:
    path = tmp_path / "engine.allocator.json"
    reply = read_allocator({"torch": torch_with(Cuda(SEGMENTS))}, path)
    assert (reply.snapshot_file, reply.snapshot_bytes) == (str(path), path.stat().st_size)
    assert path.stat().st_mode & 0o777 == 0o640
    (segment,) = json.loads(path.read_text())["segments"]
    assert segment["blocks"] == [
        {"size": 2 * MIB, "requested_size": 2 * MIB - 100, "state": "active_allocated"},
        {"size": 18 * MIB, "requested_size": 0, "state": "inactive"},
    ]
    assert "secret" not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_of_too_many_blocks_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "MAX_BLOCKS", 1)
    reply = read_allocator({"torch": torch_with(Cuda(SEGMENTS))}, tmp_path / "file")
    assert reply.available
    assert "2 blocks are more than 1" in reply.reason
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_leave_traces_out_makes_no_snapshot(tmp_path: Path) -> None:
    cuda = Cuda(SEGMENTS)
    vars(cuda)["memory_snapshot"] = lambda mempool_id=None: pytest.fail("it must not be asked")
    reply = read_allocator({"torch": torch_with(cuda)}, tmp_path / "file")
    assert "cannot leave traces out" in reply.reason
    assert reply.devices


def test_the_socket_answers_while_the_engine_takes_nothing(
    serve: Serve, call: Call, map_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an engine that hangs, and other requests go on while the allocator's lock is waited for."""
    cuda = Cuda(SEGMENTS)
    monkeypatch.setitem(sys.modules, "torch", torch_with(cuda))
    server, mailbox = serve()
    reply = call(server).say(AllocatorRequest(snapshot=True)).reply()
    assert isinstance(reply, AllocatorReply)
    beside = map_path.with_name("engine.dp0.tp0.pp0.kv.allocator.json")
    assert reply.snapshot_file == str(beside)
    assert not mailbox.pending()

    cuda.held.clear()
    waiting = call(server).say(AllocatorRequest())
    other = call(server).say(StatusRequest())
    status = StatusReply(moving=True, relocation=None, running=False, policy="", reason="")
    mailbox.answer(mailbox.next(), status)
    assert other.reply() == status
    assert call(server).say(AllocatorRequest()).error().error == "busy"
    cuda.held.set()
    assert isinstance(waiting.reply(), AllocatorReply)
    server.close()
    assert not beside.exists()


def test_whatever_torch_raises_is_a_failed_reply(serve: Serve, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(SEGMENTS)

    def fail(device: int) -> dict[str, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    vars(cuda)["memory_stats"] = fail
    monkeypatch.setitem(sys.modules, "torch", torch_with(cuda))
    server, _ = serve()
    error = call(server).say(AllocatorRequest()).error()
    assert isinstance(error, ErrorReply)
    assert (error.error, "illegal memory access" in error.message) == ("failed", True)
    del vars(cuda)["memory_stats"]
    assert isinstance(call(server).say(AllocatorRequest()).reply(), AllocatorReply)


def test_the_torch_of_this_environment_without_a_gpu_says_so(repository_root: Path) -> None:
    """The real module; in an environment with CUDA the reason is that it was not initialised."""
    program = (
        "import sys, torch; from engine_shim.control import allocator; print(allocator.read_allocator(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=repository_root, check=True
    )
    assert "available=False" in done.stdout
    assert "no CUDA allocator here" in done.stdout


@pytest.mark.gpu
def test_a_real_allocator_adds_up(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kept = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    reply = read_allocator(sys.modules, tmp_path / "snapshot.json")
    told = reply.devices[str(kept.device.index or 0)]
    assert isinstance(told, dict)
    reserved, active, live = (int(told[f"{name}_bytes"] or 0) for name in ("reserved", "active", "live"))
    assert reserved >= active >= live >= 3 * MIB
    assert reply.snapshot_file
