"""KV memory: sizes come from storages, copies do what a plain loop over a snapshot does, too much is refused."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_shim.errors import SettingsError
from engine_shim.reference.geometry import GEOMETRIES, TEST_GEOMETRY, named_geometry, smallest_filling
from engine_shim.reference.kv_cache import KVCache, choose_device, coalesce


@pytest.mark.parametrize(
    ("model", "bytes_per_token"), [("Llama-3.1-8B", 131_072), ("SmolLM2-135M", 23_040), ("Qwen2.5-0.5B", 12_288)]
)
def test_known_models_take_what_is_known(model: str, bytes_per_token: int) -> None:
    """Two tensors * layers * KV heads * head size * 2 bytes, worked out by hand from the models' published configs."""
    assert named_geometry(model).token_bytes(2) == bytes_per_token
    cache = KVCache(named_geometry(model), 3, block_tokens=16)
    assert cache.block_bytes == 16 * bytes_per_token
    assert cache.nbytes == 3 * cache.block_bytes


@pytest.mark.parametrize(("dtype", "element_bytes"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_block_bytes_follow_the_dtype(dtype: str, element_bytes: int) -> None:
    cache = KVCache(TEST_GEOMETRY, 5, block_tokens=8, dtype=dtype)
    assert cache.block_bytes == 8 * 2 * 4 * 2 * 32 * element_bytes
    assert len(cache.tensors) == 8


def test_memory_is_resident_from_the_start() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    cache = KVCache(TEST_GEOMETRY, 4096)
    assert cache.nbytes == 64 << 20
    assert resident_bytes() - before > 0.9 * cache.nbytes


def test_copies_read_all_before_they_write_any(device: str) -> None:
    """Random copies with neighbours, chains and swaps against a loop over a snapshot."""
    for seed in range(20):
        check_copies(seed, device)


def check_copies(seed: int, device: str) -> None:
    chance = random.Random(seed)
    cache = KVCache(TEST_GEOMETRY, 24, block_tokens=2, dtype="float32", device=torch.device(device))
    for tensor in cache.tensors:
        tensor.copy_(torch.rand(tensor.shape))
    before = [tensor.clone() for tensor in cache.tensors]
    destinations = chance.sample(range(24), 10)
    start = chance.randrange(14)
    sources = list(range(start, start + 10)) if seed % 2 else [chance.randrange(24) for _ in range(10)]
    cache.copy_blocks(list(zip(sources, sorted(destinations), strict=True)))
    for tensor, old in zip(cache.tensors, before, strict=True):
        wanted = old.clone()
        for source, destination in zip(sources, sorted(destinations), strict=True):
            wanted[destination] = old[source]
        assert torch.equal(tensor, wanted)
    assert cache.copied_blocks == 10


def test_neighbours_become_one_run() -> None:
    assert list(coalesce([(4, 10), (5, 11), (6, 12), (8, 13), (9, 14), (1, 2)])) == [(4, 10, 3), (8, 13, 2), (1, 2, 1)]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 64), (15, 17), (16, 32), (33, 63), (63, 64)])
def test_slots_go_through_the_table(start: int, stop: int) -> None:
    """In each tensor the rows at these slots are the tokens of the table's blocks."""
    cache = KVCache(TEST_GEOMETRY, 16)
    table = [9, 3, 4, 12]
    for tensor in cache.tensors:
        tensor.copy_(torch.arange(256).view(16, 16, 1, 1).expand_as(tensor))  # the token's number over all blocks
    wanted = [table[token // 16] * 16 + token % 16 for token in range(start, stop)]
    slots = torch.from_numpy(cache.slots(table, start, stop))
    for index in range(len(cache.tensors)):
        assert cache.rows(index)[slots][:, 0].tolist() == wanted
        cache.rows(index)[slots] = -1.0 - index
    for index, tensor in enumerate(cache.tensors):
        held = tensor.reshape(256, -1)[wanted]
        assert bool((held == -1.0 - index).all())


def test_the_slots_of_a_batch_are_those_of_its_sequences() -> None:
    chance = random.Random(1)
    cache = KVCache(TEST_GEOMETRY, 64)
    for _ in range(50):
        spans = []
        for _ in range(chance.randint(1, 6)):
            table = array("q", chance.sample(range(64), 12))
            start = chance.randrange(12 * 16)
            spans.append((table, start, chance.choice([start + 1, chance.randint(start + 1, 12 * 16)])))
        slots, positions = cache.batch_slots(spans)
        assert slots.tolist() == [slot for span in spans for slot in cache.slots(*span).tolist()]
        assert positions.tolist() == [token for _, start, stop in spans for token in range(start, stop)]


def test_blocks_are_read_as_they_lie(device: str) -> None:
    cache = KVCache(TEST_GEOMETRY, 4, device=torch.device(device))
    for index, tensor in enumerate(cache.tensors):
        tensor[2].fill_(index + 1)
    read = np.frombuffer(cache.read_blocks(1, 2), dtype=np.float16).reshape(2, 8, -1)
    assert not read[0].any()
    assert [set(of_tensor.tolist()) for of_tensor in read[1]] == [{float(index + 1)} for index in range(8)]
    assert read.nbytes == 2 * cache.block_bytes


def test_a_pool_that_does_not_fit_is_refused_with_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"MiB are available on cpu; use fewer --blocks"):
        KVCache(named_geometry("Llama-3.1-8B"), 100_000_000)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(SettingsError, match=r"no geometry named 'GPT-9'; known are: .*SmolLM2-135M"):
        named_geometry("GPT-9")
    with pytest.raises(SettingsError, match="KV dtype 'int7' is not known"):
        KVCache(TEST_GEOMETRY, 4, dtype="int7")
    with pytest.raises(SettingsError, match="0 blocks"):
        KVCache(TEST_GEOMETRY, 0)
    with pytest.raises(SettingsError, match="device 'tpu' is not known"):
        choose_device("tpu")


@pytest.mark.parametrize(("blocks", "model"), [(80_000, "stories260K"), (8_000, "stories15M"), (100, "Llama-3.1-8B")])
def test_the_smallest_model_that_fills_the_pool_is_chosen(blocks: int, model: str) -> None:
    least = 512 << 20 if blocks > 100 else 1 << 62
    geometry = smallest_filling(blocks, block_tokens=16, token_bytes=lambda one: one.token_bytes(2), least_bytes=least)
    assert geometry is GEOMETRIES[model]
