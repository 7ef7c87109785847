"""Copies whole blocks between places of one KV cache: coalesced, in bounded memory, as if all were read first.

On the host a run of neighbours is one memmove; pieces below a few KiB, where a call costs more than the bytes, are
gathered into a buffer that stays in the processor's cache and scattered from there. On other devices each layer is
one gather and one scatter on the current stream, in order with the engine's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Blocks = NDArray[np.int64]

MAX_TEMPORARY_BYTES = 64 << 20
_WHOLE_RUN_BYTES = 4096  # from here on a memmove of its own is quicker than gather and scatter; measured on x86-64
_BUFFER_BYTES = 256 << 10  # of the gather on the host: a part of a second-level cache
_STASH = -1  # stands for the block that breaks a cycle


class BlockCopier:
    """Copies within one cache. `tensors` all have blocks first; `planes` are what one gather and one scatter may take
    at once, each (parts, blocks, ...); `host` are the bytes of each tensor where they lie on the host, else empty."""

    def __init__(
        self,
        planes: Sequence[Tensor],
        host: Sequence[memoryview],
        num_blocks: int,
        *,
        max_bytes: int = MAX_TEMPORARY_BYTES,
    ) -> None:
        self._planes = [plane.view(plane.shape[0], num_blocks, -1) for plane in planes]
        self._host = [(memory.cast("B"), memory.nbytes // num_blocks) for memory in host]
        self._items = [
            np.frombuffer(memory, np.dtype((np.void, size))) if size < _WHOLE_RUN_BYTES else None
            for memory, size in self._host
        ]
        self._max_bytes = max_bytes

    def copy(self, sources: Blocks, destinations: Blocks) -> None:
        """Copy block `sources[i]` to `destinations[i]`, distinct, as if all were read before any is written."""
        if not len(sources):
            return
        overlap = bool(np.isin(sources, destinations).any())
        if not self._host:
            self._copy_planes(sources, destinations, overlap)
        elif overlap:
            self._copy_in_order(_ordered(zip(sources.tolist(), destinations.tolist(), strict=True)))
        else:
            self._copy_on_host(sources, destinations)

    def save(self, blocks: Blocks) -> list[Tensor]:
        """The contents of blocks, copied out: one tensor for each plane. Takes as many bytes as the blocks have."""
        where = torch.from_numpy(blocks)
        return [plane.index_select(1, where.to(plane.device)) for plane in self._planes] if len(blocks) else []

    def restore(self, saved: Sequence[Tensor], blocks: Blocks) -> None:
        """Write saved contents to blocks, in the order in which they were saved."""
        where = torch.from_numpy(blocks)
        for plane, contents in zip(self._planes, saved, strict=False):
            plane.index_copy_(1, where.to(plane.device), contents)

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """A digest of each block's contents over all tensors."""
        digests = []
        for block in blocks:
            digest = blake2b(digest_size=16)
            if self._host:
                for memory, size in self._host:
                    digest.update(memory[block * size : (block + 1) * size])
            else:
                for plane in self._planes:
                    digest.update(plane[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes())
            digests.append(digest.digest())
        return digests

    def settle(self) -> None:
        """Wait until everything that was asked for is done."""
        if self._planes and self._planes[0].device.type == "cuda":
            torch.cuda.current_stream(self._planes[0].device).synchronize()

    # On the host

    def _copy_on_host(self, sources: Blocks, destinations: Blocks) -> None:
        firsts, targets, lengths = _runs(sources, destinations)
        for (memory, size), items in zip(self._host, self._items, strict=True):
            whole = lengths * size >= _WHOLE_RUN_BYTES
            if whole.any():
                rows = zip(
                    (firsts[whole] * size).tolist(),
                    (targets[whole] * size).tolist(),
                    (lengths[whole] * size).tolist(),
                    strict=True,
                )
                for first, target, length in rows:
                    memory[target : target + length] = memory[first : first + length]
            if items is not None and not whole.all():
                short = np.repeat(~whole, lengths)
                _gather_and_scatter(items, sources[short], destinations[short], size)

    def _copy_in_order(self, steps: Iterable[tuple[int, int]]) -> None:
        steps = list(steps)
        for memory, size in self._host:
            stash = b""
            for source, destination in steps:
                if destination == _STASH:
                    stash = bytes(memory[source * size : (source + 1) * size])
                    continue
                contents = stash if source == _STASH else memory[source * size : (source + 1) * size]
                memory[destination * size : (destination + 1) * size] = contents

    # On a device

    def _copy_planes(self, sources: Blocks, destinations: Blocks, overlap: bool) -> None:
        device = self._planes[0].device
        widest = max(plane.shape[0] * plane[0, 0].nbytes for plane in self._planes)
        at_once = max(1, self._max_bytes // widest)
        if len(sources) <= at_once or not overlap:
            pieces = [
                (sources[i : i + at_once], destinations[i : i + at_once]) for i in range(0, len(sources), at_once)
            ]
        else:
            # Too much for one gather: reads must then come before the writes that undo them, piece by piece.
            pieces = list(_pieces(_ordered(zip(sources.tolist(), destinations.tolist(), strict=True)), at_once))
        indices = [tuple(None if p[0] == _STASH else torch.from_numpy(p).to(device) for p in piece) for piece in pieces]
        for plane in self._planes:
            kept = plane[:, :0]  # what was gathered last, or stashed
            for source, destination in indices:
                gathered = kept if source is None else plane.index_select(1, source)
                if destination is None:
                    kept = gathered
                else:
                    plane.index_copy_(1, destination, gathered)


def _runs(sources: Blocks, destinations: Blocks) -> tuple[Blocks, Blocks, Blocks]:
    """First source, first destination and length of each run in which both follow their neighbours."""
    breaks = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return sources[starts], destinations[starts], np.diff(starts, append=len(sources))


def _gather_and_scatter(items: NDArray[np.void], sources: Blocks, destinations: Blocks, size: int) -> None:
    count = max(1, _BUFFER_BYTES // size)
    buffer = np.empty(min(count, len(sources)), items.dtype)
    for start in range(0, len(sources), count):
        piece = sources[start : start + count]
        gathered = buffer[: len(piece)]
        # Clipping lets NumPy write to `out` directly; every index is in range.
        items.take(piece, out=gathered, mode="clip")
        items.put(destinations[start : start + count], gathered, mode="clip")


def _ordered(copies: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The copies (source, destination) in an order in which no block is overwritten before it was read.

    Cycles begin with a copy to _STASH and end with one from it. Destinations are distinct.
    """
    source_of = {destination: source for source, destination in copies if source != destination}
    unread: dict[int, int] = {}
    for source in source_of.values():
        unread[source] = unread.get(source, 0) + 1
    ready = [destination for destination in source_of if not unread.get(destination)]
    order: list[tuple[int, int]] = []
    while source_of:
        if not ready:  # only cycles are left: break one
            first = next(iter(source_of))
            order.append((first, _STASH))
            block = first
            while (source := source_of.pop(block)) != first:
                order.append((source, block))
                block = source
            order.append((_STASH, block))
            continue
        destination = ready.pop()
        source = source_of.pop(destination)
        order.append((source, destination))
        unread[source] -= 1
        if not unread[source] and source in source_of:
            ready.append(source)
    return order


def _pieces(order: Iterable[tuple[int, int]], at_once: int) -> Iterable[tuple[Blocks, Blocks]]:
    """Cut an order into pieces that may each be gathered, then scattered; what touches the stash stands alone."""
    piece: list[tuple[int, int]] = []
    for step in order:
        if piece and (_STASH in step or len(piece) == at_once):
            yield _columns(piece)
            piece = []
        if _STASH in step:
            yield _columns([step])
        else:
            piece.append(step)
    if piece:
        yield _columns(piece)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Blocks, Blocks]:
    columns = np.array(pairs, np.int64)
    return columns[:, 0], columns[:, 1]
