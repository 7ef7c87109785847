"""Real engine processes on devices of the stand-in: whose memory is whose, by pid and start time, by UUID."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent.devices.model import EngineHere
from agent.devices.processes import ProcessTable
from tests.agent.conftest import StartEngine
from tests.agent.devices.conftest import GIB, StartReader, gpu

UUIDS = ["GPU-00000000-aaaa-bbbb-cccc-000000000000", "GPU-00000001-aaaa-bbbb-cccc-000000000000"]
POOL: dict[str, Any] = {"medium": "cuda", "total_blocks": 1024, "block_bytes": 2**20}  # of 1 GiB


def rows(view: dict[str, Any], index: int) -> dict[str, int]:
    return {row["kind"]: row["bytes"] for row in view["devices"][index]["attribution"]["rows"]}


@pytest.mark.parametrize("named", [UUIDS[1], UUIDS[1].removeprefix("GPU-"), "GPU-00000001", ""])
def test_the_engine_is_found_by_uuid_and_by_process(
    start_reader: StartReader, driver: Path, start_engine: StartEngine, named: str
) -> None:
    """Its map may say index 0 in its own order; only the UUID counts, or, without one, where its process is."""
    engine = start_engine(gpu_uuids=[named] if named else [], **POOL)
    reader = start_reader(driver)
    mine, other = f"{engine.process.pid}:{3 * GIB}", f"1:{GIB // 2}"
    reader.script({"count": 2}, gpu(0, processes=other), gpu(1, processes=f"{mine},{other}"))
    reader("watch", timeout=30)
    view = reader("view", rounds=1)
    assert "kv_pool" not in rows(view, 0)
    found = rows(view, 1)
    assert found["kv_pool"] == GIB
    assert found["engine_other"] == 2 * GIB
    assert found["other_processes"] == GIB // 2
    assert found["unattributed"] == GIB // 2
    assert sum(found.values()) == 24 * GIB
    assert view["devices"][1]["engines"] == ["engine"]
    mine_first = sorted(view["devices"][1]["processes"], key=lambda one: -one["used_bytes"])
    assert [(one["pid"], one["engine_id"]) for one in mine_first] == [(engine.process.pid, "engine"), (1, "")]
    assert mine_first[0]["name"].startswith("python")
    (process,) = view["engines"]
    assert process["pid"] == engine.process.pid
    assert process["rss_bytes"] > 2**20
    metrics = {name for name, _, _ in view["metrics"]}
    assert {"kvatlas_gpu_memory_bytes", "kvatlas_host_memory_bytes", "kvatlas_engine_process_memory_bytes"} <= metrics


def test_without_its_process_in_the_list_the_rest_is_unattributed(
    start_reader: StartReader, driver: Path, start_engine: StartEngine
) -> None:
    start_engine(gpu_uuids=[UUIDS[0]], **POOL)
    reader = start_reader(driver)
    reader.script({"count": 1}, gpu(0, used=20 * GIB, free=GIB, reserved=3 * GIB))
    reader("watch", timeout=30)
    view = reader("view", rounds=1)
    assert rows(view, 0) == {
        "kv_pool": GIB,
        "other_processes": 0,
        "reserved": 3 * GIB,
        "unattributed": 19 * GIB,
        "free": GIB,
    }
    assert "not visible" in view["devices"][0]["attribution"]["notes"][0]


def test_an_engine_on_the_second_of_two_slices_of_one_instance(
    start_reader: StartReader, driver: Path, start_engine: StartEngine
) -> None:
    engine = start_engine(gpu_uuids=["MIG-1"], **POOL)
    reader = start_reader(driver)
    keys: dict[str, object] = {
        "gpu0.mig": 1,
        "gpu0.slices": 2,
        "gpu0.mig1.processes": f"{engine.process.pid}:{2 * GIB}",
    }
    for number in range(2):
        facts = {"uuid": f"MIG-{number}", "instance": 5, "total": 10 * GIB, "used": 3 * GIB, "free": 7 * GIB}
        keys |= {f"gpu0.mig{number}.{key}": value for key, value in facts.items()}
    reader.script({"count": 1}, gpu(0), keys)
    reader("watch", timeout=30)
    first, second = reader("view", rounds=1)["devices"][0]["slices"]
    assert {row["kind"]: row["bytes"] for row in first["attribution"]["rows"]} == {
        "kv_pool": GIB,
        "engine_other": GIB,
        "other_processes": 0,
        "reserved": 0,
        "unattributed": GIB,
        "free": 7 * GIB,
    }
    assert second["attribution"] is None


def test_an_engine_that_ended_holds_nothing(start_reader: StartReader, driver: Path, start_engine: StartEngine) -> None:
    engine = start_engine(gpu_uuids=[UUIDS[0]], **POOL)
    reader = start_reader(driver)
    reader.script({"count": 1}, gpu(0))
    reader("watch", timeout=30)
    assert reader("view", rounds=1)["devices"][0]["engines"] == ["engine"]
    engine.kill()
    deadline = time.monotonic() + 120
    while (view := reader("view", rounds=1))["devices"][0]["engines"]:
        assert time.monotonic() < deadline
    assert "kv_pool" not in rows(view, 0)
    assert view["engines"] == []


def test_a_pid_joins_only_with_its_start_time() -> None:
    table = ProcessTable(monotonic=time.monotonic)
    mine = table.look(os.getpid())
    assert mine is not None
    assert mine.parent == os.getppid()
    here = EngineHere("engine", "r", os.getpid(), mine.start_ticks, (), "cuda", 0)
    assert table.engine(here) == mine
    # The same pid of another process, as namespaces have them.
    assert table.engine(EngineHere("other", "r", os.getpid(), mine.start_ticks + 1, (), "cuda", 0)) is None


def test_a_worker_belongs_to_the_engine_that_started_it() -> None:
    table = ProcessTable(monotonic=time.monotonic)
    mine = table.look(os.getpid())
    assert mine is not None
    engine = EngineHere("engine", "r", os.getpid(), mine.start_ticks, (), "cuda", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        assert table.owner(worker.pid, [(engine, mine)]) == engine
        assert table.owner(os.getppid(), [(engine, mine)]) is None
        worker.communicate(b"\n")
    assert table.owner(worker.pid, [(engine, mine)]) is None  # it is gone


def test_a_process_is_found_under_the_pid_that_this_namespace_gives_it(tmp_path: Path) -> None:
    """As /proc shows a container's process to the host: NSpid ends with the pid inside."""
    folder = tmp_path / "4711"
    folder.mkdir()
    fields = ["S", "1", *["0"] * 17, "555", "0", "10", *["0"] * 20]
    (folder / "stat").write_text(f"4711 (an (odd) name) {' '.join(fields)}\n")
    (folder / "status").write_text("Name:\tpython\nNSpid:\t4711\t7\n")
    now = [0.0]
    table = ProcessTable(monotonic=lambda: now[0], proc=tmp_path)
    engine = EngineHere("engine", "r", 7, 555, (), "cuda", 0)
    found = table.engine(engine)
    assert found is not None
    assert (found.pid, found.innermost_pid, found.start_ticks) == (4711, 7, 555)
    assert found.rss_bytes == 10 * os.sysconf("SC_PAGE_SIZE")
    assert table.engine(EngineHere("engine", "r", 7, 556, (), "cuda", 0)) is None
    assert not table.sees_all  # a /proc without its own namespaces tells nothing of them
    (folder / "status").unlink()
    assert table.engine(engine) is None
