"""The paged KV cache itself: one tensor of keys and one of values a layer, blocks first, allocated and written."""

from __future__ import annotations

import math
import mmap
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

DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """`cpu`, `cuda`, or `auto` for CUDA where a card is there; SettingsError where the asked-for device is not."""
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not known; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError("device cuda was asked for and torch sees no CUDA card; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


class KVCache:
    """Keys and values of `num_blocks` blocks; `keys[layer]` is (blocks, block_tokens, kv_heads, head_dim).

    On the CPU all tensors lie in one anonymous mapping, so that a run of blocks is copied in all of them at once, and
    whole pages can be given back to the host. All memory is touched at once: a pool that does not fit fails here and
    not in the middle of a run.
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
        if dtype not in DTYPES:
            raise SettingsError(f"KV dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
        self.geometry, self.num_blocks, self.block_tokens = geometry, num_blocks, block_tokens
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.device = device or torch.device("cpu")
        self.memory: mmap.mmap | None = None  # on the host: all tensors, each `tensor_stride` bytes after the last
        self.tensor_stride = 0
        self._check_room()
        shape = (num_blocks, block_tokens, geometry.kv_heads, geometry.head_dim)
        planes: list[Tensor] = []
        host: NDArray[np.uint8] | None = None
        if self.device.type == "cpu":
            tensors, host = self._map_tensors(shape, 2 * geometry.layers)
            self.keys, self.values = tensors[: geometry.layers], tensors[geometry.layers :]
        else:
            # Keys and values of a layer are one piece, so that moving blocks is one gather and one scatter a layer.
            planes = [torch.zeros((2, *shape), dtype=self.dtype, device=self.device) for _ in range(geometry.layers)]
            self.keys = [plane[0] for plane in planes]
            self.values = [plane[1] for plane in planes]
        self.copier = BlockCopier(planes, host, num_blocks)
        self.copied_blocks = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache: keys of all layers, then values of all layers."""
        return self.keys + self.values

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.nbytes // self.num_blocks

    def rows(self, tensor: Tensor) -> Tensor:
        """One layer's tensor as (slots, kv_heads * head_dim); slot = block * block_tokens + offset in the block."""
        return tensor.view(self.num_blocks * self.block_tokens, -1)

    def slots(self, table: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        """Where a sequence's tokens start..stop-1 lie, through its block table."""
        first, last = start // self.block_tokens, -(-stop // self.block_tokens)
        blocks = np.asarray(table[first:last], dtype=np.int64)
        slots = blocks[:, None] * self.block_tokens + np.arange(self.block_tokens)
        offset = first * self.block_tokens
        return np.asarray(slots.reshape(-1)[start - offset : stop - offset])

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) over all layers, as if all were read before any is written.

        Destinations are distinct.
        """
        pairs = np.array(copies, np.int64).reshape(-1, 2)
        self.copier.copy(pairs[:, 0], pairs[:, 1])
        self.copied_blocks += len(copies)

    def read_blocks(self, first: int, count: int) -> Iterable[memoryview]:
        """The bytes of `count` neighbouring blocks, tensor by tensor, as they lie on the host."""
        for tensor in self.tensors:
            flat = tensor[first : first + count].contiguous().view(torch.uint8).reshape(-1).cpu()
            yield flat.numpy().data

    def _map_tensors(self, shape: tuple[int, ...], count: int) -> tuple[list[Tensor], NDArray[np.uint8]]:
        """So many zeroed tensors of that shape in one mapping; and their bytes as (tensors, blocks, bytes)."""
        elements = math.prod(shape)
        size = elements * self.dtype.itemsize
        self.tensor_stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        # Private: of a shared anonymous mapping the kernel keeps the pages that are given back.
        memory = mmap.mmap(-1, count * self.tensor_stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memory
        # A core dump need not hold gigabytes of keys; and the kernel keeps such mappings apart from other memory.
        memory.madvise(mmap.MADV_DONTDUMP)
        with suppress(OSError):  # a kernel without huge pages has none to give
            memory.madvise(mmap.MADV_HUGEPAGE)
        offsets = range(0, count * self.tensor_stride, self.tensor_stride)
        tensors = [
            torch.frombuffer(memory, dtype=self.dtype, count=elements, offset=offset).view(shape).zero_()
            for offset in offsets
        ]
        rows = np.frombuffer(memory, np.uint8).reshape(count, self.tensor_stride)[:, :size]
        return tensors, rows.reshape(count, shape[0], size // shape[0])

    def _check_room(self) -> None:
        needed = self.num_blocks * self.block_tokens * self.geometry.token_bytes(self.dtype.itemsize)
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


def _available_host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
