"""How a map's file comes to be and to be one writer's alone: room taken, lock held, name given last."""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from engine_shim import layout
from engine_shim.errors import MapBusy, MapSpaceError, MapUnavailable

MODE = 0o640

FileId = tuple[int, int]
"""Device and inode."""


def writer_holds(file: int) -> bool:
    """Does another process hold the writer's lock on this open file? One's own lock is not seen."""
    # struct flock on 64-bit Linux: l_type, l_whence, padding, l_start, l_len, l_pid, padding
    asked = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    return bool(struct.unpack("hhxxxxqqixxxx", answer)[0] != fcntl.F_UNLCK)


def file_id(status: os.stat_result) -> FileId:
    """What names a file whatever its path."""
    return status.st_dev, status.st_ino


def make_folder(folder: Path) -> Path:
    """Make the folder where it is not there, and resolve it. Raises MapSpaceError."""
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        return folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise MapSpaceError(f"{folder}: cannot make an allocation map here ({error}); set KVATLAS_DIR") from error


def refuse_own(path: Path, own: Collection[FileId]) -> None:
    """Raise MapBusy where `path` is one of the maps that this process writes itself.

    POSIX locks do not keep a process from itself, and opening and closing its own map would drop its lock.
    """
    try:
        taken = file_id(os.stat(path, follow_symlinks=False))
    except OSError:
        return
    if taken in own:
        raise MapBusy(f"{path}: this process writes that map already; give the engine another id or pool name")


def make_file(path: Path, size: int) -> tuple[int, str]:
    """A locked file of `size` bytes with its room really taken, and its temporary name.

    The name is "" where the file system can do without one: a process killed before the map is complete then leaves
    nothing behind.
    """
    folder = path.parent
    temporary = ""
    try:
        try:
            os.stat("/proc/self/fd")  # by which such a file gets its name
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
        except OSError:
            file, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=folder)
    except OSError as error:
        raise MapSpaceError(
            f"{folder}: cannot make an allocation map here ({error.strerror}); set KVATLAS_DIR"
        ) from error
    try:
        # Sizing alone would succeed on a full tmpfs and kill the engine with SIGBUS at the first store.
        os.posix_fallocate(file, 0, size)
        os.fchmod(file, MODE)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError as error:
        os.close(file)
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        raise MapSpaceError(
            f"{folder}: no room for an allocation map of {size / 2**20:.1f} MiB ({error.strerror}); enlarge that file "
            "system, set KVATLAS_DIR to another folder, or keep fewer columns"
        ) from error
    return file, temporary


def take_name(file: int, temporary: str, path: Path) -> None:
    """Give the finished file its name, unless a live writer, or a file that is no map, has it."""
    for _ in range(10):
        try:
            _link(file, temporary, path)  # atomic, and refuses where the name is taken
        except FileExistsError:
            pass
        except OSError as error:
            raise MapSpaceError(f"{path}: cannot be given its name ({error.strerror}); set KVATLAS_DIR") from error
        else:
            if temporary:
                os.unlink(temporary)
            return
        if _replace(file, temporary, path):
            return
    raise MapUnavailable(f"{path}: its name changes hands too fast; give this engine another id")


def _link(file: int, temporary: str, path: Path) -> None:
    """Give an open file another name; one that has none yet is reached by its descriptor."""
    if temporary:
        os.link(temporary, path)
        return
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a folder given Python calls linkat and follows the link; without one it would link the link.
        os.link(str(file), path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def _replace(file: int, temporary: str, path: Path) -> bool:
    """Take the name of a dead writer's map; False where the name went away meanwhile."""
    try:
        old = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MapSpaceError(f"{path} is in the way ({error.strerror}); remove it or set KVATLAS_DIR") from error
    try:
        if os.pread(old, len(layout.MAGIC), 0) != layout.MAGIC:
            raise MapSpaceError(f"{path} is in the way and is no map; remove it or set KVATLAS_DIR")
        # Holding the old file's lock while replacing it keeps a second starter out.
        try:
            fcntl.lockf(old, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            raise MapBusy(f"{path}: another live engine writes that map; give this one another id") from error
        if file_id(os.fstat(old)) != file_id(os.stat(path, follow_symlinks=False)):
            return False
        if not temporary:
            temporary = str(path.with_name(f".{path.name}.{os.getpid()}.new"))
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            _link(file, "", Path(temporary))
        os.rename(temporary, path)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MapSpaceError(f"{path}: cannot be replaced ({error.strerror}); remove it or set KVATLAS_DIR") from error
    finally:
        os.close(old)
