"""What the agent says over HTTP of how a pool's blocks live: how long, and how they share pages of memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent.wire import WireModel


class Durations(WireModel):
    """A histogram over every block since the engine's start."""

    bounds_seconds: list[float]
    counts: list[int]  # counts[i]: values <= bounds_seconds[i] and above the bound before; one more: the rest
    sum_seconds: float


class PageOccupancy(WireModel):
    """The pool's blocks in pages of memory, as an elastic allocator would give them back: a page at a time.

    A block is *held* while it is used, pinned, reserved or of unknown state. Pages are cut from block 0 on; the last
    one may be short.
    """

    page_bytes: int
    block_bytes: int  # of one block in one layer's tensor where the map tells the layers; else over all of them
    per_layer: bool
    blocks_per_page: int  # at least 1: of a larger block, the block is the unit
    pages: int
    free_pages: int  # every block free: could be given back now
    evictable_pages: int  # no block held, and some cached: could be given back for their prefixes
    by_held_tenth: list[int]  # ten numbers, of pages with a held block: held share in (0, 0.1], (0.1, 0.2], ...


class PoolProfile(WireModel):
    """Histograms are null where the map keeps none; pages, where blocks have no bytes or the map means nothing."""

    schema_: Literal["kvatlas.profile/v1"] = Field(default="kvatlas.profile/v1", alias="schema")
    id: str
    sequence: int
    lifetime: Durations | None  # from allocation until free or cached
    idle_before_evict: Durations | None  # of cached blocks that were evicted
    reuse_gap: Durations | None  # of cached blocks that a prefix hit took into use
    pages: PageOccupancy | None
