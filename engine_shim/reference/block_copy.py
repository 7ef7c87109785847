"""Copies whole blocks between places of one KV cache: coalesced, in bounded memory, as if all were read first.

A block is one row of the cache's storage. On the host a run of neighbours is one memmove, called on the mapping
itself: of all calls that Python has for it, that one costs the least beside the bytes. On other devices everything is
one gather and one scatter on the current stream, in order with the engine's own work, or a few where temporary memory
is short.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import repeat, starmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Blocks = NDArray[np.int64]
Saved = NDArray[np.void] | Tensor | None  # contents of blocks, as `save` gave them

MAX_TEMPORARY_BYTES = 64 << 20
_STASH = -1  # stands for the block that breaks a cycle


class BlockCopier:
    """Copies within one storage, whose first dimension is blocks; `memory` is what it lies in, on the host."""

    def __init__(self, blocks: Tensor, memory: mmap.mmap | None, *, max_bytes: int = MAX_TEMPORARY_BYTES) -> None:
        """`max_bytes` of temporary memory on a device. At least one block is copied at once."""
        rows = blocks.view(len(blocks), -1)
        self._memory = memory
        self._block_bytes = rows[0].nbytes
        # Bytes are moved, not numbers: as few and as large elements as there can be.
        self._rows = rows.view(torch.int64) if self._block_bytes % 8 == 0 else rows
        self._max_bytes = max_bytes
        self._written = np.zeros(len(blocks), np.bool_)
        self._items = self._room = np.empty(0, np.void)
        if memory is not None:
            self._items = np.frombuffer(memory, np.dtype((np.void, self._block_bytes)), len(blocks))

    def copy(self, sources: Blocks, destinations: Blocks) -> None:
        """Copy block `sources[i]` to `destinations[i]`, distinct, as if all were read before any is written."""
        if not len(sources):
            return
        overlap = self._overlap(sources, destinations)
        if self._memory is None:
            self._copy_on_device(sources, destinations, overlap)
        elif overlap:
            steps = _ordered(zip(sources.tolist(), destinations.tolist(), strict=True))
            _copy_in_order(self._memory, self._block_bytes, steps)
        else:
            _copy_runs(self._memory, self._block_bytes, sources, destinations)

    def save(self, blocks: Blocks) -> Saved:
        """The contents of blocks, copied out: on the host, into memory that is kept, and theirs until the next call.
        Takes as many bytes as the blocks have."""
        if not len(blocks):
            return None
        if self._memory is None:
            return self._rows.index_select(0, self._index(blocks))
        if len(self._room) < len(blocks):  # fresh memory for each would cost more, in page faults, than the copies do
            self._room = np.empty(len(blocks), self._items.dtype)
        room = self._room[: len(blocks)]
        self._items.take(blocks, out=room, mode="clip")  # the mode that copies straight to `out`
        return room

    def restore(self, saved: Saved, blocks: Blocks) -> None:
        """Write saved contents to blocks, in the order in which they were saved."""
        if saved is None:
            return
        if isinstance(saved, Tensor):
            self._rows.index_copy_(0, self._index(blocks), saved)
        else:
            self._items[blocks] = saved

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """A digest of each block's contents over all layers."""
        if self._memory is not None:
            return [blake2b(self._items[block : block + 1].data, digest_size=16).digest() for block in blocks]
        rows = (self._rows[block].view(torch.uint8).cpu().numpy() for block in blocks)
        return [blake2b(row.data, digest_size=16).digest() for row in rows]

    def settle(self) -> None:
        """Wait until everything that was asked for is done."""
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream(self._rows.device).synchronize()

    def _overlap(self, sources: Blocks, destinations: Blocks) -> bool:
        """Is a block both read and written? Not where no write lies between the reads, as of a plan's moves. Else asked
        of a mask, which costs a tenth of a sort where copies are many."""
        between = destinations >= sources.min()
        between &= destinations <= sources.max()
        if not between.any():
            return False
        written = self._written
        try:
            written[destinations] = True
            return bool(written[sources].any())
        finally:
            written[destinations] = False

    def _index(self, blocks: Blocks) -> Tensor:
        return torch.from_numpy(blocks).to(self._rows.device)

    def _copy_on_device(self, sources: Blocks, destinations: Blocks, overlap: bool) -> None:
        at_once = max(1, self._max_bytes // self._block_bytes)
        if len(sources) <= at_once or not overlap:
            pieces = [
                (sources[i : i + at_once], destinations[i : i + at_once]) for i in range(0, len(sources), at_once)
            ]
        else:
            # Too much for one gather: reads must then come before the writes that undo them, piece by piece.
            pieces = list(_pieces(_ordered(zip(sources.tolist(), destinations.tolist(), strict=True)), at_once))
        kept = self._rows[:0]  # what was gathered last, or stashed
        for source, destination in pieces:
            gathered = kept if source[0] == _STASH else self._rows.index_select(0, self._index(source))
            if destination[0] == _STASH:
                kept = gathered
            else:
                self._rows.index_copy_(0, self._index(destination), gathered)


def _copy_runs(memory: mmap.mmap, size: int, sources: Blocks, destinations: Blocks) -> None:
    """One memmove for each run of blocks of `size` bytes in which both sides follow their neighbours.

    Between small blocks that lie singly, a loop in Python would cost as much as their bytes do, and lists of numbers
    that the copies drive out of the caches a good part of it: the calls are made from C, by numbers made for each.
    """
    joined = sources[1:] - sources[:-1] == 1
    joined &= destinations[1:] - destinations[:-1] == 1
    lengths: Iterable[int] = repeat(size)
    if joined.any():
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        lengths = ((np.append(starts[1:], len(sources)) - starts) * size).data
        sources, destinations = sources[starts], destinations[starts]
    moves = zip((destinations * size).data, (sources * size).data, lengths, strict=False)
    deque(starmap(memory.move, moves), maxlen=0)


def _copy_in_order(memory: mmap.mmap, size: int, steps: Iterable[tuple[int, int]]) -> None:
    stash = b""
    for source, destination in steps:
        if destination == _STASH:
            stash = memory[source * size : (source + 1) * size]
        elif source == _STASH:
            memory[destination * size : (destination + 1) * size] = stash
        else:
            memory.move(destination * size, source * size, size)


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
