"""Codes the states of a pool's blocks for keeping: whole, or as what changed since the frame before.

Pure functions of arrays. A frame is one byte of kind, the number of blocks as a little-endian u4, and a zlib stream:

- WHOLE: one byte a block, or PACKED: two blocks a byte, the first in the low half, where all states are below 16;
- the same two with CHANGED: exclusive or with the frame before;
- SPARSE: a count u4, then the gaps between changed blocks, less one, as four planes of that many bytes, the lowest
  byte first, then their new states. Planes, because the upper bytes of gaps are nearly all 0.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from engine_shim.errors import KvatlasError
from engine_shim.layout import MAX_BLOCKS

States = NDArray[np.uint8]

WHOLE, PACKED, SPARSE, CHANGED = 0, 1, 2, 4
SPARSE_SHARE = 1 / 16  # of blocks that changed; with more, a difference of all blocks is the shorter one
LEVEL = 6
_HEAD = struct.Struct("<BI")
_COUNT = struct.Struct("<I")


class FrameCorrupt(KvatlasError):
    """A kept frame is none, or does not follow from the one before."""


def encode_frame(states: States, before: States | None = None) -> bytes:
    """`states`, (n,) for n >= 1; shorter where they resemble those `before`, also (n,)."""
    if before is None:
        return _whole(states, 0)
    changed = np.flatnonzero(states != before)
    if changed.size <= states.size * SPARSE_SHARE:
        return _sparse(states, changed)
    return min(_whole(states ^ before, CHANGED), _whole(states, 0), key=len)


def needs_before(data: bytes) -> bool:
    """Does a frame say only what changed?"""
    return bool(data) and bool(data[0] == SPARSE or data[0] & CHANGED)


def decode_frame(data: bytes, before: States | None = None) -> States:
    """The states, (n,), in an array of its own. Raises FrameCorrupt."""
    if len(data) < _HEAD.size:
        raise FrameCorrupt(f"{len(data)} bytes are no frame")
    kind, size = _HEAD.unpack_from(data)
    if not 1 <= size <= MAX_BLOCKS or kind not in (WHOLE, PACKED, SPARSE, CHANGED | WHOLE, CHANGED | PACKED):
        raise FrameCorrupt(f"kind {kind} with {size} blocks is no frame")
    if needs_before(data) and (before is None or before.size != size):
        had = "none is there" if before is None else f"that has {before.size}"
        raise FrameCorrupt(f"the changes of {size} blocks need the frame before, and {had}")
    if kind == SPARSE and before is not None:
        return _changed(data, size, before)
    body = _inflate(data, -(-size // 2) if kind & PACKED else size, exactly=True)
    states = np.frombuffer(body, np.uint8)
    if kind & PACKED:
        halves = np.empty((states.size, 2), np.uint8)
        halves[:, 0], halves[:, 1] = states & 15, states >> 4
        states = halves.ravel()[:size]
    return states ^ before if kind & CHANGED and before is not None else states.copy()


def _whole(states: States, flag: int) -> bytes:
    if int(states.max(initial=0)) > 15:
        return _frame(WHOLE | flag, states.size, states.tobytes())
    low, high = states[::2], states[1::2]
    packed = low.copy()
    packed[: high.size] |= high << 4
    return _frame(PACKED | flag, states.size, packed.tobytes())


def _sparse(states: States, changed: NDArray[np.intp]) -> bytes:
    gaps = (np.diff(changed, prepend=-1) - 1).astype("<u4")
    planes = gaps.view(np.uint8).reshape(-1, 4).T.tobytes()
    return _frame(SPARSE, states.size, _COUNT.pack(changed.size) + planes + states[changed].tobytes())


def _changed(data: bytes, size: int, before: States) -> States:
    body = _inflate(data, _COUNT.size + 5 * size)
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else -1
    if len(body) != _COUNT.size + 5 * count:
        raise FrameCorrupt(f"{len(body)} bytes do not hold {count} changes")
    planes = np.frombuffer(body, np.uint8, 4 * count, _COUNT.size).reshape(4, count)
    gaps = np.ascontiguousarray(planes.T).view("<u4").ravel().astype(np.int64)
    blocks = np.cumsum(gaps + 1) - 1
    if count and int(blocks[-1]) >= size:
        raise FrameCorrupt(f"block {int(blocks[-1])} changed in a pool of {size}")
    states = before.copy()
    states[blocks] = np.frombuffer(body, np.uint8, count, _COUNT.size + 4 * count)
    return states


def _frame(kind: int, size: int, body: bytes) -> bytes:
    return _HEAD.pack(kind, size) + zlib.compress(body, LEVEL)


def _inflate(data: bytes, most: int, *, exactly: bool = False) -> bytes:
    """What the stream holds, never more than `most` bytes of it: a damaged frame must not fill the memory."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(data[_HEAD.size :], most + 1)
    except zlib.error as error:
        raise FrameCorrupt(f"a frame cannot be unpacked: {error}") from error
    if not stream.eof or len(body) > most or (exactly and len(body) != most):
        raise FrameCorrupt(f"a frame holds {len(body)} bytes or more where {most} were expected")
    return body
