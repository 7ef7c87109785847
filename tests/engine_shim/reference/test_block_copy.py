"""Copies of whole blocks: as if all were read before any is written, whatever the pieces and the memory allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine_shim.reference.block_copy import BlockCopier
from engine_shim.reference.geometry import TEST_GEOMETRY
from engine_shim.reference.kv_cache import KVCache, choose_device

BLOCKS = 24


def numbered(device: str = "cpu") -> KVCache:
    """A cache in which every value of block b is b, with the tensor's number behind the point."""
    cache = KVCache(TEST_GEOMETRY, BLOCKS, dtype="float32", device=choose_device(device))
    for index, tensor in enumerate(cache.tensors):
        tensor.copy_((torch.arange(BLOCKS)[:, None, None, None] + index / 100).expand(tensor.shape))
    return cache


def contents(cache: KVCache) -> list[int]:
    """Which block's contents each block holds now, the same in all of every tensor."""
    held = [tensor.reshape(BLOCKS, -1).cpu() - index / 100 for index, tensor in enumerate(cache.tensors)]
    first = held[0][:, 0].round()
    for values in held:
        assert torch.allclose(values, first[:, None].expand_as(values), atol=1e-3)
    return [int(value) for value in first.tolist()]


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(1, 9)],
        [(1, 9), (2, 10), (3, 11), (7, 12), (8, 2)],
        [(1, 2), (2, 3), (3, 4)],
        [(4, 12), (5, 13), (6, 14), (14, 4), (15, 5)],
        [(3, 4), (2, 3), (1, 2)],
        [(1, 2), (2, 1)],
        [(1, 2), (2, 3), (3, 1), (5, 6), (6, 5), (6, 7), (7, 8)],
        [(5, 5), (5, 6)],
    ],
)
def test_all_are_read_before_any_is_written(device: str, pairs: list[tuple[int, int]]) -> None:
    cache = numbered(device)
    expected = list(range(BLOCKS))
    for source, destination in pairs:
        expected[destination] = source
    cache.copy_blocks(pairs)
    assert contents(cache) == expected
    assert cache.copied_blocks == len(pairs)


@settings(max_examples=60)
@given(st.permutations(range(BLOCKS)), st.integers(1, BLOCKS), st.integers(0, 2**32 - 1))
def test_any_copies_in_any_memory(order: list[int], count: int, seed: int) -> None:
    """The way that devices take, on the CPU, with room for two blocks at once; and the host's own."""
    dice = random.Random(seed)
    destinations = order[:count]
    sources = [dice.randrange(BLOCKS) for _ in destinations]
    expected = list(range(BLOCKS))
    for source, destination in zip(sources, destinations, strict=True):
        expected[destination] = source
    host, device = numbered(), numbered()
    copier = BlockCopier(device.blocks, None, max_bytes=2 * device.block_bytes)
    copier.copy(np.array(sources), np.array(destinations))
    host.copy_blocks(list(zip(sources, destinations, strict=True)))
    assert contents(host) == contents(device) == expected


class Launched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The names of the operators that were called, as a device would be asked for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("room", "pieces"), [(12, 1), (2, 6)])
def test_a_device_is_asked_for_one_gather_and_one_scatter(room: int, pieces: int) -> None:
    """Of all layers together; more only where temporary memory is short."""
    cache = numbered()
    copier = BlockCopier(cache.blocks, None, max_bytes=room * cache.block_bytes)
    with Launched() as launched:
        copier.copy(np.arange(0, 12), np.arange(12, 24))
    work = [name for name in launched.names if "index" in name or "copy" in name or "gather" in name]
    assert work == ["aten::index_select", "aten::index_copy_"] * pieces
    assert contents(cache) == [*range(12), *range(12)]


def test_saved_contents_come_back(device: str) -> None:
    cache = numbered(device)
    saved = cache.copier.save(np.array([3, 9]))
    cache.copy_blocks([(1, 3), (2, 9)])
    cache.copier.restore(saved, np.array([20, 3]))
    cache.copier.settle()
    held = contents(cache)
    assert (held[3], held[9], held[20]) == (9, 2, 3)
    cache.copier.restore(cache.copier.save(np.array([], np.int64)), np.array([], np.int64))


def test_digests_tell_contents_apart_in_every_tensor(device: str) -> None:
    cache = numbered(device)
    assert len(set(cache.copier.digests(range(BLOCKS)))) == BLOCKS
    cache.copy_blocks([(1, 2)])
    one, two = cache.copier.digests([1, 2])
    assert one == two
    for tensor in cache.tensors:
        kept = tensor[2, -1, -1, -1].clone()
        tensor[2, -1, -1, -1] += 1
        assert cache.copier.digests([2]) != [one]
        tensor[2, -1, -1, -1] = kept
    assert cache.copier.digests([2]) == [one]
