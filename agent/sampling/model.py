"""What the agent knows: frozen samples of pools, and the view of all of them at one tick."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from agent.forecast import NOT_BLOCKED, Admission, ExhaustionForecast
from agent.fragmentation import FragmentationReport
from agent.wire import EngineState
from engine_shim.layout import BlockState
from engine_shim.snapshot import EngineIdentity, MapSnapshot

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """Time as an argument: `wall` in Unix seconds (what maps carry), `monotonic` for durations of the agent's own."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Waste:
    """Empty token slots at the ends of used and pinned blocks, and their share of the bytes of the pool."""

    tokens: int
    bytes: int
    slots: int  # token slots of those blocks, so that tokens / slots is the internal fragmentation


@dataclass(frozen=True, slots=True)
class PoolSample:
    """One pool as of one tick. Everything derived belongs to `snapshot`."""

    id: str  # "<engine id>.<rank>.<pool>"
    state: EngineState
    reason: str  # why it is not live
    snapshot: MapSnapshot
    report: FragmentationReport
    fragmentation_known: bool  # false for a sleeping engine, whose block states mean nothing
    waste: Waste | None  # None where the writer keeps no tokens column
    oldest_pinned_seconds: float | None
    forecast: ExhaustionForecast
    tokens_per_second: float | None
    torn_reads: int  # reads since the agent opened the map that gave no whole snapshot
    read_seconds: float  # what the last read and analysis took
    admission: Admission = NOT_BLOCKED
    queue_grows: bool = False  # ever more requests wait

    @property
    def identity(self) -> EngineIdentity:
        return self.snapshot.identity

    @property
    def residual_blocks(self) -> int:
        """Blocks by which the writer's own counts and a recount of its states differ; 0 where all is well."""
        report = self.report
        recount = (
            report.free_blocks,
            report.cached_blocks,
            report.used_blocks,
            report.pinned_blocks,
            report.reserved_blocks,
        )
        return sum(abs(said - seen) for said, seen in zip(self.snapshot.state_counts, recount, strict=False))

    @property
    def rank(self) -> str:
        return rank_name(self.identity)

    def heartbeat_age_seconds(self, now_unix: float) -> float:
        return _age(now_unix, self.snapshot.heartbeat_unix_ns)

    def last_step_age_seconds(self, now_unix: float) -> float | None:
        """None before the first step."""
        return _age(now_unix, self.snapshot.last_step_unix_ns) if self.snapshot.last_step_unix_ns else None

    def snapshot_age_seconds(self, now_unix: float) -> float:
        """Seconds since the last instant that the snapshot is known to describe.

        That is its publish; but a pool whose engine runs no request does not change, so that there a heartbeat
        vouches for it as well.
        """
        known_ns = self.snapshot.published_unix_ns
        if self.snapshot.running_requests == 0 and self.state != "unreadable":
            known_ns = max(known_ns, self.snapshot.heartbeat_unix_ns)
        return _age(now_unix, known_ns)


@dataclass(frozen=True, slots=True)
class AgentView:
    """Every pool at one tick. `generation` grows with each tick."""

    generation: int
    taken_unix: float
    samples: Mapping[str, PoolSample]  # by id, sorted
    unreadable: tuple[str, ...]  # maps and folders that were seen and not read, each with its reason
    folders: tuple[str, ...]
    sample_seconds: float  # what the tick took
    taken_monotonic: float | None = None  # the same instant as `taken_unix`, by a clock that is never set


EMPTY_VIEW = AgentView(0, 0.0, MappingProxyType({}), (), (), 0.0)


def rank_name(identity: EngineIdentity) -> str:
    """As in the name of the map's file."""
    ranks = (identity.data_parallel_rank, identity.tensor_parallel_rank, identity.pipeline_parallel_rank)
    return "dp{}.tp{}.pp{}".format(*ranks)


def measure_waste(snapshot: MapSnapshot) -> Waste | None:
    """Empty slots in blocks that are used or pinned; the waste that counting blocks hides."""
    if snapshot.tokens is None:
        return None
    held = (snapshot.states == BlockState.USED) | (snapshot.states == BlockState.PINNED)
    sizes = {group.id: group.block_tokens for group in snapshot.groups}
    identity = snapshot.identity
    if snapshot.group is not None and len(set(sizes.values())) > 1:
        table = np.full(256, identity.block_tokens, np.int64)
        for group, size in sizes.items():
            table[group] = size
        capacity = table[snapshot.group[held]]
        empty = np.maximum(capacity - snapshot.tokens[held].astype(np.int64), 0)
        share = float((empty / np.maximum(capacity, 1)).sum())
        return Waste(int(empty.sum()), round(share * identity.block_bytes), int(capacity.sum()))
    # One size for all, nearly always: sums over the whole column are several times quicker than picking from it.
    slots = int(np.count_nonzero(held)) * identity.block_tokens
    filled = np.minimum(snapshot.tokens, np.uint16(min(identity.block_tokens, 65_535))) * held
    tokens = slots - int(filled.sum(dtype=np.int64))
    return Waste(tokens, round(tokens / max(1, identity.block_tokens) * identity.block_bytes), slots)


def oldest_pinned(snapshot: MapSnapshot, now_unix: float) -> float | None:
    """Seconds since the pinned block that was touched longest ago was touched; None where nothing is pinned."""
    if snapshot.touched_ms is None:
        return None
    touched = snapshot.touched_ms[snapshot.states == BlockState.PINNED]
    if touched.size == 0:
        return None
    return float(ages_seconds(touched, snapshot, now_unix).max())


def ages_seconds(touched_ms: NDArray[np.uint32], snapshot: MapSnapshot, now_unix: float) -> NDArray[np.float64]:
    """Ages of entries of the touched column, in seconds: up to 49 days, where the column wraps round, and up to half
    of that once the engine is older. What was touched later than now, by a clock that was set back, is of now."""
    return elapsed_ms(touched_ms, snapshot, now_unix) / 1000.0


def elapsed_ms(touched_ms: NDArray[np.uint32], snapshot: MapSnapshot, now_unix: float) -> NDArray[np.uint32]:
    """The same in milliseconds, as integers."""
    now_ms = max(0, int(now_unix * 1000) - snapshot.identity.created_unix_ns // 1_000_000)
    elapsed = np.uint32(now_ms & 0xFFFFFFFF) - touched_ms
    # Nothing was touched before the engine began; an engine older than the column can tell has half of it for the past.
    elapsed[elapsed > (now_ms if now_ms <= 0xFFFFFFFF else 0x7FFFFFFF)] = 0
    return elapsed


def _age(now_unix: float, then_unix_ns: int) -> float:
    return max(0.0, now_unix - then_unix_ns / NANOSECONDS)
