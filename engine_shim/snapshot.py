"""What a reader gets from one allocation map: frozen values, copied out, that hold no live references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WATCHED_ONLY = frozenset({"transformers", "sglang"})  # kinds of engines whose blocks no adapter of ours can move


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who wrote a map. Fixed for one incarnation, except `gpu_uuids`, which may be filled in late."""

    engine_id: str  # stable over restarts
    incarnation: int  # random 64 bits, new at every start of the writer
    kind: str  # "reference", "vllm", "transformers", "sglang"
    version: str
    runner: str  # model-runner class, "" where there is none
    model: str
    pool: str
    medium: str  # "cpu" or "cuda"
    gpu_uuids: tuple[str, ...]
    data_parallel_rank: int
    data_parallel_size: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    pipeline_parallel_rank: int
    pipeline_parallel_size: int
    total_blocks: int
    block_tokens: int  # token slots in one block
    block_bytes: int  # bytes of one block over all layers of this rank
    dtype: str
    headroom_blocks: int  # inside the allocatable set; new sequences may not take them
    policy: str  # allocation policy, "" where unknown
    pid: int
    pid_start_ticks: int  # field 22 of /proc/PID/stat
    created_unix_ns: int


@dataclass(frozen=True, slots=True)
class MapFlags:
    """Conditions of the pool as its engine reports them."""

    sleeping: bool = False  # KV memory is given back; states mean nothing, fragmentation is not computed
    degraded: bool = False  # our observer failed and stopped; the map no longer follows the pool
    closing: bool = False  # the engine is shutting down in good order
    relocating: bool = False  # relocating allocation is on


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One KV cache group; several may share a pool."""

    id: int
    kind: str  # "full", "sliding", "chunked", "mla", "state"
    block_tokens: int
    layers: int
    bytes_per_block: int
    window_tokens: int  # 0 where unlimited


@dataclass(frozen=True, slots=True)
class OwnerEntry:
    """One live sequence. `blocks` counts its whole table; shared blocks appear in several owners: do not sum."""

    owner: int  # 24-bit slot | 8-bit generation << 24, as in the owner column
    request_id: str
    lora: str
    cache_salt: str
    tokens: int
    blocks: int
    first_seen_unix_ns: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations in seconds. `counts[i]` is of values <= `bounds_seconds[i]`, not cumulative; the last is the rest."""

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]  # one longer than the bounds
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class MapSnapshot:
    """One pool at one instant.

    `states` and `state_counts` are one whole published instant. The other columns are each consistent by
    segment of 4,096 blocks; a column that the writer dropped is None.
    """

    path: str
    identity: EngineIdentity
    flags: MapFlags
    sequence: int  # the publish that `states` and `state_counts` belong to; even
    published_unix_ns: int  # when that publish ended (writer's wall clock)
    heartbeat_unix_ns: int
    last_step_unix_ns: int
    running_requests: int
    waiting_requests: int
    state_counts: tuple[int, ...]  # blocks by BlockState value, as the writer counted them
    counters: Mapping[str, int]  # monotonic within one incarnation; names in layout.COUNTERS
    states: NDArray[np.uint8]
    references: NDArray[np.uint16] | None
    tokens: NDArray[np.uint16] | None
    owner: NDArray[np.uint32] | None  # 0 where nobody owns the block
    position: NDArray[np.uint32] | None  # logical index of the block in its owner's sequence
    touched_ms: NDArray[np.uint32] | None  # milliseconds since created_unix_ns, modulo 2**32
    group: NDArray[np.uint8] | None  # 255 where free
    groups: tuple[GroupEntry, ...]
    owners: tuple[OwnerEntry, ...]
    histograms: Mapping[str, Histogram]  # "lifetime", "idle_before_evict", "reuse_gap"
    event_head: int  # events ever written by this incarnation


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events between two polls, oldest first, as rows of layout.EVENT; `missed` were overwritten before being read."""

    events: NDArray[np.void]
    next_head: int
    missed: int
