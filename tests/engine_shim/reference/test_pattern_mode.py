"""Pattern mode: whatever the scheduler does, every block holds what it must; and what is wrong is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine
from engine_shim.reference.sequence import sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]


@pytest.mark.parametrize("policy", ["vllm", "fifo", "lowest-free", "lowest-any"])
def test_contents_hold_over_preemption_hits_and_forks(
    make_engine: EngineMaker, serve: Server, crowd: list[TraceRequest], policy: str, device: str
) -> None:
    engine = make_engine(policy=policy, verify_every=1, samples=2, device=device)
    serve(engine, crowd, samples=2)
    report = engine.report()
    assert engine.verify_all() == []
    assert report.mismatched_blocks == 0
    assert report.served_requests == len(crowd)
    assert report.preemptions > 0
    assert report.prefix_hit_tokens > 0
    assert report.copied_blocks > 0
    assert report.verified_tokens > 10_000


def test_a_left_out_copy_on_write_is_seen(
    make_engine: EngineMaker, serve: Server, crowd: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(verify_every=1, samples=2)
    copies_left_out: list[Sequence[tuple[int, int]]] = []

    def leave_first_out(copies: Sequence[tuple[int, int]]) -> None:
        if copies_left_out:
            type(engine.cache).copy_blocks(engine.cache, copies)
        else:
            copies_left_out.append(copies)

    monkeypatch.setattr(engine.cache, "copy_blocks", leave_first_out)
    serve(engine, crowd, samples=2)
    assert len(copies_left_out) == 1
    assert engine.report().mismatched_blocks > 0


def started(engine: Engine, *requests: TraceRequest) -> list[Any]:
    """Queue requests and compute their prompts."""
    sequences = [sequence_of(request, 16) for request in requests]
    for sequence in sequences:
        assert engine.submit(sequence)
    while any(sequence.computed < sequence.prompt_tokens for sequence in sequences):
        engine.step()
    return sequences


def test_a_scrambled_table_is_seen(make_engine: EngineMaker) -> None:
    engine = make_engine()
    first, second = started(engine, TraceRequest(0, 0.0, 50, 40), TraceRequest(1, 0.0, 70, 40))
    assert engine.verify_all() == []
    first.table[1], second.table[2] = second.table[2], first.table[1]
    found = engine.verify_all()
    assert [line.split(" of ")[1].split(":")[0] for line in found] == ["0", "1"]
    first.table[1], second.table[2] = second.table[2], first.table[1]
    first.table[0], first.table[1] = first.table[1], first.table[0]
    assert len(engine.verify_all()) == 2  # the same tokens, at other positions
    first.table[0], first.table[1] = first.table[1], first.table[0]
    assert engine.verify_all() == []


@pytest.mark.parametrize("tensor", [0, 3, 7])
def test_one_wrong_element_in_any_layer_is_seen(make_engine: EngineMaker, tensor: int) -> None:
    engine = make_engine()
    (sequence,) = started(engine, TraceRequest(0, 0.0, 50, 40))
    block = sequence.table[2]
    engine.cache.tensors[tensor][block, 5, 1, 31] += 1.0
    content = engine.runner
    assert isinstance(content, PatternContent)
    (mismatch,) = content.verify_sequence(sequence)
    assert (mismatch.block, mismatch.first_position, mismatch.tokens) == (block, 2 * 16 + 5, 1)


def test_a_corrupt_cached_block_is_seen(make_engine: EngineMaker, serve: Server) -> None:
    engine = make_engine()
    serve(engine, [TraceRequest(0, 0.0, 64, 2)])
    cached = engine.monitor.cached_blocks()
    assert len(cached) == 4
    assert engine.verify_all() == []
    engine.cache.keys[0][cached[1]].zero_()
    assert len(engine.verify_all()) == 1


def test_shared_prefixes_write_the_same_bytes(make_engine: EngineMaker) -> None:
    engine = make_engine(prefix_cache=False, blocks=128)
    first, second = started(engine, TraceRequest(0, 0.0, 530, 9, (5, 6)), TraceRequest(1, 0.0, 530, 9, (5, 8)))
    equal = [
        all(bool((t[a] == t[b]).all()) for t in engine.cache.tensors)
        for a, b in zip(first.table, second.table, strict=True)
    ]
    assert equal == [True] * 32 + [False] * 2
    assert not set(first.table) & set(second.table)


def test_every_layer_is_really_written(make_engine: EngineMaker) -> None:
    engine = make_engine()
    (sequence,) = started(engine, TraceRequest(0, 0.0, 48, 40))
    for tensor in engine.cache.tensors:
        rows = tensor[sequence.table[:3]].float().numpy()
        assert np.count_nonzero(rows) > 0.99 * rows.size
