"""The frame of a recording: a file of checksummed chunks, written one after the other and readable up to where it ends.

    FILE    magic (8 bytes), major, minor (16 bits each), 4 bytes of 0, then chunks
    CHUNK   CHUNK_HEAD, then `stored` bytes: the payload, deflated where that makes it smaller

All numbers are little-endian. A reader skips kinds that it does not know. A chunk at the very end of the file that is
cut short, or whose checksum is wrong, is what a writer left that was killed: it is dropped, and named. Anywhere else it
is damage, and an error.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from engine_shim.errors import KvatlasError, TraceError

MAGIC = b"KVATLREC"
MAJOR, MINOR = 1, 1  # 1.1: with devices
FILE_HEAD = struct.Struct("<8sHH4x")
CHUNK_MARK = b"KC"
# mark, kind, deflated?, bytes that follow, bytes of the payload, time in ns, CRC-32 of what follows, and of all these
CHUNK_HEAD = struct.Struct("<2sBBIIqII")
_CHECKED = CHUNK_HEAD.size - 4
COMPRESSION = 6
MAX_PAYLOAD = 1 << 30
"""A base of the largest pool that a map may have takes 18 bytes for each of 2**25 blocks, and its requests."""


class ChunkKind(IntEnum):
    """What a chunk holds; `contents` and `device_contents` have their layouts."""

    HEADER = 1
    SAMPLE = 2  # what changed since the last one
    BASE = 3  # a sample that says everything, so that a reader can begin there
    EVENTS = 4
    GAP = 5  # events that the ring had lost before they were read
    NOTE = 6
    END = 7
    DEVICES = 8  # what was told of devices and host, at the sample before


class RecordingError(TraceError):
    """A recording cannot be read, or a file is none; the text says where and what to do."""


class RecordingVersionError(RecordingError):
    """The recording needs a newer reader."""


class RecordingFull(KvatlasError):
    """A recording cannot go on: the disk is full, or fails. What was written before stays readable."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk lies. `time_ns` is on the recording's own time line, which never goes back."""

    kind: int
    offset: int
    stored: int
    size: int
    deflated: bool
    time_ns: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + CHUNK_HEAD.size + self.stored


class ChunkWriter:
    """Appends chunks to a file that is made anew, under `PART` of its name until `finish`."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError where the file, or what an earlier recorder left of it, is there already, and where it
        cannot be made."""
        self.path = path
        self.part = path.with_name(path.name + ".part")
        if os.path.lexists(path):
            raise RecordingError(f"{path} is there already; choose another name, or remove it")
        try:
            self._file = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise RecordingError(
                f"{self.part} is there already: another recorder writes it, or was killed; kvatlas replay reads it."
                " Choose another name, or move it away"
            ) from None
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error.strerror}") from error
        self.written_bytes = 0
        try:
            self._write(FILE_HEAD.pack(MAGIC, MAJOR, MINOR))
        except RecordingFull:
            os.close(self._file)
            self.part.unlink(missing_ok=True)
            raise

    def append(self, kind: ChunkKind, time_ns: int, payload: bytes) -> None:
        """One chunk, whole or not at all. Raises RecordingFull."""
        deflated = zlib.compress(payload, COMPRESSION)
        stored = deflated if len(deflated) < len(payload) else payload
        sizes = (len(stored), len(payload), time_ns, zlib.crc32(stored))
        head = CHUNK_HEAD.pack(CHUNK_MARK, kind, stored is deflated, *sizes, 0)[:_CHECKED]
        self._write(head + zlib.crc32(head).to_bytes(4, "little") + stored)

    def _write(self, data: bytes) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.write(self._file, view[done:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.written_bytes)
                os.lseek(self._file, self.written_bytes, os.SEEK_SET)
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
            raise RecordingFull(
                f"{self.part}: {why}; the {self.written_bytes:,} bytes before stay readable. Make room, and record anew"
            ) from error
        self.written_bytes += len(data)

    def discard(self) -> None:
        """Leave nothing behind."""
        os.close(self._file)
        self.part.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the file its name, and never another file's place. Raises RecordingError, the file then keeps `part`."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise RecordingFull(f"{self.part}: {error.strerror}; look at the disk") from error
        finally:
            os.close(self._file)
        try:
            os.link(self.part, self.path)
        except FileExistsError:
            raise RecordingError(f"{self.path} came to be meanwhile; the recording is {self.part}") from None
        except OSError:  # a file system without links
            if os.path.lexists(self.path):
                raise RecordingError(f"{self.path} came to be meanwhile; the recording is {self.part}") from None
            os.rename(self.part, self.path)
        else:
            os.unlink(self.part)


def is_recording(path: Path) -> bool:
    """Does a file begin as one? False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class ChunkFile:
    """A recording, open for reading; any thread may read."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError where it is none, RecordingVersionError where it needs a newer reader."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise RecordingError(f"{path} is no regular file")
            head = os.pread(self._file, FILE_HEAD.size, 0)
            if len(head) < FILE_HEAD.size or not head.startswith(MAGIC):
                raise RecordingError(f"{path} is no recording (wrong magic); kvatlas record makes one")
            _, major, minor = FILE_HEAD.unpack(head)
            if major != MAJOR:
                raise RecordingVersionError(
                    f"{path} is a recording of version {major}.{minor}; this reader knows {MAJOR}.x. Update kvatlas"
                )
        except BaseException:  # raised again, with the file closed
            os.close(self._file)
            raise
        self.torn = ""  # what was dropped at the end of the file, once `places` has been through

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def places(self, offset: int = FILE_HEAD.size) -> Iterator[ChunkPlace]:
        """The chunks from `offset` on, without their payloads. Raises RecordingError where one is damaged."""
        size = os.fstat(self._file).st_size
        self.torn = ""
        while offset < size:
            raw = os.pread(self._file, CHUNK_HEAD.size, offset)
            if len(raw) < CHUNK_HEAD.size:
                self.torn = f"the last {size - offset} bytes, at {offset}, are the beginning of a chunk and are dropped"
                return
            mark, kind, deflated, stored, payload, time_ns, checksum, own = CHUNK_HEAD.unpack(raw)
            if mark != CHUNK_MARK or own != zlib.crc32(raw[:_CHECKED]) or payload > MAX_PAYLOAD:
                if self._zeros(offset, size):  # a machine that went down may leave the room without the contents
                    self.torn = f"the last {size - offset} bytes, at {offset}, are zeros and are dropped"
                    return
                raise RecordingError(f"{self.path} is damaged at byte {offset}: no chunk begins there")
            place = ChunkPlace(kind, offset, stored, payload, bool(deflated), time_ns, checksum)
            if place.end > size:
                self.torn = f"the last chunk, at byte {offset}, is cut short and is dropped"
                return
            if place.end == size and zlib.crc32(self._stored(place)) != checksum:
                self.torn = f"the last chunk, at byte {offset}, has a wrong checksum and is dropped"
                return
            yield place
            offset = place.end

    def read(self, place: ChunkPlace) -> bytes:
        """The payload of a chunk. Raises RecordingError where it is damaged."""
        stored = self._stored(place)
        if zlib.crc32(stored) != place.checksum:
            raise RecordingError(f"{self.path} is damaged at byte {place.offset}: a chunk has a wrong checksum")
        if not place.deflated:
            payload = stored
        else:
            inflate = zlib.decompressobj()
            try:
                payload = inflate.decompress(stored, place.size + 1)  # no more than it claims: a bomb ends here
            except zlib.error as error:
                raise RecordingError(f"{self.path} is damaged at byte {place.offset}: {error}") from error
        if len(payload) != place.size:
            raise RecordingError(f"{self.path} is damaged at byte {place.offset}: a chunk is not as long as it says")
        return payload

    def _stored(self, place: ChunkPlace) -> bytes:
        data = os.pread(self._file, place.stored, place.offset + CHUNK_HEAD.size)
        while len(data) < place.stored:
            more = os.pread(self._file, place.stored - len(data), place.offset + CHUNK_HEAD.size + len(data))
            if not more:
                raise RecordingError(f"{self.path} was cut short while it was read")
            data += more
        return data

    def _zeros(self, offset: int, size: int) -> bool:
        while offset < size:
            data = os.pread(self._file, 1 << 20, offset)
            if not data or data.strip(b"\0"):
                return not data
            offset += len(data)
        return True
