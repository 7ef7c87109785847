"""Where maps live: the folder that a writer uses, and every folder that an agent looks in."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SHARED_FOLDER = Path("/run/kvatlas")
MEMORY_FOLDER = Path("/dev/shm")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_OF_A_USER = re.compile("kvatlas-[0-9]+")  # as _user_folder makes; the demo has scratch folders of similar names


@dataclass(frozen=True, slots=True)
class WriterFolder:
    """The folder that this process should write maps to, and what an operator should know about the choice."""

    path: Path
    warning: str  # "" where the folder is in memory


def map_folders(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Every folder where a writer of this host may have put its map, most likely first; they need not exist.

    With KVATLAS_DIR set, that folder alone (several may be given, separated by colons).
    """
    configured = _configured(environment)
    if configured:
        return configured
    folders = [SHARED_FOLDER]
    if MEMORY_FOLDER.is_dir():
        folders += _user_folders(MEMORY_FOLDER) or [_user_folder(MEMORY_FOLDER)]
    folders += _user_folders(_temporary_folder(environment))
    return tuple(dict.fromkeys(path for path in folders if path == SHARED_FOLDER or not path.is_file()))


def writer_folder(environment: Mapping[str, str] = os.environ) -> WriterFolder:
    """KVATLAS_DIR where set; else /run/kvatlas if it is in memory and writable, else a folder of this user's.

    A map on a disk costs the engine page writes at the kernel's leisure, so such a choice carries a warning.
    """
    configured = _configured(environment)
    if configured:
        return WriterFolder(configured[0], _disk_warning(configured[0]))
    if is_in_memory(SHARED_FOLDER) and os.access(SHARED_FOLDER, os.W_OK | os.X_OK):
        return WriterFolder(SHARED_FOLDER, "")
    if is_in_memory(MEMORY_FOLDER) and os.access(MEMORY_FOLDER, os.W_OK | os.X_OK):
        return WriterFolder(_user_folder(MEMORY_FOLDER), "")
    fallback = _user_folder(_temporary_folder(environment))
    return WriterFolder(fallback, _disk_warning(fallback))


def is_in_memory(path: Path) -> bool:
    """Does `path`, or the nearest parent that exists, lie on a memory file system? False where that is unknown."""
    return file_system(path) in MEMORY_FILE_SYSTEMS


def file_system(path: Path) -> str:
    """Type of the file system under `path` or its nearest parent that exists; "" where the kernel does not tell.

    Python has no statfs; mountinfo names the same type. The device number picks the mount, which is right for
    bind mounts as well.
    """
    probe = path
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    try:
        device = probe.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    except (OSError, IndexError):
        return ""
    return ""


def _configured(environment: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(Path(part) for part in environment.get("KVATLAS_DIR", "").split(":") if part)


def _user_folder(parent: Path) -> Path:
    return parent / f"kvatlas-{os.getuid()}"


def _user_folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("kvatlas-*") if _OF_A_USER.fullmatch(path.name))


def _temporary_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("TMPDIR") or tempfile.gettempdir())


def _disk_warning(path: Path) -> str:
    if is_in_memory(path):
        return ""
    kind = file_system(path) or "an unknown file system"
    return f"{path} lies on {kind}, not in memory; mount a tmpfs there or set KVATLAS_DIR to one"
