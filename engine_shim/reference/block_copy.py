"""Copies whole blocks between places of one KV cache: coalesced, in bounded memory, as if all were read first.

On the host the way depends on how long a run of neighbours is: one memmove in each tensor, one strided copy through all
tensors, or, where a call costs more than the bytes, a gather into a buffer that stays in the processor's cache and a
scatter from there. On other devices each layer is one gather and one scatter on the current stream, in order with the
engine's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Blocks = NDArray[np.int64]
Saved = NDArray[np.uint8] | Sequence[Tensor]  # contents of blocks, as `save` gave them

MAX_TEMPORARY_BYTES = 64 << 20
# Bytes of a run in one tensor from which on the next way is quicker: measured on x86-64, with cold caches.
_STRIDED_BYTES = 2048
_MEMMOVE_BYTES = 8192
_FEW_TENSORS = 24  # with fewer, a strided copy through all of them is not worth its call
_BUFFER_BYTES = 256 << 10  # of the gather on the host: a part of a second-level cache
_STASH = -1  # stands for the block that breaks a cycle


class BlockCopier:
    """Copies within one cache: of the host, where `host` has its bytes as (tensors, blocks, bytes of a block in one);
    else in `planes`, what one gather and one scatter may take at once, each (parts, blocks, ...)."""

    def __init__(
        self,
        planes: Sequence[Tensor],
        host: NDArray[np.uint8] | None,
        num_blocks: int,
        *,
        max_bytes: int = MAX_TEMPORARY_BYTES,
    ) -> None:
        self._planes = [plane.view(plane.shape[0], num_blocks, -1) for plane in planes]
        self._host = host
        self._size = 0 if host is None else host.shape[2]
        self._memories: list[memoryview] = []
        if host is not None:
            self._memories = [tensor.reshape(-1).data for tensor in host]
            words = torch.int64 if self._size % 8 == 0 else torch.uint8
            self._strided = torch.from_numpy(host).view(words)
            self._items = [tensor.reshape(-1).view(np.dtype((np.void, self._size))) for tensor in host]
        self._max_bytes = max_bytes

    def copy(self, sources: Blocks, destinations: Blocks) -> None:
        """Copy block `sources[i]` to `destinations[i]`, distinct, as if all were read before any is written."""
        if not len(sources):
            return
        overlap = bool(np.isin(sources, destinations).any())
        if self._host is None:
            self._copy_planes(sources, destinations, overlap)
        elif overlap:
            _copy_in_order(self._host, _ordered(zip(sources.tolist(), destinations.tolist(), strict=True)))
        else:
            self._copy_on_host(sources, destinations)

    def save(self, blocks: Blocks) -> Saved:
        """The contents of blocks, copied out. Takes as many bytes as the blocks have."""
        if not len(blocks):
            return []
        if self._host is None:
            where = torch.from_numpy(blocks).to(self._planes[0].device)
            return [plane.index_select(1, where) for plane in self._planes]
        saved = np.empty((self._host.shape[0], len(blocks), self._size), np.uint8)
        for first, target, length in _steps(blocks, np.arange(len(blocks))):
            saved[:, target : target + length] = self._host[:, first : first + length]
        return saved

    def restore(self, saved: Saved, blocks: Blocks) -> None:
        """Write saved contents to blocks, in the order in which they were saved."""
        if not len(saved):
            return
        if isinstance(saved, np.ndarray) and self._host is not None:
            for first, target, length in _steps(np.arange(len(blocks)), blocks):
                self._host[:, target : target + length] = saved[:, first : first + length]
            return
        where = torch.from_numpy(blocks).to(self._planes[0].device)
        for plane, contents in zip(self._planes, saved, strict=True):
            plane.index_copy_(1, where, torch.as_tensor(contents))

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """A digest of each block's contents over all tensors."""
        digests = []
        for block in blocks:
            if self._host is not None:
                contents = self._host[:, block].tobytes()
            else:
                parts = [
                    plane[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for plane in self._planes
                ]
                contents = b"".join(parts)
            digests.append(blake2b(contents, digest_size=16).digest())
        return digests

    def settle(self) -> None:
        """Wait until everything that was asked for is done."""
        if self._planes and self._planes[0].device.type == "cuda":
            torch.cuda.current_stream(self._planes[0].device).synchronize()

    # On the host

    def _copy_on_host(self, sources: Blocks, destinations: Blocks) -> None:
        firsts, targets, lengths = _runs(sources, destinations)
        size = lengths * self._size
        strided_to = _MEMMOVE_BYTES if len(self._memories) > _FEW_TENSORS else _STRIDED_BYTES
        long, short = size >= strided_to, size < _STRIDED_BYTES
        if long.any():
            slices = _slices(firsts[long] * self._size, targets[long] * self._size, size[long])
            for memory in self._memories:
                for read, write in slices:
                    memory[write] = memory[read]
        between = ~long & ~short
        if between.any():
            strided = self._strided
            runs = zip(firsts[between].tolist(), targets[between].tolist(), lengths[between].tolist(), strict=True)
            for first, target, length in runs:
                strided.narrow(1, target, length).copy_(strided.narrow(1, first, length))
        if short.any():
            single = np.repeat(short, lengths)
            for items in self._items:
                _gather_and_scatter(items, sources[single], destinations[single], self._size)

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


def _slices(firsts: Blocks, targets: Blocks, lengths: Blocks) -> list[tuple[slice, slice]]:
    """What to read and where to write it: made once, and used for every tensor."""
    reads = map(slice, firsts.tolist(), (firsts + lengths).tolist())
    return list(zip(reads, map(slice, targets.tolist(), (targets + lengths).tolist()), strict=True))


def _steps(sources: Blocks, destinations: Blocks) -> Iterable[tuple[int, int, int]]:
    firsts, targets, lengths = _runs(sources, destinations)
    return zip(firsts.tolist(), targets.tolist(), lengths.tolist(), strict=True)


def _copy_in_order(host: NDArray[np.uint8], steps: Iterable[tuple[int, int]]) -> None:
    stash = host[:, :0]
    for source, destination in steps:
        if destination == _STASH:
            stash = host[:, source].copy()
        else:
            host[:, destination] = stash if source == _STASH else host[:, source]


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
