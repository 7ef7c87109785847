"""Allocation map v1, byte by byte: the only file that knows offsets.

A map is one plain file for one block pool of one engine process, written by that process alone and read with `preadv`.

    HEADER      fixed part, written once before the file gets its name
    LIVE        what each publish changes, guarded by `LIVE.sequence` (odd while a publish is under way)
    REGIONS     a table that places every other part: columns, segments, groups, owners, histograms, events

All numbers are little-endian. Readers take offsets from the region table, never from this file, so a later minor
version may add regions and lengthen LIVE. A set bit in `incompat` that a reader does not know means: do not read;
an unknown bit in `ro_compat` means: read, but do not write.

One sequence word guards the whole: `states` and `state_counts` taken between two equal even values belong to one
instant. One word for each segment of 4,096 blocks guards the other columns, so that a reader beside a restless
writer gets them piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"KVATLAS\x00"
ENDIAN_MARK = 0x01020304
MAJOR, MINOR = 1, 0
KNOWN_INCOMPAT = 0
KNOWN_RO_COMPAT = 0

SEGMENT_BLOCKS = 4096
# What a reader believes: a map that claims more is damaged, or was made to exhaust it.
MAX_BLOCKS = 1 << 25
MAX_BLOCK_TOKENS = 0xFFFF  # the tokens column has 16 bits
MAX_GROUPS = 255
MAX_OWNERS = 1 << 20
MAX_EVENTS = 1 << 26
NO_GROUP = 255
NO_OWNER = 0
OWNER_SLOT_BITS = 24

MAP_SUFFIX = ".kvmap"


class BlockState(IntEnum):
    """What a block is, as the allocator sees it. The five counts sum to the block count."""

    FREE = 0  # holds nothing
    CACHED = 1  # reference count 0, an evictable prefix
    USED = 2  # referenced by at least one sequence
    PINNED = 3  # holds data that must not move now: in transfer, in flight
    RESERVED = 4  # never allocatable: vLLM's null block


class EventKind(IntEnum):
    """What happened to a run of `count` blocks that starts at `block`."""

    ALLOCATE = 1
    FREE = 2
    CACHE = 3  # last reference gone, contents kept
    EVICT = 4
    REUSE = 5  # prefix hit on a cached block
    SHARE = 6  # one more reference
    UNSHARE = 7
    PIN = 8
    UNPIN = 9  # `other` is the state it returns to
    RESERVE = 10
    MOVE = 11  # `other` is where the contents came from
    RELOCATE = 12  # likewise, of cached contents


COUNTERS = (
    "tokens_written",
    "blocks_allocated",
    "blocks_freed",
    "blocks_evicted",
    "blocks_reused",
    "copy_on_write",
    "allocation_failures",
    "preemptions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "steps",
    "live_moves",
    "live_move_bytes",
    "relocation_copies",
    "relocation_bytes",
    "events_dropped",
    "repairs",
    "shim_cpu_ns",
)

HISTOGRAMS = ("lifetime", "idle_before_evict", "reuse_gap")
HISTOGRAM_BOUNDS_SECONDS = tuple(0.001 * 2.0**k for k in range(25))

FLAG_SLEEPING = 1
FLAG_DEGRADED = 2
FLAG_CLOSING = 4
FLAG_RELOCATING = 8

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("endian", "<u4"),
        ("major", "<u2"),
        ("minor", "<u2"),
        ("incompat", "<u8"),
        ("ro_compat", "<u8"),
        ("header_bytes", "<u4"),
        ("live_offset", "<u4"),
        ("live_bytes", "<u4"),
        ("region_offset", "<u4"),
        ("region_count", "<u4"),
        ("region_entry_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("incarnation", "<u8"),
        ("created_unix_ns", "<i8"),
        ("pid", "<u4"),
        ("segment_blocks", "<u4"),
        ("pid_start_ticks", "<u8"),
        ("total_blocks", "<u8"),
        ("block_bytes", "<u8"),
        ("block_tokens", "<u4"),
        ("data_parallel_rank", "<u4"),
        ("data_parallel_size", "<u4"),
        ("tensor_parallel_rank", "<u4"),
        ("tensor_parallel_size", "<u4"),
        ("pipeline_parallel_rank", "<u4"),
        ("pipeline_parallel_size", "<u4"),
        ("pad", "<u4"),
        ("headroom_blocks", "<u8"),
        ("kind", "S32"),
        ("version", "S64"),
        ("runner", "S64"),
        ("engine_id", "S256"),
        ("model", "S512"),
        ("pool", "S64"),
        ("medium", "S16"),
        ("dtype", "S32"),
    ]
)

MAX_GPUS = 16

LIVE = np.dtype(
    [
        ("sequence", "<u8"),  # odd while a publish is under way
        ("heartbeat_unix_ns", "<i8"),  # written by a thread of its own, outside the sequence
        ("published_unix_ns", "<i8"),
        ("last_step_unix_ns", "<i8"),
        ("flags", "<u8"),
        ("running_requests", "<u4"),
        ("waiting_requests", "<u4"),
        ("state_counts", "<u8", (8,)),  # by BlockState; the rest are spare
        ("event_head", "<u8"),  # events written since the map was made; the newest lie in the ring
        ("event_claim", "<u8"),  # stored before a publish writes to the ring: what the head is going to be
        ("owner_rows", "<u4"),  # rows of the owner table that may be in use
        ("pad", "<u4"),
        ("policy", "S32"),
        ("gpu_uuids", "S64", (MAX_GPUS,)),
        ("counters", "<u8", (32,)),  # in the order of COUNTERS; the rest are spare
    ]
)

REGION = np.dtype([("name", "S16"), ("dtype", "S8"), ("offset", "<u8"), ("count", "<u8"), ("item_bytes", "<u8")])

GROUP = np.dtype(
    [
        ("id", "<u4"),
        ("block_tokens", "<u4"),
        ("layers", "<u4"),
        ("window_tokens", "<u4"),
        ("bytes_per_block", "<u8"),
        ("kind", "S16"),
    ]
)

OWNER = np.dtype(
    [
        ("owner", "<u4"),  # 0: row not in use
        ("blocks", "<u4"),
        ("tokens", "<u8"),
        ("first_seen_unix_ns", "<i8"),
        ("request_id", "S64"),
        ("lora", "S32"),
        ("cache_salt", "S32"),
    ]
)

HISTOGRAM = np.dtype([("counts", "<u8", (len(HISTOGRAM_BOUNDS_SECONDS) + 1,)), ("sum_seconds", "<f8")])

EVENT = np.dtype(
    [
        ("time_ns", "<i8"),  # writer's wall clock
        ("block", "<u4"),
        ("count", "<u4"),  # blocks in the run
        ("owner", "<u4"),
        ("other", "<u4"),
        ("kind", "u1"),
        ("descending", "u1"),  # the run goes block, block - 1, ...
        ("pad", "<u2"),
        ("position", "<u4"),
    ]
)

EVENT_WORDS = 4
"""An event is also four 64-bit words, which is how a writer stores many at once; `event_words` packs them."""

COLUMNS: dict[str, np.dtype[Any]] = {
    "state": np.dtype("u1"),
    "references": np.dtype("<u2"),
    "tokens": np.dtype("<u2"),
    "owner": np.dtype("<u4"),
    "position": np.dtype("<u4"),
    "touched": np.dtype("<u4"),
    "group": np.dtype("u1"),
}
OPTIONAL_COLUMNS = tuple(name for name in COLUMNS if name != "state")

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Region:
    """One placed part of a map: `count` items of `dtype` from byte `offset`."""

    name: str
    dtype: np.dtype[Any]
    offset: int
    count: int

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * self.count


def place_regions(
    total_blocks: int, *, columns: tuple[str, ...], groups: int, owners: int, events: int
) -> tuple[tuple[Region, ...], int]:
    """Lay out every region behind HEADER, LIVE and the region table; returns them and the file size in bytes."""
    segments = -(-total_blocks // SEGMENT_BLOCKS)
    wanted: list[tuple[str, np.dtype[Any], int]] = [("segments", np.dtype("<u8"), segments)]
    wanted += [(name, COLUMNS[name], total_blocks) for name in columns]
    wanted += [
        ("groups", GROUP, groups),
        ("owners", OWNER, owners),
        ("histograms", HISTOGRAM, len(HISTOGRAMS)),
        ("events", EVENT, events),
    ]
    offset = align(region_table_offset() + len(wanted) * REGION.itemsize)
    regions = []
    for name, dtype, count in wanted:
        regions.append(Region(name, dtype, offset, count))
        offset = align(offset + dtype.itemsize * count)
    return tuple(regions), offset


def live_offset() -> int:
    """Where LIVE begins in a map that this version writes."""
    return align(HEADER.itemsize)


def region_table_offset() -> int:
    """Where the region table begins in a map that this version writes."""
    return align(live_offset() + LIVE.itemsize)


def align(offset: int) -> int:
    """Round up to the alignment of regions (a cache line, so that no two regions share one)."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def event_words(
    time_ns: NDArray[np.int64],
    block: NDArray[np.int64],
    count: NDArray[np.int64],
    owner: NDArray[np.int64],
    other: NDArray[np.int64],
    kind: NDArray[np.int64],
    descending: NDArray[np.int64],
    position: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Events of EVENT's fields, all (n,), as (n, EVENT_WORDS); nine stores by field would cost three times as much."""
    words = np.empty((len(time_ns), EVENT_WORDS), np.int64)
    words[:, 0] = time_ns
    words[:, 1] = count << 32 | block
    words[:, 2] = other << 32 | owner
    words[:, 3] = position << 32 | descending << 8 | kind
    return words
