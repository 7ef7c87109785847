"""What each of torch's levers would give back of what is reserved, by arithmetic on the snapshot. Pure.

Sizes are those of torch's allocator (c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp): small requests, up
to 1 MiB, share segments of 2 MiB; requests below 10 MiB share segments of 20 MiB; larger ones have segments of their
own, rounded up to 2 MiB. Expandable segments map and unmap pages of 2 MiB (small) or 20 MiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.allocator.snapshot import BlockState, Segment, Settings

MIB = 1 << 20
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
OWN_SEGMENT = 10 * MIB  # requests from here on have a segment of their own
ROUNDING = 2 * MIB
SPLIT_CANDIDATES = tuple(size * MIB for size in (32, 64, 128, 256, 512, 1024))  # torch wants more than 20 MiB


@dataclass(frozen=True, slots=True)
class Advice:
    """One lever. `bytes` is what it gives back for sure of what is reserved now, `at_most_bytes` at best.

    `at_most_bytes` is None where the two are one. The reason holds the arithmetic, or why it would not help.
    """

    option: str  # "empty_cache", "expandable_segments", "max_split_size"
    helps: bool
    bytes: int
    at_most_bytes: int | None
    setting: str  # how it is set
    reason: str


def advise(segments: Sequence[Segment], settings: Settings) -> tuple[Advice, ...]:
    """The three levers over the segments of default pools, the most helpful first."""
    found = (_empty_cache(segments), _expandable(segments, settings), _max_split(segments, settings))
    return tuple(sorted(found, key=lambda one: (not one.helps, -one.bytes)))


def releasable_bytes(segments: Iterable[Segment]) -> int:
    """What `empty_cache()` gives back: segments without live blocks, and of expandable ones whole pages without any.

    It waits for blocks that are pending, so that they are free by then.
    """
    released = 0
    for segment in segments:
        live = segment.states == BlockState.LIVE
        if not live.any():
            released += segment.total_bytes
        elif segment.expandable:
            released += _whole_pages(segment.sizes, live, _page(segment))
    return released


def _empty_cache(segments: Sequence[Segment]) -> Advice:
    released = releasable_bytes(segments)
    pending = sum(one.bytes_in(BlockState.PENDING) for one in segments)
    stuck = sum(int(one.sizes[one.states != BlockState.LIVE].sum()) for one in segments) - released
    reason = f"{_mib(released)} are in segments (or whole pages of expandable ones) that hold nothing live"
    if stuck:
        reason += f"; {_mib(max(0, stuck))} that are free stay, beside live blocks in the same segment"
    if pending:
        reason += f". It waits for the {_mib(pending)} that other streams still use"
    if released:
        reason += ". The next requests have to ask the driver again, which is slow"
    return Advice("empty_cache", released > 0, released, None, "torch.cuda.empty_cache()", reason)


def _expandable(segments: Sequence[Segment], settings: Settings) -> Advice:
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    plain = [one for one in segments if not one.expandable]
    if settings.expandable_segments or (segments and not plain):
        return Advice("expandable_segments", False, 0, None, setting, "it is on already")
    kept = same = packed = 0
    for group in _by_use(plain):
        page = _page(group[0])
        whole = -(-sum(one.total_bytes for one in group) // page) * page  # pages are mapped whole
        sizes = np.concatenate([one.sizes for one in group])
        live = np.concatenate([one.states == BlockState.LIVE for one in group])
        occupied = int(sizes[live].sum())
        kept += sum(one.total_bytes for one in group) - releasable_bytes(group)
        same += whole - _whole_pages(sizes, live, page, whole)
        packed += -(-occupied // page) * page
    least, most = max(0, kept - same), max(0, kept - packed)
    reason = (
        f"after empty_cache() {_mib(kept)} stay reserved. With today's blocks end to end in one growing segment a "
        f"stream and size class, {_mib(same)} would; had they been placed side by side from the start, {_mib(packed)}. "
        "It holds for a new process"
    )
    if most == 0:
        reason = f"after empty_cache() {_mib(kept)} stay reserved, which is what the live blocks need in any layout"
    return Advice("expandable_segments", most > 0, least, most, setting, reason)


def _max_split(segments: Sequence[Segment], settings: Settings) -> Advice:
    if settings.expandable_segments or any(one.expandable for one in segments):
        return Advice(
            "max_split_size",
            False,
            0,
            None,
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb",
            "with expandable segments there is little to be split; both together made reserved memory grow "
            "(pytorch#193400)",
        )
    gains = {limit: _split_gain(segments, limit) for limit in SPLIT_CANDIDATES}
    limit = max(gains, key=lambda one: (gains[one], one))
    gain, setting = gains[limit], f"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:{limit // MIB}"
    if gain <= 0:
        reason = "no segment is large and split among blocks that would be better off in segments of their own"
        return Advice("max_split_size", False, 0, None, setting, reason)
    reason = (
        f"segments of {limit // MIB} MiB and more that hold only smaller live blocks would be whole and could be given "
        f"back, {_mib(gain)} more than those blocks need elsewhere. An estimate: it holds for a new process with the "
        "same requests, and requests above the limit may then fail to find a block that fits"
    )
    return Advice("max_split_size", True, 0, gain, setting, reason)


def _split_gain(segments: Sequence[Segment], limit: int) -> int:
    """Bytes that would be given back were no block of `limit` or more ever split, less what moves elsewhere."""
    gain = 0
    displaced: dict[tuple[int, int], list[NDArray[np.int64]]] = defaultdict(list)
    for segment in segments:
        live = segment.sizes[segment.states != BlockState.FREE]
        if segment.kind == "small" or segment.total_bytes < limit or live.size == 0 or (live >= limit).any():
            continue
        gain += segment.total_bytes
        displaced[segment.device, segment.stream].append(live)
    for blocks in displaced.values():
        sizes = np.concatenate(blocks)
        shared = int(sizes[sizes < OWN_SEGMENT].sum())
        own = sizes[sizes >= OWN_SEGMENT]
        gain -= -(-shared // LARGE_PAGE) * LARGE_PAGE + int((-(-own // ROUNDING) * ROUNDING).sum())
    return gain


def _by_use(segments: Iterable[Segment]) -> list[list[Segment]]:
    groups: dict[tuple[int, int, str], list[Segment]] = defaultdict(list)
    for segment in segments:
        groups[segment.device, segment.stream, segment.kind].append(segment)
    return list(groups.values())


def _page(segment: Segment) -> int:
    return SMALL_PAGE if segment.kind == "small" else LARGE_PAGE


def _whole_pages(sizes: NDArray[np.int64], live: NDArray[np.bool_], page: int, total: int | None = None) -> int:
    """Bytes of pages, counted from the start of the first block, that no live block touches.

    Up to the end of the last block, or up to `total`.
    """
    ends = np.cumsum(sizes)
    if total is None:
        total = int(ends[-1]) if ends.size else 0
    gap_starts = np.concatenate(([0], ends[live]))
    gap_ends = np.concatenate(((ends - sizes)[live], [total]))
    # Pages rather than bytes are counted from here on: a page belongs to a gap that holds all of it.
    pages = gap_ends // page - -(-gap_starts // page)
    return int(pages.clip(min=0).sum()) * page


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
