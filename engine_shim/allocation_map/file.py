"""Opens a file as an allocation map and checks everything that its header claims before anybody believes it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_shim import layout
from engine_shim.errors import MapCorrupt, MapUnavailable, MapVersionError
from engine_shim.layout import HEADER, LIVE, REGION, Region
from engine_shim.snapshot import EngineIdentity

_DTYPES = layout.COLUMNS | {
    "segments": np.dtype("<u8"),
    "groups": layout.GROUP,
    "owners": layout.OWNER,
    "histograms": layout.HISTOGRAM,
    "events": layout.EVENT,
}
_NEEDED = ("state", "segments", "groups", "owners", "histograms", "events")
_MAX_REGIONS = 64
_MOST = {"groups": layout.MAX_GROUPS, "owners": layout.MAX_OWNERS, "events": layout.MAX_EVENTS}


@dataclass(frozen=True, slots=True)
class MapFile:
    """An open map whose header has been checked; `regions` all lie within the file."""

    file: int
    file_id: tuple[int, int]  # inode, device
    header: np.void
    live_offset: int
    live_bytes: int
    regions: dict[str, Region]

    @property
    def total_blocks(self) -> int:
        return int(self.header["total_blocks"])


def open_map(path: Path) -> MapFile:
    """Open and check.

    Raises:
        MapUnavailable: not there, or not readable by this user.
        MapCorrupt: not a map, or one that contradicts itself.
        MapVersionError: a map for a newer reader.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise MapUnavailable(f"{path}: cannot be opened ({error.strerror})") from error
    try:
        return _check(path, file)
    except BaseException:
        os.close(file)
        raise


def _check(path: Path, file: int) -> MapFile:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise MapCorrupt(f"{path}: not a regular file")
    raw = os.pread(file, HEADER.itemsize, 0)
    if not raw.startswith(layout.MAGIC):
        raise MapCorrupt(f"{path}: not an allocation map (wrong magic)")
    if len(raw) < HEADER.itemsize:
        raise MapCorrupt(f"{path}: cut short within its header")
    header = np.frombuffer(raw, HEADER)[0]
    if int(header["endian"]) != layout.ENDIAN_MARK:
        raise MapCorrupt(f"{path}: written with another byte order")
    version = f"{header['major']}.{header['minor']}"
    if int(header["major"]) != layout.MAJOR:
        raise MapVersionError(f"{path}: map version {version}; this reader knows {layout.MAJOR}.x. Update the agent")
    unknown = int(header["incompat"]) & ~layout.KNOWN_INCOMPAT
    if unknown:
        raise MapVersionError(
            f"{path}: map version {version} uses features {unknown:#x} that this reader does not know. Update the agent"
        )
    size = int(header["file_bytes"])
    if found.st_size < size:
        raise MapCorrupt(f"{path}: cut short: {size} bytes claimed, {found.st_size} there")
    blocks = int(header["total_blocks"])
    if not 1 <= blocks <= layout.MAX_BLOCKS or int(header["segment_blocks"]) != layout.SEGMENT_BLOCKS:
        raise MapCorrupt(f"{path}: {blocks} blocks in segments of {header['segment_blocks']} cannot be")
    if not 1 <= int(header["block_tokens"]) <= layout.MAX_BLOCK_TOKENS:
        raise MapCorrupt(f"{path}: blocks of {header['block_tokens']} tokens cannot be")
    live_offset, live_bytes = int(header["live_offset"]), int(header["live_bytes"])
    if live_bytes < LIVE.itemsize or live_offset % 8 or live_offset + live_bytes > size:
        raise MapCorrupt(f"{path}: its live part ({live_bytes} bytes at {live_offset}) cannot be")
    return MapFile(
        file=file,
        file_id=(found.st_ino, found.st_dev),
        header=header,
        live_offset=live_offset,
        live_bytes=live_bytes,
        regions=_regions(path, file, header, size),
    )


def _regions(path: Path, file: int, header: np.void, size: int) -> dict[str, Region]:
    count, entry_bytes = int(header["region_count"]), int(header["region_entry_bytes"])
    if not 1 <= count <= _MAX_REGIONS or entry_bytes < REGION.itemsize or entry_bytes > 4096:
        raise MapCorrupt(f"{path}: a region table of {count} entries of {entry_bytes} bytes cannot be")
    raw = os.pread(file, count * entry_bytes, int(header["region_offset"]))
    if len(raw) < count * entry_bytes:
        raise MapCorrupt(f"{path}: its region table lies outside the file")
    blocks = int(header["total_blocks"])
    counts = dict.fromkeys(layout.COLUMNS, blocks)
    counts |= {"segments": -(-blocks // layout.SEGMENT_BLOCKS), "histograms": len(layout.HISTOGRAMS)}
    regions: dict[str, Region] = {}
    for index in range(count):
        row = np.frombuffer(raw, REGION, 1, index * entry_bytes)[0]
        name = row["name"].decode("ascii", "replace")
        dtype = _DTYPES.get(name)
        if dtype is None:
            continue  # of a later minor version
        region = Region(name, dtype, int(row["offset"]), int(row["count"]))
        if int(row["item_bytes"]) != dtype.itemsize or region.count != counts.get(name, region.count):
            raise MapCorrupt(
                f"{path}: region {name!r} has {row['count']} items of {row['item_bytes']} bytes, which cannot be"
            )
        if region.count > _MOST.get(name, region.count):
            raise MapCorrupt(f"{path}: region {name!r} has {region.count} items, which cannot be")
        if region.offset + region.size_bytes > size or region.offset % 8 or region.offset < HEADER.itemsize:
            raise MapCorrupt(f"{path}: region {name!r} lies outside the file")
        regions[name] = region
    missing = [name for name in _NEEDED if name not in regions]
    if missing or regions["events"].count < 1:
        raise MapCorrupt(f"{path}: regions {missing or ['events']} are missing or empty")
    return regions


def identity_of(header: np.void, live: np.void) -> EngineIdentity:
    """Put the fixed header and the late part of the identity together."""

    def text(row: np.void, name: str) -> str:
        value: bytes = row[name]
        return value.decode("utf-8", "replace")

    return EngineIdentity(
        engine_id=text(header, "engine_id"),
        incarnation=int(header["incarnation"]),
        kind=text(header, "kind"),
        version=text(header, "version"),
        runner=text(header, "runner"),
        model=text(header, "model"),
        pool=text(header, "pool"),
        medium=text(header, "medium"),
        gpu_uuids=tuple(uuid.decode("utf-8", "replace") for uuid in live["gpu_uuids"] if uuid),
        data_parallel_rank=int(header["data_parallel_rank"]),
        data_parallel_size=int(header["data_parallel_size"]),
        tensor_parallel_rank=int(header["tensor_parallel_rank"]),
        tensor_parallel_size=int(header["tensor_parallel_size"]),
        pipeline_parallel_rank=int(header["pipeline_parallel_rank"]),
        pipeline_parallel_size=int(header["pipeline_parallel_size"]),
        total_blocks=int(header["total_blocks"]),
        block_tokens=int(header["block_tokens"]),
        block_bytes=int(header["block_bytes"]),
        dtype=text(header, "dtype"),
        headroom_blocks=int(header["headroom_blocks"]),
        policy=text(live, "policy"),
        pid=int(header["pid"]),
        pid_start_ticks=int(header["pid_start_ticks"]),
        created_unix_ns=int(header["created_unix_ns"]),
    )
