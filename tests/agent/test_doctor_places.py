"""`kvatlas doctor` between containers: other users, process namespaces, small and read-only mounts, with real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.doctor_places import examine_folder, examine_maps
from agent.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
ENGINE_USER, AGENT_USER, GROUP = 2000, 10001, 3000
needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user and mount: run the tests as root"
)

# Everything is imported before the user changes: the checkout may be root's alone.
BECOME = """
import os, sys
user, groups = int(sys.argv[1]), [int(one) for one in sys.argv[2].split(",") if one]
def become():
    os.setgroups(groups); os.setgid(user); os.setuid(user)
"""
ENGINE = (
    BECOME
    + """
from pathlib import Path
from engine_shim import MapObserver, MapSpec
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.errors import KvatlasError
become()
spec = MapSpec(engine_id="engine", kind="mine", model="org/model", pool="kv", total_blocks=int(sys.argv[4]),
               block_tokens=16, block_bytes=4096, dtype="float16", medium="cuda")
try:
    writer = MapWriter.create(spec, Path(sys.argv[3]))
except KvatlasError as error:
    print("refused:", error, flush=True)
    sys.exit()
print(writer.path, flush=True)
sys.stdin.read()
"""
)
DOCTOR = (
    BECOME
    + """
import json
from pathlib import Path
from agent.config import load_settings
from agent.doctor import examine, to_json
settings = load_settings({"listen": "127.0.0.1:0", "devices": False}, environment={})
examine([Path("/proc/none")], settings)  # imports what is imported late
become()
print(json.dumps(to_json(examine([Path(sys.argv[3])], settings))))
"""
)


def shell(script: str, *arguments: str | Path, pid: bool = False) -> Any:
    """A Python script, in a namespace of processes of its own where wanted."""
    command: list[str | Path] = [sys.executable, "-c", script, *arguments]
    if pid:
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def shared() -> Iterator[Path]:
    """A volume as a kubelet makes it for a pod with an fsGroup."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-", dir="/dev/shm") as name:
        folder = Path(name)
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2777)
        yield folder


class Engine:
    """A writer of another user, in a namespace of processes of its own where wanted."""

    def __init__(self, folder: Path, *, groups: str = "", pid: bool = False, blocks: int = 64) -> None:
        arguments = (str(ENGINE_USER), groups, str(folder), str(blocks))
        self.process = shell(ENGINE, *arguments, pid=pid)
        self.said = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Any]:
    engines: list[Engine] = []

    def make(folder: Path, **options: Any) -> Engine:
        engines.append(Engine(folder, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.end()


def doctor(folder: Path, groups: Sequence[int] = (GROUP,), *, pid: bool = False) -> dict[str, dict[str, str]]:
    """What it says as the agent's user, by what was checked."""
    asked = shell(DOCTOR, str(AGENT_USER), ",".join(map(str, groups)), str(folder), pid=pid)
    out, _ = asked.communicate(timeout=300)
    return {one["check"]: one for one in json.loads(out)["findings"]}


ID = "engine.dp0.tp0.pp0.kv"


@needs_root
def test_the_group_of_the_volume_lets_another_user_s_agent_read(shared: Path, start: Any) -> None:
    engine = start(shared, groups=str(GROUP))
    assert engine.said == str(shared / f"{ID}.kvmap")
    assert Path(engine.said).stat().st_uid == ENGINE_USER
    found = doctor(shared)
    assert found[f"map {ID}"]["level"] == "ok"
    assert "its writer lives" in found[f"map {ID}"]["message"]


@needs_root
def test_an_agent_outside_that_group_is_told_what_to_set(shared: Path, start: Any) -> None:
    """The negative control of the one above."""
    start(shared, groups=str(GROUP))
    found = doctor(shared, groups=())
    assert "Permission denied" in found["map"]["message"]
    assert "fsGroup" in found["map"]["action"]
    assert f"group {GROUP}" in found["map"]["action"]


@needs_root
def test_a_folder_of_another_user_s_names_whose_it_is(shared: Path) -> None:
    shared.chmod(0o700)
    found = doctor(shared, groups=())[f"folder {shared}"]
    assert found["level"] == "warning"
    assert f"uid {AGENT_USER}" in found["message"]
    assert "belongs to uid 0" in found["message"]
    assert "--group-add" in found["action"]


@needs_root
@pytest.mark.parametrize("apart", [True, False])
def test_an_engine_in_another_namespace_of_processes_lives_and_its_process_is_out_of_sight(
    shared: Path, start: Any, apart: bool
) -> None:
    """Its lock tells that it lives, whatever its pid is called here."""
    start(shared, groups=str(GROUP), pid=apart)
    found = doctor(shared, pid=apart)
    assert "its writer lives" in found[f"map {ID}"]["message"]
    assert (f"process of {ID}" in found) is apart
    if apart:
        assert "shareProcessNamespace" in found[f"process of {ID}"]["action"]


MOUNTED = """
mount -t tmpfs -o mode=2777,gid=3000,size=$1 tmpfs "$2" && shift && shift && exec "$@"
"""


def in_a_mount(size: str, folder: Path, *command: str | Path) -> str:
    """What a command prints with a tmpfs of that size at `folder`, which is gone with it."""
    inside = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", size, folder, *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(inside, input="", capture_output=True, text=True, check=True, env=environment)
    return done.stdout


@needs_root
def test_a_map_that_does_not_fit_is_refused_with_what_to_do(shared: Path) -> None:
    """64 MiB, as /dev/shm has in a container: enough for a million blocks, and not for four."""
    for blocks, fits in ((1_000_000, True), (4_000_000, False)):
        said = in_a_mount(
            "64m", shared, sys.executable, "-c", ENGINE, str(ENGINE_USER), str(GROUP), shared, str(blocks)
        )
        assert said.startswith("refused") is not fits, said
        if not fits:
            assert "no room for an allocation map" in said
            assert "enlarge that file system, set KVATLAS_DIR" in said


@needs_root
def test_a_small_tmpfs_is_warned_of(shared: Path) -> None:
    said = in_a_mount("4m", shared, sys.executable, "-c", DOCTOR, str(AGENT_USER), str(GROUP), shared)
    found = {one["check"]: one for one in json.loads(said)["findings"]}[f"folder {shared}"]
    assert found["level"] == "warning"
    assert "4 MiB free of 4 MiB" in found["message"]
    assert "enlarge it" in found["action"]


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"
"""


@needs_root
def test_an_agent_reads_a_folder_that_is_mounted_read_only_and_an_engine_is_refused(shared: Path, start: Any) -> None:
    start(shared, groups=str(GROUP))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = []
    for script, more in ((DOCTOR, ()), (ENGINE, ("64",))):
        command = [sys.executable, "-c", script, str(AGENT_USER), str(GROUP), shared, *more]
        inside = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", shared, *command]
        done = subprocess.run(inside, input="", capture_output=True, text=True, check=True, env=environment)
        said.append(done.stdout)
    found = {one["check"]: one for one in json.loads(said[0])["findings"]}
    assert "mounted read-only: enough for an agent" in found[f"folder {shared}"]["message"]
    assert "its writer lives" in found[f"map {ID}"]["message"]
    assert said[1].startswith("refused")
    assert "Read-only file system" in said[1]
    assert "set KVATLAS_DIR" in said[1]


def test_a_folder_that_is_well_is_not_complained_of(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-", dir="/dev/shm") as name:
        assert examine_folder(Path(name)).level == "ok"
        assert [one.check for one in examine_maps([Path(name)])] == ["maps"]
    assert examine_folder(tmp_path / "nowhere").level == "note"
    (tmp_path / "file").touch()
    assert examine_folder(tmp_path / "file") == Finding(
        f"folder {tmp_path / 'file'}", "warning", "is no folder", "remove it, or set KVATLAS_DIR to another"
    )
