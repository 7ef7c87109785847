"""The writing end of an allocation map: creates the file, proves that it is the only writer, publishes."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map.claim import file_id, make_file, make_folder, refuse_own, take_name
from engine_shim.errors import MapCorrupt, SettingsError
from engine_shim.layout import HEADER, LIVE, REGION, Region
from engine_shim.snapshot import GroupEntry
from engine_shim.text import fit, safe_name

HEARTBEAT_SECONDS = 0.5
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
        if not 1 <= self.block_tokens <= layout.MAX_BLOCK_TOKENS:
            raise SettingsError(f"block_tokens={self.block_tokens} is outside 1..{layout.MAX_BLOCK_TOKENS}")
        if len(self.groups) > layout.MAX_GROUPS:
            raise SettingsError(
                f"{len(self.groups)} groups are more than the {layout.MAX_GROUPS} that a map can tell apart"
            )
        if not 1 <= self.owner_slots <= layout.MAX_OWNERS:
            raise SettingsError(f"owner_slots={self.owner_slots} is outside 1..{layout.MAX_OWNERS}")

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
        self.file_id = file_id(os.fstat(file))
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
        regions, size = layout.place_regions(
            spec.total_blocks,
            columns=spec.columns,
            groups=len(spec.groups),
            owners=spec.owner_slots,
            events=spec.event_slots,
        )
        # Resolved once: another spelling of the folder, or a change of the working folder, must not matter.
        path = make_folder(folder) / spec.file_name
        refuse_own(path, [writer.file_id for writer in _open_maps if writer.active])
        file, temporary = make_file(path, size)
        named = False
        writer = None
        try:
            memory = mmap.mmap(file, size)
            writer = cls(path, file, memory, spec, regions)
            writer._fill_in(memory, regions, size, clock_ns())
            take_name(file, temporary, path)
            named = True
            writer._heart = threading.Thread(
                target=writer._beat, args=(clock_ns,), name="kvatlas-heartbeat", daemon=True
            )
            writer._heart.start()
        except BaseException:
            if named and writer is not None:
                writer._remove_name()
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            os.close(file)
            raise
        _open_maps.add(writer)
        return writer

    def publishing(self) -> AbstractContextManager[None]:
        """Everything stored within becomes visible at once.

        Whatever interrupts it, a KeyboardInterrupt included, leaves the map marked as torn for good, and every later
        publish raises MapCorrupt: the word's parity must never turn round.
        """
        return _Publish(self)

    def close(self, *, keep: bool = False) -> None:
        """Say goodbye and remove the map, or leave it as a black box. Idempotent; does nothing in a forked child."""
        if not self.active:
            return
        self.active = False
        self._stop.set()
        if self._heart is not None:
            self._heart.join(timeout=2 * HEARTBEAT_SECONDS)
        # One store, outside of a publish: it must also work on a map whose last publish never ended.
        self.live.flags[0] = int(self.live.flags[0]) | layout.FLAG_CLOSING
        if not keep:
            self._remove_name()
        self.columns.clear()
        self.tables.clear()
        self.live = _LiveWords(bytearray(layout.live_offset() + LIVE.itemsize))
        if self._memory is not None:
            with suppress(BufferError):  # somebody still holds a view; the mapping then goes with the view
                self._memory.close()
        self._memory = None
        os.close(self._file)

    def _remove_name(self) -> None:
        """Unlink the map's name, if it still leads to this map."""
        with suppress(OSError):
            if file_id(os.stat(self.path, follow_symlinks=False)) == self.file_id:
                os.unlink(self.path)

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
        self.set_gpu_uuids([fit(uuid, 64) for uuid in spec.gpu_uuids])
        start = layout.region_table_offset()
        memory[start : start + table.nbytes] = table.tobytes()
        memory[: HEADER.itemsize] = header.tobytes()

    def set_gpu_uuids(self, uuids: Sequence[bytes]) -> None:
        """Name the devices that hold the pool, each in at most 64 bytes; more than MAX_GPUS are cut off."""
        names = list(uuids[: layout.MAX_GPUS])
        self.live.gpu_uuids[:] = names + [b""] * (layout.MAX_GPUS - len(names))

    def _beat(self, clock_ns: Callable[[], int]) -> None:
        word = self.live.heartbeat_unix_ns
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if self.active:
                word[0] = clock_ns()


class _Publish:
    """`MapWriter.publishing`; by hand, since a generator costs a publish three times as much."""

    __slots__ = ("_before", "_word", "_writer")

    def __init__(self, writer: MapWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        self._word = self._writer.live.sequence
        self._before = int(self._word[0])
        if self._before % 2:
            raise MapCorrupt(f"{self._writer.path}: an earlier publish never ended")
        self._word[0] = self._before + 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._word[0] = self._before + 2


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
