"""The paged KV cache itself: one storage in which a block is one contiguous row, with a view of it for each layer."""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.block_copy import BlockCopier
from engine_shim.reference.geometry import Geometry
from engine_shim.reference.quantization import stored_format


def choose_device(name: str) -> torch.device:
    """`cpu`, `cuda`, or `auto` for CUDA where a card is there; SettingsError where the asked-for device is not."""
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not known; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError("device cuda was asked for and torch sees no CUDA card; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


class KVCache:
    """Keys and values of `num_blocks` blocks; `keys[layer]` is (blocks, block_tokens, kv_heads, elements).

    All lie in one storage, `blocks`, of shape (blocks, layers, 2, block_tokens, kv_heads, elements): a block is one
    row of `block_bytes`, so that copying, sending or giving back a run of blocks is one piece of memory. `elements` are
    those of a plain dtype, one for each of head_dim, or the bytes of codes and scales (`format`). A layer's keys
    are a strided view of it. On the CPU the storage is a private anonymous mapping, of which whole pages can be given
    back to the host. All memory is touched at once: a pool that does not fit fails here and not in the middle of a run.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        block_tokens: int = 16,
        dtype: str = "float16",
        device: torch.device | None = None,
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise SettingsError(f"a pool of {num_blocks} blocks of {block_tokens} tokens holds nothing; give 1 or more")
        self.geometry, self.num_blocks, self.block_tokens = geometry, num_blocks, block_tokens
        self.format = stored_format(dtype, geometry.head_dim)
        element = self.format.element
        self.device = device or torch.device("cpu")
        self.memory: mmap.mmap | None = None  # of the storage, where it lies on the host
        self._check_room()
        shape = (
            num_blocks,
            geometry.layers,
            2,
            block_tokens,
            geometry.kv_heads,
            self.format.elements(geometry.head_dim),
        )
        if self.device.type == "cpu":
            self.memory = _map_memory(math.prod(shape) * element.itemsize)
            self.blocks = torch.frombuffer(self.memory, dtype=element, count=math.prod(shape)).view(shape).zero_()
        else:
            self.blocks = torch.zeros(shape, dtype=element, device=self.device)
        self.keys = [self.blocks[:, layer, 0] for layer in range(geometry.layers)]
        self.values = [self.blocks[:, layer, 1] for layer in range(geometry.layers)]
        self._rows = self.blocks.view(-1, shape[-2] * shape[-1])
        self.copier = BlockCopier(self.blocks, self.memory)
        self.copied_blocks = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache, as they lie in a block: the keys of a layer, its values, those of the next."""
        return [tensor for layer in zip(self.keys, self.values, strict=True) for tensor in layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.blocks.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.nbytes // self.num_blocks

    def rows(self, tensor: int) -> Tensor:
        """Tokens of one of `tensors`, by its index there, as rows of kv_heads * elements that `slots` are numbers of.

        Between a block's rows of this tensor and the next block's lie those of the other tensors: it is read and
        written by slot only.
        """
        return self._rows[tensor * self.block_tokens :]

    def write(self, tensor: int, slots: Tensor, vectors: Tensor) -> None:
        """Store vectors (tokens, kv_heads, head_dim), of any float dtype, at `slots` of one of `tensors`."""
        self.rows(tensor).index_copy_(0, slots, self.format.encode(vectors).flatten(1))

    def read(self, tensor: int, slots: Tensor) -> Tensor:
        """What `slots` of one of `tensors` read as, (tokens, kv_heads, head_dim)."""
        stored = self.rows(tensor).index_select(0, slots).view(len(slots), self.geometry.kv_heads, -1)
        return self.format.decode(stored, self.geometry.head_dim)

    def slots(self, table: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        """Where a sequence's tokens start..stop-1 lie, through its block table: rows of any tensor."""
        first, last = start // self.block_tokens, -(-stop // self.block_tokens)
        slots = self.block_slots(np.asarray(table[first:last], dtype=np.int64))
        offset = first * self.block_tokens
        return np.asarray(slots.reshape(-1)[start - offset : stop - offset])

    def batch_slots(self, spans: Sequence[tuple[array[int], int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the tokens start..stop-1 of several sequences lie, one sequence after the other, each with its (table,
        start, stop); and the tokens' positions. A decoding batch has many spans of one token: no step for each."""
        size = self.block_tokens
        starts, stops = np.array([(start, stop) for _, start, stop in spans], np.int64).T
        counts = stops - starts
        positions = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        pieces = [table[start // size : -(-stop // size)] for table, start, stop in spans]
        blocks = np.frombuffer(b"".join(pieces), np.int64)
        lengths = np.array([len(piece) for piece in pieces])
        where = np.repeat(np.cumsum(lengths) - lengths - starts // size, counts) + positions // size
        return blocks[where] * (2 * self.geometry.layers * size) + positions % size, positions

    def block_slots(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of whole blocks, (blocks, block_tokens)."""
        rows_a_block = 2 * self.geometry.layers * self.block_tokens
        return np.asarray(blocks[:, None] * rows_a_block + np.arange(self.block_tokens))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) over all layers, as if all were read before any is written.

        Destinations are distinct.
        """
        pairs = np.array(copies, np.int64).reshape(-1, 2)
        self.copier.copy(pairs[:, 0], pairs[:, 1])
        self.copied_blocks += len(copies)

    def read_blocks(self, first: int, count: int) -> memoryview:
        """The bytes of `count` neighbouring blocks on the host, block after block, as they lie; not copied there."""
        flat = self.blocks[first : first + count].view(torch.uint8).reshape(-1).cpu()
        data: memoryview = flat.numpy().data
        return data

    def _check_room(self) -> None:
        needed = self.num_blocks * self.block_tokens * self.format.token_bytes(self.geometry)
        if self.device.type == "cuda":
            available: int | None = torch.cuda.mem_get_info(self.device)[0]
        else:
            available = _available_host_bytes()
        if available is not None and needed > available:
            raise SettingsError(
                f"{self.num_blocks} blocks of {self.geometry.name} need {needed >> 20} MiB and {available >> 20} MiB "
                f"are available on {self.device.type}; use fewer --blocks or a smaller --model-geometry"
            )


def coalesce(copies: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, int]]:
    """Join copies (source, destination) whose neighbours follow each other into (source, destination, count)."""
    run: tuple[int, int, int] | None = None
    for source, destination in copies:
        if run is not None:
            first, target, count = run
            if source == first + count and destination == target + count:
                run = (first, target, count + 1)
                continue
            yield run
        run = (source, destination, 1)
    if run is not None:
        yield run


def _map_memory(size: int) -> mmap.mmap:
    # Private: of a shared anonymous mapping the kernel keeps the pages that are given back.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A core dump need not hold gigabytes of keys; and the kernel keeps such mappings apart from other memory.
    memory.madvise(mmap.MADV_DONTDUMP)
    with suppress(OSError):  # a kernel without huge pages has none to give
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _available_host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
