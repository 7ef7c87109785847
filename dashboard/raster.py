"""Pictures of many-block cells: shares to stripes, stripes to an indexed PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_STRIPES = 8
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def stripes(counts: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The states of each cell as `width` stripes, shares rounded by largest remainder.

    `counts` is (states, cells), blocks of each state in each cell; the result is (cells, width), row numbers of
    `counts` in ascending order. A state that is present gets at least one stripe, because one used block breaks a free
    run however few its share is. `width` must reach the number of states present in any cell; else ValueError.
    """
    states, cells = counts.shape
    present = counts > 0
    if cells and int(present.sum(axis=0).max()) > width:
        raise ValueError(f"{width} stripes cannot show {int(present.sum(axis=0).max())} states in one cell")
    quota = counts * width / np.maximum(counts.sum(axis=0), 1)
    given = np.maximum(np.floor(quota).astype(np.int64), present)
    column = np.arange(cells)
    while (surplus := given.sum(axis=0) > width).any():
        widest = np.where(given > 1, given - quota, -np.inf).argmax(axis=0)
        given[widest[surplus], column[surplus]] -= 1
    while (short := (given.sum(axis=0) < width) & present.any(axis=0)).any():
        neediest = np.where(present, quota - given, -np.inf).argmax(axis=0)
        given[neediest[short], column[short]] += 1
    edges = given.cumsum(axis=0)
    slots = np.arange(width)[None, :, None]
    return np.asarray((slots >= edges[:, None, :]).sum(axis=0).T.clip(max=states - 1), dtype=np.uint8)


def indexed_png(pixels: NDArray[np.uint8], colours: Sequence[str]) -> bytes:
    """A PNG of `pixels`, (height, width) indices into `colours` as #rrggbb; indices past the last are transparent."""
    height, width = pixels.shape
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours) + b"\x00\x00\x00"
    clear = len(colours)
    rows = np.zeros((height, width + 1), dtype=np.uint8)  # each row starts with its filter type, 0: none
    rows[:, 1:] = np.minimum(pixels, clear)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, colour type 3: palette
    return b"".join(
        (
            _PNG_SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette),
            _chunk(b"tRNS", b"\xff" * clear + b"\x00"),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
