"""How a pool's blocks live: the histograms that the shim keeps, and how blocks share pages of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from fastapi import FastAPI, Path, Query, Response
from numpy.typing import NDArray

from agent.sampling.model import PoolSample
from agent.web.cells import counts_by_cell
from agent.web.errors import json_response
from agent.wire.profile import Durations, PageOccupancy, PoolProfile
from engine_shim.layout import BlockState
from engine_shim.snapshot import MapSnapshot

PAGE_BYTES = 2 * 2**20  # CUDA's granularity of mapped memory
MAX_PAGE_BYTES = 2**34
TENTHS = 10

PoolId = Annotated[str, Path(description="id of a pool, or of an engine with one", max_length=512)]


def add_profile(app: FastAPI, sample: Callable[[str], PoolSample]) -> None:
    """`sample` finds the pool of an id, or raises ApiError."""

    @app.get("/v1/engines/{id}/profile", response_model=PoolProfile, tags=["engines"])
    async def profile(
        id: PoolId,
        page_bytes: Annotated[int, Query(ge=1, le=MAX_PAGE_BYTES, description="of one page of memory")] = PAGE_BYTES,
    ) -> Response:
        """How long blocks live, lie idle and wait for reuse; and how full pages of memory are."""
        return json_response(pool_profile(sample(id), page_bytes))


def pool_profile(sample: PoolSample, page_bytes: int = PAGE_BYTES) -> PoolProfile:
    """Everything of the last whole snapshot."""
    snapshot = sample.snapshot
    return PoolProfile(
        id=sample.id,
        sequence=snapshot.sequence,
        lifetime=_durations(snapshot, "lifetime"),
        idle_before_evict=_durations(snapshot, "idle_before_evict"),
        reuse_gap=_durations(snapshot, "reuse_gap"),
        pages=_pages(snapshot, page_bytes) if sample.fragmentation_known else None,
    )


def _durations(snapshot: MapSnapshot, name: str) -> Durations | None:
    kept = snapshot.histograms.get(name)
    if kept is None:
        return None
    return Durations(bounds_seconds=list(kept.bounds_seconds), counts=list(kept.counts), sum_seconds=kept.sum_seconds)


def _pages(snapshot: MapSnapshot, page_bytes: int) -> PageOccupancy | None:
    """Each layer has a tensor of its own, in which a block is a layer's share of its bytes."""
    in_layers = [group.bytes_per_block // group.layers for group in snapshot.groups if group.layers]
    each = max(in_layers, default=snapshot.identity.block_bytes)
    if each <= 0:
        return None
    per_page = max(1, page_bytes // each)
    return page_occupancy(snapshot.states, per_page, page_bytes=page_bytes, block_bytes=each, per_layer=bool(in_layers))


def page_occupancy(
    states: NDArray[np.uint8], per_page: int, *, page_bytes: int, block_bytes: int, per_layer: bool
) -> PageOccupancy:
    """Count pages of `per_page` (at least 1) blocks by how many of their blocks are held."""
    pages = -(-states.size // per_page)
    counts = counts_by_cell(states, per_page, pages)
    sizes = np.diff(np.arange(pages, dtype=np.int64) * per_page, append=states.size)
    free = counts[BlockState.FREE]
    held = sizes - free - counts[BlockState.CACHED]
    tenths = -(-held[held > 0] * TENTHS // sizes[held > 0])
    return PageOccupancy(
        page_bytes=page_bytes,
        block_bytes=block_bytes,
        per_layer=per_layer,
        blocks_per_page=per_page,
        pages=pages,
        free_pages=int((free == sizes).sum()),
        evictable_pages=int(((held == 0) & (free < sizes)).sum()),
        by_held_tenth=np.bincount(tenths, minlength=TENTHS + 1)[1:].tolist(),
    )
