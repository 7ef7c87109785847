"""The host's memory, and the memory limits that control groups set, of both versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import psutil

from agent.devices.model import CgroupMemory, HostMemory

# Version 1 says "no limit" as the largest multiple of a page in 63 bits; pages may be of 4 to 64 KiB.
_UNLIMITED = 2**63 - 65_536
_MAX_DEPTH = 64
_Reader = Callable[[Path], CgroupMemory | None]


def host_memory() -> HostMemory:
    """Of the whole machine. Raises OSError where /proc is not there, ValueError where it is not what it should be."""
    try:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    except (RuntimeError, KeyError, psutil.Error) as error:  # psutil's own, for files that lack what it looks for
        raise ValueError(f"/proc is not as expected: {error}") from error
    return HostMemory(
        total_bytes=memory.total,
        available_bytes=memory.available,
        used_bytes=memory.used,
        free_bytes=memory.free,
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
    )


def cgroup_memory(pid: int | str = "self", *, root: Path = Path("/")) -> CgroupMemory:
    """The tightest limit on the way from that process's group to the top, with what is used under it.

    `root` is where proc and sys are. Raises FileNotFoundError where no memory controller can be seen from here,
    PermissionError where it may not be read, ValueError where its files hold something else than numbers.
    """
    lines = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    unified = None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _tightest(root / "sys/fs/cgroup/memory", path, _read_v1)
        if not controllers:
            unified = path
    if unified is None:
        raise FileNotFoundError("this process is in no group that counts memory")
    return _tightest(root / "sys/fs/cgroup", unified, _read_v2)


def _tightest(mount: Path, path: str, read: _Reader) -> CgroupMemory:
    """The group and every one above it, as far as they can be seen; the least limit counts."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")][:_MAX_DEPTH]
    groups = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    # Inside a container the mount often shows its own group as the top, and the path is the host's.
    found = [told for group in groups if (told := read(group)) is not None]
    if not found:
        raise FileNotFoundError(f"no memory controller at {groups[0]}; it may not be mounted here")
    limited = [one for one in found if one.limit_bytes is not None]
    chosen = min(limited, key=lambda one: one.limit_bytes or 0) if limited else found[0]
    return replace(chosen, path=path)


def _read_v2(group: Path) -> CgroupMemory | None:
    usage = _number(group / "memory.current")
    if usage is None:
        return None  # the root group has no such file
    stat, events = _table(group / "memory.stat"), _table(group / "memory.events")
    return CgroupMemory(
        2,
        "",
        _number(group / "memory.max"),
        usage,
        max(0, usage - stat["inactive_file"]) if "inactive_file" in stat else None,
        events.get("oom_kill"),
    )


def _read_v1(group: Path) -> CgroupMemory | None:
    usage = _number(group / "memory.usage_in_bytes")
    if usage is None:
        return None
    limit = _number(group / "memory.limit_in_bytes")
    stat, events = _table(group / "memory.stat"), _table(group / "memory.oom_control")
    inactive = stat.get("total_inactive_file", stat.get("inactive_file"))
    return CgroupMemory(
        1,
        "",
        None if limit is None or limit >= _UNLIMITED else limit,
        usage,
        None if inactive is None else max(0, usage - inactive),
        events.get("oom_kill"),
    )


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file. Raises ValueError for anything else."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (NotADirectoryError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not what it should be") from error
    if text == "max":
        return None
    if not text.isdigit():
        raise ValueError(f"{path} holds {text[:40]!r}, which is no number")
    return int(text)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number; empty where the file is not to be had, since it only adds detail."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
