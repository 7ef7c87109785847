"""Which maps there are: looks into the folders where writers put them, and names what it may not read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_shim.layout import MAGIC, MAP_SUFFIX

MAX_MAPS = 1024
MAX_NAMED = 64  # files that cannot be read; the others are counted
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FoundMap:
    """A file that is a map by name and by magic. `inode` changes when a writer replaces the file.

    `stamp` tells a file from a later one that got its inode, and a file that was completed from one that was not.
    """

    id: str  # the file's name less its suffix, as text that may go anywhere
    path: Path
    inode: tuple[int, int]  # device and inode
    stamp: tuple[int, int] = (0, 0)  # size and time of the last change, in bytes and nanoseconds


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look into the folders found."""

    maps: tuple[FoundMap, ...]
    unreadable: tuple[str, ...]  # folders and files with the suffix of maps that cannot be read, with the reason
    more: int = 0  # further ones


def scan(folders: Iterable[Path], known: frozenset[tuple[int, int]] = frozenset()) -> Scan:
    """List the maps in `folders`; files of `known` inodes are not opened again. Never writes, never removes.

    A folder that does not exist is no error: a writer may make it later. A file without the suffix is not looked at,
    and one without the magic is named and left alone, whatever its size. Links are not followed.
    """
    maps: list[FoundMap] = []
    unreadable: list[str] = []
    for folder in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(MAP_SUFFIX))
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append(f"{printable(folder)}: {error.strerror}")
            continue
        for name in names:
            path = folder / name
            try:
                status = path.lstat()
                inode = (status.st_dev, status.st_ino)
                fault = "" if inode in known else _fault(path, status)
            except FileNotFoundError:
                continue  # its writer ended between the listing and the look
            except OSError as error:
                fault = error.strerror or str(error)
            if not fault and len(maps) >= MAX_MAPS:
                fault = f"left out, {MAX_MAPS} maps are followed already"
            if fault:
                unreadable.append(f"{printable(path)}: {fault}")
                continue
            stamp = (status.st_size, status.st_mtime_ns)
            maps.append(FoundMap(printable(name.removesuffix(MAP_SUFFIX)), path, inode, stamp))
    return Scan(tuple(maps), tuple(unreadable[:MAX_NAMED]), max(0, len(unreadable) - MAX_NAMED))


def printable(text: object) -> str:
    """A name as text that may go into JSON, metrics and logs: what is not UTF-8 in it becomes `\\xNN`."""
    return _SURROGATE.sub(lambda found: _escape(ord(found[0])), str(text))


def name_some(lines: Sequence[str], more: int = 0) -> tuple[str, ...]:
    """The first MAX_NAMED lines, and how many there are beyond them, `more` included."""
    more += max(0, len(lines) - MAX_NAMED)
    return (*lines[:MAX_NAMED], f"and {more} more that cannot be read") if more else tuple(lines)


def _escape(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _fault(path: Path, status: os.stat_result) -> str:
    """Why this is no map; "" where it begins as one."""
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link, which is not followed"
    if stat.S_ISDIR(status.st_mode):
        return "Is a directory"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    # O_NONBLOCK and O_NOFOLLOW: what has come into its place meanwhile must neither hold the agent up nor lead it away.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return "" if os.read(descriptor, len(MAGIC)) == MAGIC else "not an allocation map (wrong magic)"
    finally:
        os.close(descriptor)
