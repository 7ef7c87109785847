"""Relocation on recorded traffic: request by request the hits and evictions of stock, at a fraction of its F."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engine_shim import simulator
from engine_shim.pool import address_map, relocation
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.prefix import PrefixIndex
from engine_shim.simulator import PolicyResult, simulate
from engine_shim.workload import TraceRequest, Workload, load_workload


class RecordedPrefixes(PrefixIndex):
    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []

    def forget(self, blocks: Any) -> None:
        self.evicted += [self.hash_of[block] for block in blocks]
        super().forget(blocks)


class RecordedPool(BlockPool):
    """Notes, for each admission, the hits by name and how many prefixes had been evicted before."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._prefixes: RecordedPrefixes = RecordedPrefixes()
        self.admissions: list[tuple[int, list[int]]] = []

    def acquire(self, blocks: Any, **place: Any) -> None:
        hits = [self._prefixes.hash_of[block] for block in blocks]
        self.admissions.append((len(self._prefixes.evicted), hits))
        super().acquire(blocks, **place)


def run(trace: str, requests: int, blocks: int, policy: str) -> tuple[PolicyResult, RecordedPool]:
    """Serve the first requests of a bundled trace, and everything that was evicted and hit meanwhile."""
    workload = load_workload(trace)
    return serve(replace(workload, requests=workload.requests[:requests]), blocks, policy)


def serve(workload: Workload, blocks: int, policy: str) -> tuple[PolicyResult, RecordedPool]:
    pools: list[RecordedPool] = []

    def make(*arguments: Any, **settings: Any) -> RecordedPool:
        pools.append(RecordedPool(*arguments, **settings))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "BlockPool", make)
        report = simulate(workload, policies=[policy], blocks=blocks, headroom=0.02)
    return report.policies[policy], pools[-1]


@pytest.mark.parametrize(
    ("trace", "requests", "blocks", "most"),
    [
        ("mooncake-conversation", 300, 40_000, None),
        ("mooncake-conversation", 500, 120_000, 0.30),
        ("azure-conv", 1500, 8_000, 0.30),
        ("azure-conv", 1500, 4_000, None),  # overloaded: preemptions
    ],
)
def test_hits_and_evictions_are_stocks(trace: str, requests: int, blocks: int, most: float | None) -> None:
    stock, stock_pool = run(trace, requests, blocks, "vllm")
    relocating, pool = run(trace, requests, blocks, "relocating")
    assert stock.evictions > 1000
    assert pool.admissions == stock_pool.admissions
    assert pool._prefixes.evicted == stock_pool._prefixes.evicted
    assert relocating.preemptions == stock.preemptions
    assert relocating.copies_per_allocated_block is not None
    assert 0.2 < relocating.copies_per_allocated_block <= 1.6
    assert stock.descriptors_per_block is not None
    assert relocating.descriptors_per_block is not None
    assert stock.descriptors_per_block >= 4 * relocating.descriptors_per_block
    if most is not None:
        median, stock_median = relocating.settled_fragmentation_rate.p50, stock.settled_fragmentation_rate.p50
        assert stock_median is not None
        assert stock_median > 0.8
        assert median is not None
        assert median <= most


def test_another_policy_is_told_apart() -> None:
    """The comparison is of contents: one that hands out the same addresses and evicts otherwise does not pass it."""
    _, stock = run("mooncake-conversation", 300, 40_000, "vllm")
    _, other = run("mooncake-conversation", 300, 40_000, "lowest-any")
    assert other.admissions != stock.admissions
    assert other._prefixes.evicted != stock._prefixes.evicted


def many_decoding_sequences() -> Workload:
    """Some 200 sequences decode long answers at once; one prompt in five is long, and the others are one block."""
    dice = random.Random(3)
    requests = (
        TraceRequest(
            index=index,
            arrival_s=index / 2,
            prompt_tokens=16 if index % 5 else 16 * 120,
            output_tokens=dice.randint(2000, 4000),
        )
        for index in range(400)
    )
    return Workload("many decoding sequences", tuple(requests), 0)


def test_prompts_lie_together_where_hundreds_of_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes one block at a time, and when it ends it leaves single holes, thousands of them."""
    workload = many_decoding_sequences()
    stock, stock_pool = serve(workload, 40_000, "vllm")
    relocating, pool = serve(workload, 40_000, "relocating")
    assert stock.evictions > 40_000
    assert pool._prefixes.evicted == stock_pool._prefixes.evicted
    assert relocating.settled_fragmentation_rate.p50 is not None
    assert relocating.settled_fragmentation_rate.p50 <= 0.30
    assert relocating.copies_per_allocated_block is not None
    assert relocating.copies_per_allocated_block <= 1.6
    assert stock.descriptors_per_block is not None
    assert relocating.descriptors_per_block is not None
    assert stock.descriptors_per_block >= 4 * relocating.descriptors_per_block

    monkeypatch.setattr(address_map, "SEARCHED_BLOCKS", 1000)
    monkeypatch.setattr(relocation, "STRETCH", 0.0)
    short_sighted, _ = serve(workload, 40_000, "relocating")
    assert short_sighted.descriptors_per_block is not None
    assert stock.descriptors_per_block < 4 * short_sighted.descriptors_per_block
