"""Snapshots of torch's caching allocator, of any age and form, as segments of blocks."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from agent.allocator import plain_pickle
from agent.allocator.errors import SnapshotError
from agent.allocator.skipping import Skipped

MAX_JSON_BYTES = 64 << 20  # JSON is read as a whole, at up to ten times its size in memory
MAX_SEGMENTS = 200_000  # 400 GB of the smallest; what is done for each takes 0.1 ms
MAX_BLOCKS = 1_500_000  # of all segments: a file can name one segment again and again
MAX_BYTES = 1 << 42  # of one segment: what sums of a million of them leave within 64 bits
# Of no use here, and nearly all of a large file.
_UNREAD = ("frames", "device_traces", "external_annotations", "cpp_frames", "user_metadata")
DEFAULT_POOL: Final = (0, 0)


class BlockState(IntEnum):
    """What a block is. Pending: freed by the program, and held until another stream is through with it."""

    LIVE = 0
    PENDING = 1
    FREE = 2


_STATES = {
    "active_allocated": BlockState.LIVE,
    "active_pending_free": BlockState.PENDING,
    "active_awaiting_free": BlockState.PENDING,  # as torch's documentation spells it
    "inactive": BlockState.FREE,
}


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Memory that the allocator had of the driver in one piece; blocks follow each other from its start."""

    device: int
    address: int | None
    total_bytes: int
    stream: int
    kind: str  # "small", "large", or "" in a form that does not tell
    pool: tuple[int, int]  # DEFAULT_POOL, or one that a graph or MemPool owns
    expandable: bool
    sizes: NDArray[np.int64]  # (blocks,), bytes
    requested: NDArray[np.int64]  # (blocks,), bytes that the program asked for; -1 where it is not told
    states: NDArray[np.uint8]  # (blocks,), of BlockState

    def bytes_in(self, state: BlockState) -> int:
        return int(self.sizes[self.states == state].sum())

    @property
    def unaccounted_bytes(self) -> int:
        """What its blocks leave of it; 0 in a consistent snapshot."""
        return self.total_bytes - int(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class Settings:
    """What the allocator was set to, as far as the snapshot says; None where it does not."""

    conf: str | None = None  # PYTORCH_CUDA_ALLOC_CONF
    expandable_segments: bool | None = None
    max_split_bytes: int | None = None  # None: without limit, which is the default, or not told


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Every segment of every device at one instant."""

    segments: tuple[Segment, ...]
    settings: Settings
    history_recorded: bool | None  # None: this form has no place for it
    pools_told: bool  # False: private pools cannot be told from the default one
    unknown_states: Mapping[str, int]  # bytes of blocks in states that are not known here; they count as live


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file: a pickle or JSON, a list of segments or a dict with one.

    Raises SnapshotError where it is none, is not plain, or is too large to be read within bounds; the text names the
    file.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SnapshotError("this is no regular file; name the file that a snapshot was dumped to")
            return parse_snapshot(_load(file))
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}; name a file that this user may read") from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from error


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to would keep an ordinary open waiting for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _load(file: BinaryIO) -> Any:
    start = file.read(16)
    file.seek(0)
    if not start:
        raise SnapshotError("the file is empty")
    if start[:2] in (b"\x1f\x8b", b"PK") or start[:4] == b"\x28\xb5\x2f\xfd":
        raise SnapshotError("this is an archive; unpack it, and name the snapshot in it")
    if start[:1] == b"\x80" or start[:1] in b"}]":
        return plain_pickle.load(file, skip=_UNREAD)
    if start.lstrip()[:1] in (b"{", b"[") or start[:3] == b"\xef\xbb\xbf":
        return _load_json(file)
    if start[:1] == b"(":  # how the oldest protocol begins a list or a dict
        return plain_pickle.load(file, skip=_UNREAD)
    raise SnapshotError("neither a pickle nor JSON; give what torch.cuda.memory._dump_snapshot wrote")


def _load_json(file: BinaryIO) -> Any:
    data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise SnapshotError(
            f"JSON beyond {MAX_JSON_BYTES >> 20} MiB is not read, since that would take ten times as much memory: "
            "give the pickle, of which any size is read, or leave device_traces and frames out"
        )
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError:
        raise SnapshotError("refused: nested too deeply, which no snapshot is") from None
    except ValueError as error:  # of UTF-8 as well, and of numbers of thousands of digits
        raise SnapshotError(f"this is not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def parse_snapshot(raw: Any) -> Snapshot:
    """The snapshot in plain values. Raises SnapshotError that names the part that is wrong."""
    settings, history = Settings(), None
    if isinstance(raw, dict):
        if "segments" not in raw:
            raise SnapshotError(f"there are no segments in it, but {_some(raw)}; this is no snapshot of the allocator")
        settings, history = _settings(raw.get("allocator_settings")), _recorded(raw)
        raw = raw["segments"]
    if not isinstance(raw, list | tuple):
        raise SnapshotError(f"segments are {_kind(raw)}, not a list; this is no snapshot of the allocator")
    if len(raw) > MAX_SEGMENTS:
        raise SnapshotError(f"{len(raw):,} segments; at most {MAX_SEGMENTS:,} are read")
    lists = (one.get("blocks") for one in raw if isinstance(one, dict))
    blocks = sum(len(one) for one in lists if isinstance(one, list | tuple))
    if blocks > MAX_BLOCKS:
        raise SnapshotError(f"{blocks:,} blocks; at most {MAX_BLOCKS:,} are read")
    unknown: dict[str, int] = {}
    segments = tuple(_segment(one, f"segment {number}", unknown) for number, one in enumerate(raw))
    told = all("segment_pool_id" in one for one in raw)
    return Snapshot(segments, settings, history, told, MappingProxyType(unknown))


def _segment(raw: Any, where: str, unknown: dict[str, int]) -> Segment:
    if not isinstance(raw, dict):
        raise SnapshotError(f"{where} is {_kind(raw)}, not a dict")
    blocks = raw.get("blocks")
    if not isinstance(blocks, list | tuple):
        raise SnapshotError(f"{where}: blocks are {_kind(blocks)}, not a list")
    count = len(blocks)
    sizes, requested = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    states = np.zeros(count, np.uint8)
    total, filled = _size(raw, "total_size", where), 0
    for index, block in enumerate(blocks):
        at = f"{where}, block {index}"
        if not isinstance(block, dict):
            raise SnapshotError(f"{at} is {_kind(block)}, not a dict")
        size = sizes[index] = _size(block, "size", at)
        filled += size
        if filled > total:
            raise SnapshotError(f"{where}: its blocks hold more than its own {total:,} bytes")
        wanted = _requested(block, at)
        requested[index] = -1 if wanted is None else wanted
        name = block.get("state")
        if not isinstance(name, str):
            raise SnapshotError(f"{at}: its state is {_kind(name)}, not text")
        state = _STATES.get(name)
        if state is None:
            unknown[name[:80]] = unknown.get(name[:80], 0) + size
            if len(unknown) > 16:
                raise SnapshotError(
                    f"{at}: states {_some(unknown)} are not known; this is no snapshot of the allocator"
                )
        states[index] = BlockState.LIVE if state is None else state
    kind = raw.get("segment_type")
    return Segment(
        device=_whole(raw.get("device", 0), f"{where}: device"),
        address=None if raw.get("address") is None else _whole(raw["address"], f"{where}: address"),
        total_bytes=total,
        stream=_whole(raw.get("stream", 0), f"{where}: stream"),
        kind=kind if kind in ("small", "large") else "",
        pool=_pool(raw.get("segment_pool_id"), where),
        expandable=raw.get("is_expandable") is True,
        sizes=sizes,
        requested=requested,
        states=states,
    )


def _requested(block: Mapping[str, Any], where: str) -> int | None:
    """What the program asked for: old snapshots tell it in the block's history."""
    if "requested_size" in block:
        return _size(block, "requested_size", where)
    history = block.get("history")
    if isinstance(history, list | tuple) and history and isinstance(history[0], dict) and "real_size" in history[0]:
        return _size(history[0], "real_size", where)
    return None


def _pool(raw: Any, where: str) -> tuple[int, int]:
    if raw is None:
        return DEFAULT_POOL
    if not isinstance(raw, list | tuple) or len(raw) != 2:
        raise SnapshotError(f"{where}: segment_pool_id is {_kind(raw)}, not a pair of numbers")
    return _whole(raw[0], f"{where}: segment_pool_id"), _whole(raw[1], f"{where}: segment_pool_id")


def _settings(raw: Any) -> Settings:
    if not isinstance(raw, dict):
        return Settings()
    conf, expandable, split = (
        raw.get("PYTORCH_CUDA_ALLOC_CONF"),
        raw.get("expandable_segments"),
        raw.get("max_split_size"),
    )
    limited = isinstance(split, int) and not isinstance(split, bool) and 0 < split < MAX_BYTES
    return Settings(
        conf=conf[:1000] if isinstance(conf, str) and conf else None,
        expandable_segments=expandable if isinstance(expandable, bool) else None,
        max_split_bytes=split if limited else None,
    )


def _recorded(raw: Mapping[str, Any]) -> bool | None:
    if "device_traces" not in raw:
        return None
    traces = raw["device_traces"]
    if isinstance(traces, Skipped):
        return traces.entries
    return isinstance(traces, list | tuple) and any(traces)


def _size(values: Mapping[str, Any], name: str, where: str) -> int:
    size = values.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
        raise SnapshotError(f"{where}: its {name} is {_shown(size)}, not a number of bytes")
    return size


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 64:
        raise SnapshotError(f"{where} is {_shown(value)}, not a whole number")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, Skipped):
        return "a part that is not read"
    return "missing" if value is None else f"of type {type(value).__name__}"


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 1 << 64 else _kind(value)


def _some(names: Mapping[str, Any]) -> str:
    shown = ", ".join(repr(str(name)[:40]) for name in list(names)[:6])
    return shown + (" and more" if len(names) > 6 else "") if names else "nothing"
