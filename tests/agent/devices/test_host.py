"""Limits of control groups, of both versions, from trees as the kernel shows them and from this machine's own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agent.devices.host import cgroup_memory, host_memory
from agent.devices.nvml import meminfo


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machines_memory() -> None:
    memory = host_memory()
    assert memory.total_bytes == psutil.virtual_memory().total
    assert 0 < memory.available_bytes <= memory.total_bytes
    told = meminfo()
    assert told is not None
    assert told[0] == memory.total_bytes


def test_this_process_has_a_group_where_the_machine_counts_memory() -> None:
    """Version 1 here, 2 there; in a machine without either the reason is an error of the file system's."""
    with suppress(FileNotFoundError):
        assert cgroup_memory(os.getpid()).usage_bytes > 0


def test_version_2_takes_the_tightest_limit_above(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/7/cgroup": "0::/kube/pod/box\n",
            "sys/fs/cgroup/memory.stat": "anon 1\n",  # the root has no limit and no usage
            "sys/fs/cgroup/kube/memory.max": "max\n",
            "sys/fs/cgroup/kube/memory.current": "9000\n",
            "sys/fs/cgroup/kube/pod/memory.max": "8192\n",
            "sys/fs/cgroup/kube/pod/memory.current": "5000\n",
            "sys/fs/cgroup/kube/pod/memory.stat": "anon 10\ninactive_file 1000\n",
            "sys/fs/cgroup/kube/pod/memory.events": "low 0\noom_kill 3\n",
            "sys/fs/cgroup/kube/pod/box/memory.max": "16384\n",
            "sys/fs/cgroup/kube/pod/box/memory.current": "4000\n",
        },
    )
    group = cgroup_memory(7, root=tmp_path)
    assert (group.version, group.limit_bytes, group.usage_bytes) == (2, 8192, 5000)
    assert (group.working_set_bytes, group.oom_kills) == (4000, 3)
    assert group.path == "/kube/pod/box"


def test_version_2_inside_a_container_shows_its_own_group_at_the_top(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": "4096\n",
            "sys/fs/cgroup/memory.current": "100\n",
        },
    )
    group = cgroup_memory(root=tmp_path)
    assert (group.limit_bytes, group.usage_bytes, group.working_set_bytes) == (4096, 100, None)


@pytest.mark.parametrize(("text", "limit"), [("9223372036854771712", None), ("1073741824", 1073741824)])
def test_version_1_and_its_word_for_no_limit(tmp_path: Path, text: str, limit: int | None) -> None:
    base = "sys/fs/cgroup/memory/docker/abc/"
    write(
        tmp_path,
        {
            "proc/7/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
            base + "memory.limit_in_bytes": text + "\n",
            base + "memory.usage_in_bytes": "5000\n",
            base + "memory.stat": "total_inactive_file 2000\n",
            base + "memory.oom_control": "oom_kill_disable 0\noom_kill 1\n",
        },
    )
    group = cgroup_memory(7, root=tmp_path)
    assert (group.version, group.limit_bytes, group.working_set_bytes, group.oom_kills) == (1, limit, 3000, 1)


def test_what_is_not_there_or_not_a_number_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup_memory(7, root=tmp_path)
    write(tmp_path, {"proc/7/cgroup": "0::/a\n"})
    with pytest.raises(FileNotFoundError, match="no memory controller"):
        cgroup_memory(7, root=tmp_path)
    write(tmp_path, {"sys/fs/cgroup/a/memory.current": "plenty\n"})
    with pytest.raises(ValueError, match="plenty"):
        cgroup_memory(7, root=tmp_path)
