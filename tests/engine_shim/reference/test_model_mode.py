"""Model mode: paging changes no token, and a corrupt cache does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_shim.reference.decoder import Decoder, generate_contiguous
from engine_shim.reference.engine import Engine
from engine_shim.reference.geometry import TEST_GEOMETRY
from engine_shim.reference.quantization import STORED_FORMATS
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
SETTINGS: dict[str, Any] = {"content": "model", "dtype": "float32"}


def sequences(count: int) -> list[Sequence]:
    """Prompts with a common prefix of 512 tokens for some, as a model's tokens."""
    made = []
    for index in range(count):
        request = (
            TraceRequest(index, 0.0, 540 + index, 12, (3, 50 + index))
            if index % 2
            else TraceRequest(index, 0.0, 40 + 7 * index, 60, (90 + index,))
        )
        made.append(sequence_of(request, 16, vocabulary=TEST_GEOMETRY.vocabulary))
    return made


def finish(engine: Engine, queued: list[Sequence], disturb: Callable[[int], None] = lambda step: None) -> None:
    """Serve the sequences to their ends; `disturb` is called before each step."""
    for sequence in queued:
        assert engine.submit(sequence)
    step = 0
    while engine.scheduler.has_work:
        disturb(step)
        engine.step()
        step += 1


def outputs(queued: list[Sequence]) -> list[list[int]]:
    return [sequence.tokens[sequence.prompt_tokens :].tolist() for sequence in queued]


def contiguous(engine: Engine, queued: list[Sequence]) -> list[list[int]]:
    runner = engine.runner
    assert isinstance(runner, Decoder)
    return [
        generate_contiguous(
            runner.weights,
            engine.cache.geometry,
            sequence.tokens[: sequence.prompt_tokens].tolist(),
            sequence.max_tokens - sequence.prompt_tokens,
            engine.cache.format,
        )
        for sequence in queued
    ]


def test_tokens_equal_those_of_a_contiguous_cache(make_engine: EngineMaker, device: str) -> None:
    engine = make_engine(**SETTINGS, blocks=44, headroom=0.0, limits=Limits(8, 96), device=device)
    queued = sequences(6)
    finish(engine, queued)
    report = engine.report()
    assert engine.cache.device.type == device
    assert report.prefix_hit_tokens > 0
    assert report.preemptions > 0
    assert outputs(queued) == contiguous(engine, queued)


def test_swapped_blocks_change_the_tokens(make_engine: EngineMaker, device: str) -> None:
    """Two sequences hold each other's block. (Within one table an order of full blocks says nothing: positions are
    rotated into the keys.)"""
    engine = make_engine(**SETTINGS, blocks=128, device=device)
    queued = sequences(2)

    def swap(step: int) -> None:
        if step == 5:
            first, second = queued[0].table, queued[1].table
            first[1], second[30] = second[30], first[1]

    finish(engine, queued, swap)
    for disturbed, undisturbed in zip(outputs(queued), contiguous(engine, queued), strict=True):
        assert disturbed[:5] == undisturbed[:5]
        assert disturbed != undisturbed


@pytest.mark.parametrize("left_out", [False, True])
def test_forks_need_their_copies(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, left_out: bool) -> None:
    """Two samples of one prompt part at their first token; without the copy they write into one block."""
    engine = make_engine(**SETTINGS, samples=2)
    request = TraceRequest(0, 0.0, 40, 12)
    sequence = sequence_of(request, 16, vocabulary=TEST_GEOMETRY.vocabulary, samples=2)
    assert engine.submit(sequence)
    engine.step()
    branch = engine.scheduler.running[1]
    if left_out:
        monkeypatch.setattr(engine.cache, "copy_blocks", lambda copies: None)
    while engine.scheduler.has_work:
        engine.step()
    runner = engine.runner
    assert isinstance(runner, Decoder)
    same = []
    for member in (sequence, branch):
        known = member.tokens[:41].tolist()
        assert len(known) == 41
        wanted = generate_contiguous(runner.weights, TEST_GEOMETRY, known, 11, STORED_FORMATS["float32"])
        same.append(member.tokens[41:].tolist() == wanted)
    assert sequence.tokens[40] != branch.tokens[40]
    assert all(same) is not left_out
