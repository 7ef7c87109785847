"""Where the control socket of a map is, how it comes to be there, and who may use it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine_shim.errors import ControlUnavailable, MapBusy
from engine_shim.layout import MAP_SUFFIX

SOCKET_SUFFIX = ".sock"
MODE = 0o660
MAX_ADDRESS_BYTES = 107  # sun_path has 108 with its final zero, see unix(7)
# So that the name after "/proc/self/fd/<up to 7 digits>/" always fits.
MAX_NAME_BYTES = MAX_ADDRESS_BYTES - 24
LOCK_SECONDS = 1.0
SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_MOST_GROUPS = 256  # Python's getsockopt returns at most 1024 bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel noted it when it connected. `groups` None: more than can be told."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the file that it was given."""

    socket: socket.socket
    path: Path
    device: int
    inode: int
    gid: int

    def current_gid(self) -> int:
        """The file's group now, which an operator may change; the first one where the file is not ours any more."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return self.gid
        return found.st_gid if (found.st_dev, found.st_ino) == (self.device, self.inode) else self.gid

    def remove(self) -> None:
        """Remove the file, unless it is another's by now."""
        with suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)


def socket_path(map_path: Path) -> Path:
    """The control socket of a map: its neighbour of the same name with `.sock`.

    A name too long for a socket address becomes a digest of itself. The folder plays no part in that, since engine and
    agent may see it at different places.
    """
    stem = map_path.name.removesuffix(MAP_SUFFIX)
    name = stem + SOCKET_SUFFIX
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = f"kvatlas-{hashlib.sha256(os.fsencode(stem)).hexdigest()[:32]}{SOCKET_SUFFIX}"
    return map_path.with_name(name)


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for bind and connect: the path, or where that is too long the same file by way of its open folder."""
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path, backlog: int) -> Listener:
    """A listening socket at `path`, non-blocking, mode 0660; what a dead engine left there is replaced.

    The file gets its name when it can be connected to, and never had a wider mode.

    Raises MapBusy where a live process listens there, ControlUnavailable where no socket can be made.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{SOCKET_SUFFIX}.new")
    with _locked(path.parent):
        _refuse_what_is_in_the_way(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            os.fchmod(listener.fileno(), MODE)  # bind gives the file this mode less the umask
            with socket_address(temporary) as address:
                listener.bind(address)
            try:
                os.chmod(temporary, MODE)
                listener.listen(backlog)
                made = os.lstat(temporary)
                os.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            listener.close()
            raise ControlUnavailable(
                f"{path}: no control socket can be made here ({error.strerror}); set KVATLAS_DIR to a folder that "
                "this process may write and that is on a local file system"
            ) from error
    return Listener(listener, path, made.st_dev, made.st_ino, made.st_gid)


def peer_of(connection: socket.socket) -> Peer:
    """Who connected. Raises OSError where the kernel does not tell."""
    pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):  # too many; a kernel before 4.13
            raise
        return Peer(pid, uid, gid, None)
    return Peer(pid, uid, gid, struct.unpack(f"{len(data) // 4}I", data))


def refusal(peer: Peer, *, own_uid: int, socket_gid: int) -> str:
    """Why this peer may not control the engine; "" where it may: same user, root, or in the socket's group."""
    if peer.uid in (own_uid, 0) or socket_gid == peer.gid or socket_gid in (peer.groups or ()):
        return ""
    unknown = "" if peer.groups is not None else " as far as the kernel tells"
    return (
        f"uid {peer.uid} may not control this engine: it is neither root nor uid {own_uid}, "
        f"and{unknown} not in the socket's group, gid {socket_gid}"
    )


def _refuse_what_is_in_the_way(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ControlUnavailable(f"{path}: {error.strerror}; set KVATLAS_DIR to another folder") from error
    if not stat.S_ISSOCK(mode):
        raise ControlUnavailable(f"{path} is in the way and no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, socket_address(path) as address:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return  # nobody listens: its engine has ended
        except OSError:  # a full backlog, or another user's
            pass
    raise MapBusy(f"{path}: a live engine listens there; give this one another id")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other starters out of the folder: looking at what is there and replacing it are two steps."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ControlUnavailable(f"{folder}: no control socket can be made here ({error.strerror})") from error
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ControlUnavailable(f"{folder} stays locked by another process ({error.strerror})") from error
                time.sleep(0.01)
        try:
            yield
        finally:
            # By name, not by closing: a child forked meanwhile holds the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)
