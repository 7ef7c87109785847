"""Which maps there are: looks into the folders where writers put them, and names what it may not read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine_shim.layout import MAGIC, MAP_SUFFIX

MAX_MAPS = 1024


@dataclass(frozen=True, slots=True)
class FoundMap:
    """A file that is a map by name and by magic. `inode` changes when a writer replaces the file."""

    id: str  # the file's name less its suffix
    path: Path
    inode: tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look into the folders found."""

    maps: tuple[FoundMap, ...]
    unreadable: tuple[str, ...]  # folders and files with the suffix of maps that cannot be read, with the reason


def scan(folders: Iterable[Path], known: frozenset[tuple[int, int]] = frozenset()) -> Scan:
    """List the maps in `folders`; files of `known` inodes are not opened again. Never writes, never removes.

    A folder that does not exist is no error: a writer may make it later. A file without the suffix is not looked at,
    and one without the magic is named and left alone, whatever its size.
    """
    maps: list[FoundMap] = []
    unreadable: list[str] = []
    for folder in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(MAP_SUFFIX))
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append(f"{folder}: {error.strerror}")
            continue
        for name in names:
            path = folder / name
            try:
                status = path.stat()
                inode = (status.st_dev, status.st_ino)
                if inode not in known and _first_bytes(path) != MAGIC:
                    unreadable.append(f"{path}: not an allocation map (wrong magic)")
                    continue
            except FileNotFoundError:
                continue  # its writer ended between the listing and the look
            except OSError as error:
                unreadable.append(f"{path}: {error.strerror}")
                continue
            if len(maps) >= MAX_MAPS:
                unreadable.append(f"{path}: left out, {MAX_MAPS} maps are followed already")
                continue
            maps.append(FoundMap(name.removesuffix(MAP_SUFFIX), path, inode))
    return Scan(tuple(maps), tuple(unreadable))


def _first_bytes(path: Path) -> bytes:
    # O_NONBLOCK: a pipe with the suffix of a map must not hold the agent up.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, len(MAGIC))
    finally:
        os.close(descriptor)
