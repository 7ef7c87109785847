"""The writing end of an allocation map: creates the file, proves that it is the only writer, publishes."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.errors import MapBusy, MapSpaceError, MapUnavailable, SettingsError
from engine_shim.layout import HEADER, LIVE, REGION, Region
from engine_shim.snapshot import GroupEntry
from engine_shim.text import fit, safe_name

HEARTBEAT_SECONDS = 0.5
MODE = 0o640

_open_maps: weakref.WeakSet[MapWriter] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec:
    """What a map says about its engine, and how large its tables are. Numbers are of this rank."""

    engine_id: str
    kind: str
    model: str
    pool: str
    total_blocks: int
    block_tokens: int
    block_bytes: int
    dtype: str
    medium: str = "cpu"
    version: str = ""
    runner: str = ""
    policy: str = ""
    headroom_blocks: int = 0
    gpu_uuids: tuple[str, ...] = ()
    data_parallel: tuple[int, int] = (0, 1)  # rank, size
    tensor_parallel: tuple[int, int] = (0, 1)
    pipeline_parallel: tuple[int, int] = (0, 1)
    groups: tuple[GroupEntry, ...] = ()
    columns: tuple[str, ...] = tuple(layout.COLUMNS)
    owner_slots: int = 4096
    events_per_second: int = 50_000  # the ring holds at least two seconds of these

    def __post_init__(self) -> None:
        if not 1 <= self.total_blocks <= layout.MAX_BLOCKS:
            raise SettingsError(f"total_blocks={self.total_blocks} is outside 1..{layout.MAX_BLOCKS}")
        if not self.engine_id or not self.pool:
            raise SettingsError("an allocation map needs an engine_id and a pool name; one of them is empty")
        unknown = set(self.columns) - set(layout.COLUMNS)
        if unknown or "state" not in self.columns:
            raise SettingsError(f"columns must hold 'state' and otherwise come from {sorted(layout.COLUMNS)}")
        if not 1 <= self.owner_slots < 1 << layout.OWNER_SLOT_BITS:
            raise SettingsError(f"owner_slots={self.owner_slots} is outside 1..{(1 << layout.OWNER_SLOT_BITS) - 1}")

    @property
    def rank(self) -> str:
        """The rank part of the file's name."""
        return f"dp{self.data_parallel[0]}.tp{self.tensor_parallel[0]}.pp{self.pipeline_parallel[0]}"

    @property
    def file_name(self) -> str:
        return f"{safe_name(self.engine_id)}.{self.rank}.{safe_name(self.pool)}{layout.MAP_SUFFIX}"

    @property
    def event_slots(self) -> int:
        """A power of two, for two seconds at the declared rate."""
        return 1 << max(10, (2 * self.events_per_second - 1).bit_length())


class MapWriter:
    """One allocation map, held open by its only writer.

    Not thread-safe, apart from the heartbeat: all calls belong on the engine's own thread. After a fork the child's
    copy is off: it writes nothing, closes nothing and unlinks nothing.
    """

    def __init__(self, path: Path, file: int, memory: mmap.mmap, spec: MapSpec, regions: Sequence[Region]) -> None:
        self.path = path
        self.spec = spec
        self.created_unix_ns = 0
        self.active = True
        self._file = file
        self._memory: mmap.mmap | None = memory
        self._inode = os.fstat(file).st_ino
        self.live = _LiveWords(memory)
        self.columns: dict[str, NDArray[Any]] = {}
        self.tables: dict[str, NDArray[Any]] = {}
        for region in regions:
            view: NDArray[Any] = np.frombuffer(memory, region.dtype, region.count, region.offset)
            (self.columns if region.name in layout.COLUMNS else self.tables)[region.name] = view
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    @classmethod
    def create(cls, spec: MapSpec, folder: Path, *, clock_ns: Callable[[], int] = time.time_ns) -> MapWriter:
        """Make the map under a temporary name, fill it in, and give it its name when it is complete.

        Raises:
            MapSpaceError: the folder cannot be made or written, or has no room for the file.
            MapBusy: another live writer has this map, in this process or another.
        """
        path = folder / spec.file_name
        if any(writer.active and writer.path == path for writer in _open_maps):
            raise MapBusy(f"{path}: this process writes that map already; give the engine another id or pool name")
        regions, size = layout.place_regions(
            spec.total_blocks,
            columns=spec.columns,
            groups=len(spec.groups),
            owners=spec.owner_slots,
            events=spec.event_slots,
        )
        file, temporary = _make_file(folder, path.name, size)
        try:
            memory = mmap.mmap(file, size)
            writer = cls(path, file, memory, spec, regions)
            writer._fill_in(memory, regions, size, clock_ns())
            _take_name(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            os.close(file)
            raise
        _open_maps.add(writer)
        writer._heart = threading.Thread(target=writer._beat, args=(clock_ns,), name="kvatlas-heartbeat", daemon=True)
        writer._heart.start()
        return writer

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Everything stored within becomes visible at once. An error within leaves the map marked as torn for good."""
        word = self.live.sequence
        word[0] += 1
        yield
        word[0] += 1

    @contextmanager
    def segments_open(self, segments: NDArray[np.intp]) -> Iterator[None]:
        """Mark segments as being written; `segments` has no duplicates."""
        words = self.tables["segments"]
        words[segments] += 1
        yield
        words[segments] += 1

    def close(self, *, keep: bool = False) -> None:
        """Say goodbye and remove the map, or leave it as a black box. Idempotent; does nothing in a forked child."""
        if not self.active:
            return
        self.active = False
        self._stop.set()
        if self._heart is not None:
            self._heart.join(timeout=2 * HEARTBEAT_SECONDS)
        with self.publishing():
            self.live.flags[0] = int(self.live.flags[0]) | layout.FLAG_CLOSING
        if not keep:
            with suppress(OSError):
                if os.stat(self.path).st_ino == self._inode:
                    os.unlink(self.path)
        self.columns.clear()
        self.tables.clear()
        self.live = _LiveWords(bytearray(layout.live_offset() + LIVE.itemsize))
        if self._memory is not None:
            with suppress(BufferError):  # somebody still holds a view; the mapping then goes with the view
                self._memory.close()
        self._memory = None
        os.close(self._file)

    def _fill_in(self, memory: mmap.mmap, regions: Sequence[Region], size: int, now_ns: int) -> None:
        spec = self.spec
        header = np.zeros((), HEADER)
        header["magic"] = layout.MAGIC
        header["endian"] = layout.ENDIAN_MARK
        header["major"], header["minor"] = layout.MAJOR, layout.MINOR
        header["header_bytes"] = HEADER.itemsize
        header["live_offset"], header["live_bytes"] = layout.live_offset(), LIVE.itemsize
        header["region_offset"], header["region_count"] = layout.region_table_offset(), len(regions)
        header["region_entry_bytes"] = REGION.itemsize
        header["file_bytes"] = size
        header["incarnation"] = secrets.randbits(64)
        header["created_unix_ns"] = now_ns
        header["pid"], header["pid_start_ticks"] = os.getpid(), _own_start_ticks()
        header["segment_blocks"] = layout.SEGMENT_BLOCKS
        for name in ("total_blocks", "block_bytes", "block_tokens", "headroom_blocks"):
            header[name] = getattr(spec, name)
        for name in ("data_parallel", "tensor_parallel", "pipeline_parallel"):
            header[f"{name}_rank"], header[f"{name}_size"] = getattr(spec, name)
        for name in ("kind", "version", "runner", "engine_id", "model", "pool", "medium", "dtype"):
            header[name] = fit(getattr(spec, name), HEADER[name].itemsize)
        table = np.zeros(len(regions), REGION)
        for row, region in zip(table, regions, strict=True):
            row["name"] = region.name.encode()
            row["dtype"] = (region.dtype.str if region.dtype.names is None else "struct").encode()
            row["offset"], row["count"], row["item_bytes"] = region.offset, region.count, region.dtype.itemsize
        for row, group in zip(self.tables["groups"], spec.groups, strict=True):
            row["id"], row["kind"] = group.id, fit(group.kind, 16)
            row["block_tokens"], row["layers"] = group.block_tokens, group.layers
            row["window_tokens"], row["bytes_per_block"] = group.window_tokens, group.bytes_per_block
        if "group" in self.columns:
            self.columns["group"][:] = layout.NO_GROUP
        self.created_unix_ns = now_ns
        live = self.live
        live.state_counts[layout.BlockState.FREE] = spec.total_blocks
        live.heartbeat_unix_ns[0] = live.published_unix_ns[0] = live.last_step_unix_ns[0] = now_ns
        live.policy[0] = fit(spec.policy, 32)
        self.set_gpu_uuids(spec.gpu_uuids)
        start = layout.region_table_offset()
        memory[start : start + table.nbytes] = table.tobytes()
        memory[: HEADER.itemsize] = header.tobytes()

    def set_gpu_uuids(self, uuids: Sequence[str]) -> None:
        """Name the devices that hold the pool; a process may learn them late. More than MAX_GPUS are cut off."""
        for index, uuid in enumerate(uuids[: layout.MAX_GPUS]):
            self.live.gpu_uuids[index] = fit(uuid, 64)

    def _beat(self, clock_ns: Callable[[], int]) -> None:
        word = self.live.heartbeat_unix_ns
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if self.active:
                word[0] = clock_ns()


class _LiveWords:
    """Views of LIVE's fields; a store to an element of a number field is one aligned machine store."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.sequence = self._view(memory, "sequence")
        self.heartbeat_unix_ns = self._view(memory, "heartbeat_unix_ns")
        self.published_unix_ns = self._view(memory, "published_unix_ns")
        self.last_step_unix_ns = self._view(memory, "last_step_unix_ns")
        self.flags = self._view(memory, "flags")
        self.running_requests = self._view(memory, "running_requests")
        self.waiting_requests = self._view(memory, "waiting_requests")
        self.state_counts = self._view(memory, "state_counts")
        self.event_head = self._view(memory, "event_head")
        self.event_claim = self._view(memory, "event_claim")
        self.owner_rows = self._view(memory, "owner_rows")
        self.policy = self._view(memory, "policy")
        self.gpu_uuids = self._view(memory, "gpu_uuids")
        self.counters = self._view(memory, "counters")

    @staticmethod
    def _view(memory: mmap.mmap | bytearray, name: str) -> NDArray[Any]:
        kind, offset = LIVE.fields[name][:2]  # type: ignore[index]  # LIVE is structured
        count = int(np.prod(kind.shape, dtype=int))
        view: NDArray[Any] = np.frombuffer(memory, kind.base, count, layout.live_offset() + offset)
        return view


def writer_holds(file: int) -> bool:
    """Does another process hold the writer's lock on this open file? One's own lock is not seen."""
    # struct flock on 64-bit Linux: l_type, l_whence, padding, l_start, l_len, l_pid, padding
    asked = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    return bool(struct.unpack("hhxxxxqqixxxx", answer)[0] != fcntl.F_UNLCK)


def _make_file(folder: Path, name: str, size: int) -> tuple[int, str]:
    """A locked file of `size` bytes with its room really taken, under a temporary name."""
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        file, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".new", dir=folder)
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
        with suppress(OSError):
            os.unlink(temporary)
        raise MapSpaceError(
            f"{folder}: no room for an allocation map of {size / 2**20:.1f} MiB ({error.strerror}); enlarge that file "
            "system, set KVATLAS_DIR to another folder, or keep fewer columns"
        ) from error
    return file, temporary


def _take_name(temporary: str, path: Path) -> None:
    """Give the finished file its name, unless a live writer has it."""
    for _ in range(10):
        try:
            os.link(temporary, path)  # atomic, and refuses where the name is taken
        except FileExistsError:
            pass
        except OSError as error:
            raise MapSpaceError(f"{path}: cannot be given its name ({error.strerror}); set KVATLAS_DIR") from error
        else:
            os.unlink(temporary)
            return
        try:
            old = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MapSpaceError(f"{path} is in the way ({error.strerror}); remove it or set KVATLAS_DIR") from error
        try:
            # Holding the old file's lock while replacing it keeps a second starter out.
            try:
                fcntl.lockf(old, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError as error:
                raise MapBusy(f"{path}: another live engine writes that map; give this one another id") from error
            if os.fstat(old).st_ino == os.stat(path).st_ino:
                os.rename(temporary, path)
                return
        except FileNotFoundError:
            continue
        finally:
            os.close(old)
    raise MapUnavailable(f"{path}: its name changes hands too fast; give this engine another id")


def _own_start_ticks() -> int:
    """Field 22 of /proc/self/stat, which with the pid names this process for good; 0 where /proc is not there."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(after_name[19])


def _turn_off_in_child() -> None:
    for writer in _open_maps:
        writer.active = False


os.register_at_fork(after_in_child=_turn_off_in_child)
