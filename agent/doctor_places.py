"""What lies between an engine and the agent beside it: folders, users, mounts and namespaces, each with the fix."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.devices.model import EngineHere
from agent.devices.processes import ProcessTable
from agent.findings import Finding
from agent.sampling.discovery import name_some, scan
from engine_shim.allocation_map.folders import MEMORY_FOLDER, file_system, is_in_memory, writer_folder
from engine_shim.allocation_map.reader import MapReader
from engine_shim.control.peer import socket_path
from engine_shim.errors import KvatlasError
from engine_shim.snapshot import EngineIdentity

SMALL_BYTES = 64 * 2**20  # what a container has in /dev/shm where nobody said otherwise
LARGE_POOLS = "a map takes about 18 bytes a block and 4.6 MiB"


def examine_folder(folder: Path) -> Finding:
    """Whether this user can look for maps there, and whether an engine could write one."""
    name = f"folder {folder}"
    try:
        exists, is_folder = folder.exists(), folder.is_dir()
    except PermissionError:  # of a folder above it
        return Finding(name, "warning", f"may not be looked at by {who()}", how_to_read(folder))
    if not exists:
        return Finding(name, "note", "does not exist; a writer makes it where it may")
    if not is_folder:
        return Finding(name, "warning", "is no folder", "remove it, or set KVATLAS_DIR to another")
    if not os.access(folder, os.R_OK | os.X_OK):
        return Finding(name, "warning", f"may not be read by {who()}: it {owner(folder)}", how_to_read(folder))
    kind = file_system(folder) or "unknown"
    if not is_in_memory(folder):
        writable = "writable" if os.access(folder, os.W_OK) else "not writable by this user"
        return Finding(name, "warning", f"{kind}, not in memory; {writable}", "mount a tmpfs there")
    if is_read_only(folder):
        message = f"{kind}, mounted read-only: enough for an agent; an engine can write no map here"
        return Finding(name, "ok", message, "mount it writable in the engine's container")
    if not os.access(folder, os.W_OK):
        return Finding(name, "ok", f"{kind}, not writable by this user")
    usage = shutil.disk_usage(folder)
    if usage.free < SMALL_BYTES / 4:
        message = f"{kind}, writable, {usage.free / 2**20:,.0f} MiB free of {usage.total / 2**20:,.0f} MiB"
        return Finding(name, "warning", message, f"{LARGE_POOLS}; enlarge it, or set KVATLAS_DIR to another folder")
    return Finding(name, "ok", f"{kind}, writable")


def examine_writer() -> Finding:
    """Where an engine of this user would write."""
    chosen = writer_folder()
    if chosen.warning:
        return Finding("writer", "warning", chosen.warning, "set KVATLAS_DIR to a folder on a tmpfs")
    return Finding("writer", "ok", f"an engine of this user would write its map to {chosen.path}")


def examine_shared_memory() -> Finding:
    """How large /dev/shm is, which a container has little of."""
    if not MEMORY_FOLDER.is_dir():
        return Finding("shared memory", "note", f"{MEMORY_FOLDER} does not exist")
    usage = shutil.disk_usage(MEMORY_FOLDER)
    message = f"{MEMORY_FOLDER}: {usage.free / 2**20:,.0f} MiB free of {usage.total / 2**20:,.0f} MiB"
    if usage.total <= SMALL_BYTES:
        action = (
            f"{LARGE_POOLS}; for large pools give the container more (docker run --shm-size; in Kubernetes an emptyDir"
            " of medium Memory), or set KVATLAS_DIR to a larger tmpfs"
        )
        return Finding("shared memory", "warning", message, action)
    return Finding("shared memory", "ok", message)


def examine_maps(folders: Sequence[Path]) -> Iterator[Finding]:
    """Every map that is there: whether it can be read, whether its writer lives, and what of that is out of sight."""
    found = scan(folders)
    for line in name_some(found.unreadable, found.more):
        action = how_to_read(Path(line.rpartition(": ")[0])) if line.endswith("Permission denied") else "see the reason"
        yield Finding("map", "warning", line, action)
    for one in found.maps:
        try:
            reader = MapReader(one.path)
            try:
                alive, identity = reader.writer_alive(), reader.identity
            finally:
                reader.close()
        except (KvatlasError, OSError) as error:
            yield Finding(f"map {one.id}", "warning", str(error), "see the reason")
            continue
        message = f"{identity.model}, {identity.total_blocks:,} blocks, pid {identity.pid}"
        if not alive:
            action = "start that engine anew, or, where it is not to come again, remove its map"
            yield Finding(f"map {one.id}", "note", f"{message}: its writer is gone", action)
            continue
        yield Finding(f"map {one.id}", "ok", f"{message}, its writer lives")
        yield from _out_of_sight(one.id, one.path, identity)
    if not found.maps and not found.unreadable:
        action = "start an engine with the shim, or `kvatlas demo`; check KVATLAS_DIR on both sides"
        yield Finding("maps", "note", f"none found in {', '.join(map(str, folders))}", action)


def _out_of_sight(id: str, path: Path, identity: EngineIdentity) -> Iterator[Finding]:
    """What does not keep the agent from watching a live engine, and takes something from it all the same."""
    table = ProcessTable(monotonic=time.monotonic)
    rank = ""  # of no matter to where the process is
    engine = EngineHere(identity.engine_id, rank, identity.pid, identity.pid_start_ticks, (), identity.medium, 0)
    if table.engine(engine) is None:
        message = (
            f"pid {identity.pid} of its map is not visible here, as in a namespace of processes of its own: its pool is"
            " watched as ever, its memory, control group and share of the GPU are not known"
        )
        action = "to know them too, share the namespace: shareProcessNamespace: true in the pod, or docker run --pid"
        yield Finding(f"process of {id}", "note", message, action)
    control = socket_path(path)
    if control.exists() and not os.access(control, os.W_OK):
        message = f"{control} may not be used by {who()}, so that compaction cannot be asked for: it {owner(control)}"
        yield Finding(f"control of {id}", "note", message, how_to_read(control))


def how_to_read(path: Path) -> str:
    """What to do for this user to get at a path."""
    try:
        group = path.stat().st_gid
    except OSError:
        group = None
    named = "the group that owns it" if group is None else f"group {group}"
    return (
        f"run the agent as the engine's user or in {named} (docker run --group-add); in Kubernetes set"
        " securityContext.fsGroup of the pod, whose group the volume and what is made in it then have"
    )


def who() -> str:
    """This process's user and groups, as numbers: in a container they seldom have names."""
    groups = sorted({os.getegid(), *os.getgroups()})
    return f"uid {os.geteuid()} in groups {', '.join(map(str, groups))}"


def owner(path: Path) -> str:
    """Whose a path is, and who may what."""
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    return f"belongs to uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


def is_read_only(folder: Path) -> bool:
    """Is it mounted so that nobody can write here?"""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False
