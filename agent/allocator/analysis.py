"""Where reserved memory is and how it is cut up: by pool, and in it by what can serve a request. Pure.

External fragmentation is `1 - largest free / free`. A free block serves only requests of its own pool, size class and
stream, so that the figure of a pool that has several is no better than that of its parts, which stand beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.allocator.advice import Advice, advise
from agent.allocator.snapshot import DEFAULT_POOL, BlockState, Segment, Snapshot

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes. `reserved = live + pending + free + unaccounted`; internal waste is a part of live."""

    segments: int
    reserved_bytes: int
    live_bytes: int
    pending_bytes: int
    free_bytes: int
    unaccounted_bytes: int  # of a snapshot that is not consistent
    internal_waste_bytes: int  # rounding: live blocks' sizes beyond what was asked for, where that is told
    largest_free_bytes: int

    @property
    def fragmentation_rate(self) -> float | None:
        """0 to below 1; None where nothing is free."""
        return None if self.free_bytes == 0 else 1 - self.largest_free_bytes / self.free_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """What of a pool can serve the same requests."""

    kind: str
    stream: int
    expandable: bool
    holdings: Holdings


@dataclass(frozen=True, slots=True)
class Pool:
    """The default pool of a device, or one that a graph or MemPool keeps for itself."""

    device: int
    id: tuple[int, int]
    holdings: Holdings
    parts: tuple[Part, ...]

    @property
    def private(self) -> bool:
        return self.id != DEFAULT_POOL

    @property
    def name(self) -> str:
        return f"private {self.id[0]},{self.id[1]}" if self.private else "default"


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """A snapshot's figures, what would change them, and what a reader should beware of."""

    total: Holdings  # of all pools; its largest free block is that of the default pools
    pools: tuple[Pool, ...]  # default ones first
    advice: tuple[Advice, ...]
    warnings: tuple[str, ...]


def analyze_snapshot(snapshot: Snapshot) -> AllocatorReport:
    """The report of one snapshot."""
    by_pool: dict[tuple[int, tuple[int, int]], list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        by_pool[segment.device, segment.pool].append(segment)
    pools = tuple(
        _pool(device, pool, by_pool[device, pool])
        for device, pool in sorted(by_pool, key=lambda key: (key[1] != DEFAULT_POOL, *key))
    )
    usable = [one for one in snapshot.segments if one.pool == DEFAULT_POOL]
    total, shared = _holdings(snapshot.segments), _holdings(usable)
    total = Holdings(
        total.segments,
        total.reserved_bytes,
        total.live_bytes,
        total.pending_bytes,
        total.free_bytes,
        total.unaccounted_bytes,
        total.internal_waste_bytes,
        shared.largest_free_bytes,
    )
    return AllocatorReport(total, pools, advise(usable, snapshot.settings), tuple(_warnings(snapshot, pools)))


def _pool(device: int, pool: tuple[int, int], segments: Sequence[Segment]) -> Pool:
    groups: dict[tuple[str, int, bool], list[Segment]] = defaultdict(list)
    for segment in segments:
        groups[segment.kind, segment.stream, segment.expandable].append(segment)
    parts = (Part(*key, _holdings(groups[key])) for key in sorted(groups))
    return Pool(device, pool, _holdings(segments), tuple(parts))


def _holdings(segments: Iterable[Segment]) -> Holdings:
    count = reserved = live = pending = free = unaccounted = waste = largest = 0
    for segment in segments:
        is_live, is_free = segment.states == BlockState.LIVE, segment.states == BlockState.FREE
        told = is_live & (segment.requested >= 0)
        count, reserved = count + 1, reserved + segment.total_bytes
        live += int(segment.sizes[is_live].sum())
        pending += segment.bytes_in(BlockState.PENDING)
        free += int(segment.sizes[is_free].sum())
        unaccounted += segment.unaccounted_bytes
        waste += int((segment.sizes[told] - segment.requested[told]).clip(min=0).sum())
        largest = max(largest, int(segment.sizes[is_free].max(initial=0)))
    return Holdings(count, reserved, live, pending, free, unaccounted, waste, largest)


def _warnings(snapshot: Snapshot, pools: Sequence[Pool]) -> Iterable[str]:
    if not snapshot.segments:
        yield "there are no segments: nothing was allocated on a GPU, or CUDA was not initialised"
    if snapshot.history_recorded is False:
        yield (
            "history not recorded: who allocated what, and when, is not in this snapshot. Segments are complete all "
            "the same; torch.cuda.memory._record_memory_history() records from then on"
        )
    if snapshot.segments and not snapshot.pools_told:
        yield "this snapshot does not tell pools: memory of captured graphs cannot be told from the rest and looks free"
    for name, size in snapshot.unknown_states.items():
        yield f"{size:,} bytes are in the state {name!r}, which is not known here; they count as live"
    private = sum(one.holdings.free_bytes for one in pools if one.private)
    if private:
        yield (
            f"{private / MIB:,.1f} MiB that are free are in private pools, which captured graphs and MemPools keep: "
            "nothing else can use them, and empty_cache() leaves them while their owner lives"
        )
    untold = sum(one.holdings.unaccounted_bytes for one in pools)
    if untold:
        yield f"blocks account for {untold:,} bytes less than their segments have; the snapshot is not consistent"
    overlapping = _overlapping(snapshot.segments)
    if overlapping:
        yield (
            f"{overlapping:,} segments begin within another one: their memory is counted more than once; the snapshot "
            "is not consistent"
        )
    unsized = sum(int(((one.requested < 0) & (one.states == BlockState.LIVE)).sum()) for one in snapshot.segments)
    if unsized:
        yield f"{unsized:,} live blocks do not tell what was asked for: internal waste is at least what is shown"
    settings = snapshot.settings
    if settings.expandable_segments and settings.max_split_bytes is not None:
        yield (
            f"expandable_segments and max_split_size_mb:{settings.max_split_bytes // MIB} are both set: together they "
            "let reserved memory grow without need (pytorch#193400). Keep expandable_segments and drop the other"
        )


def _overlapping(segments: Iterable[Segment]) -> int:
    """How many begin before one of the same device that begins earlier has ended."""
    found = 0
    ends: dict[int, int] = {}
    placed = [(one.device, one.address, one.total_bytes) for one in segments if one.address is not None]
    for device, address, size in sorted(placed):
        end = ends.get(device)
        found += end is not None and address < end
        ends[device] = address + size if end is None else max(end, address + size)
    return found
