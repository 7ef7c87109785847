"""Advice for an engine that runs: from its map, with its model's config, by the command and by the route."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.capacity.live import LIVE_KEYS, LivePool, advise_live, live_pool, pressure, render, to_json
from agent.cli import main
from agent.fragmentation import analyze
from engine_shim.snapshot import MapSnapshot

Make = Callable[..., MapSnapshot]
POOL = LivePool(
    engine="engine",
    model="org/model",
    kind="vllm",
    dtype="bfloat16",
    tensor_parallel=1,
    total_blocks=1001,
    usable_blocks=1000,
    block_tokens=64,
    block_bytes=4_194_304,
    live_blocks=800,
    cached_blocks=100,
    headroom_blocks=100,
    waste_tokens=10_240,
    running=40,
    waiting=0,
    preemptions=0,
    evicted_blocks=0,
    reused_blocks=0,
    fragmentation_rate=0.97,
    relocating=False,
    has_states=False,
)


def options(pool: LivePool) -> dict[str, Any]:
    return {one.key: one for one in advise_live(pool)}


def test_eight_bits_double_the_blocks_of_the_same_bytes() -> None:
    found = options(POOL)["kv-fp8"]
    assert found.why_not is None
    assert (found.bytes, found.tokens, found.sequences) == (0, 1001 * 64, 50)  # 20 blocks a sequence now
    assert "1,001 blocks" in found.arithmetic
    assert "2,002" in found.arithmetic
    assert options(replace(POOL, dtype="float8_e4m3fn"))["kv-fp8"].why_not == "the cache is float8_e4m3fn already"
    for name in ("fp8", "fp8_e4m3", "fp8_per_token_head", "int8", "int4", "int4_group32"):
        assert options(replace(POOL, dtype=name))["kv-fp8"].why_not == f"the cache is {name} already"
    assert "is not known here" in (options(replace(POOL, dtype="int3"))["kv-fp8"].why_not or "")
    assert "does not tell how large" in (options(replace(POOL, block_bytes=1))["kv-fp8"].why_not or "")
    assert "states share" in (options(replace(POOL, has_states=True))["kv-fp8"].why_not or "")


def test_tails_are_measured_and_shrink_with_the_block() -> None:
    found = options(POOL)["block-size"]
    assert found.why_not is None
    assert found.tokens == (10_240 * 3 // 4) // 64 * 64
    assert "waste 10,240 of 51,200 slots (20.0%)" in found.arithmetic
    assert "16 tokens already" in (options(replace(POOL, block_tokens=16))["block-size"].why_not or "")
    assert "no column of tokens" in (options(replace(POOL, waste_tokens=None))["block-size"].why_not or "")
    assert "less than a block" in (options(replace(POOL, waste_tokens=10))["block-size"].why_not or "")


def test_headroom_is_offered_only_where_nothing_was_preempted() -> None:
    found = options(POOL)["headroom"]
    assert (found.bytes, found.tokens, found.sequences) == (100 * 4_194_304, 6400, 5)
    assert "preempted 7 times" in (options(replace(POOL, preemptions=7))["headroom"].why_not or "")
    assert options(replace(POOL, headroom_blocks=0))["headroom"].why_not == "no headroom is held back"


def test_preemptions_ask_for_fewer_sequences() -> None:
    assert options(POOL)["fewer-sequences"].why_not is not None
    crowded = replace(POOL, preemptions=12, live_blocks=900, running=60)
    found = options(crowded)["fewer-sequences"]
    assert found.why_not is None
    assert found.change == "at most 54 sequences at once"  # 0.9 × 900 of 15 blocks each
    assert "nothing runs" in (options(replace(crowded, running=0))["fewer-sequences"].why_not or "")


@pytest.mark.parametrize(
    ("running", "live_blocks", "words"),
    [
        (1, 995, "one sequence runs now, of 995.0 blocks: fewer would be none"),
        (20, 300, "20 run now, of 15.0 blocks on average, and 54 such fill 90% of the pool"),
        (54, 810, "54 run now, of 15.0 blocks on average, and 54 such fill 90% of the pool"),
    ],
)
def test_a_limit_that_would_hold_nothing_back_is_ruled_out(running: int, live_blocks: int, words: str) -> None:
    found = options(replace(POOL, preemptions=12, live_blocks=live_blocks, running=running))["fewer-sequences"]
    assert words in (found.why_not or "")


def test_a_limit_is_never_below_one_sequence() -> None:
    found = options(replace(POOL, preemptions=12, live_blocks=1000, running=2, headroom_blocks=600))["fewer-sequences"]
    assert found.change == "at most 1 sequence at once"


def test_offload_pays_for_what_is_evicted_and_fragmentation_for_nothing() -> None:
    assert "no cached prefix was evicted" in (options(POOL)["kv-offload"].why_not or "")
    found = options(replace(POOL, evicted_blocks=5000, reused_blocks=20))["kv-offload"]
    assert found.why_not is None
    assert "5,000 blocks of cached prefixes were evicted since the start (19.53 GiB)" in found.arithmetic
    assert "fragmentation rate is 0.970, which costs a paged pool no memory" in (
        options(POOL)["allocation-policy"].why_not or ""
    )
    assert "relocating allocation is on" in (options(replace(POOL, relocating=True))["allocation-policy"].why_not or "")


@pytest.mark.parametrize(
    ("changed", "short", "words"),
    [
        ({}, False, "memory is not short: 800 of 1,000 blocks are live (80%)"),
        ({"preemptions": 3}, True, "memory is short: 3 preemptions"),
        ({"live_blocks": 950}, True, "memory is nearly short"),
        ({"live_blocks": 950, "waiting": 4}, True, "memory is short: 4 requests wait"),
        ({"waiting": 4}, False, "memory is not short"),
        ({"usable_blocks": 0, "live_blocks": 0}, False, "0 of 0"),
    ],
)
def test_pressure_is_told_with_its_numbers(changed: dict[str, Any], short: bool, words: str) -> None:
    found, said = pressure(replace(POOL, **changed))
    assert found is short
    assert words in said


def test_a_config_adds_the_planners_options_where_it_is_the_models(geometry_config: dict[str, Any]) -> None:
    block = 64 * 131_072
    mine = replace(POOL, block_bytes=block)
    facts = to_json(mine, geometry_config)
    assert facts["planned"]["agrees"] is True
    by_key = {one["option"]: one for one in facts["planned_options"]}
    assert by_key["kv-int4"]["possible"] is True
    assert by_key["kv-int4"]["after"]["num_blocks"] == 1001 * block // (64 * 32 * 8 * 2 * 68)
    assert "gqa-model" not in by_key
    other = to_json(replace(POOL, block_bytes=block + 1), geometry_config)
    assert other["planned"]["agrees"] is False
    assert other["planned_options"] == []
    assert "they differ" in render(other)


@pytest.fixture
def geometry_config(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = cases["Llama-3.1-8B"]["config"]
    return found


def test_every_option_is_there_and_all_is_json() -> None:
    facts = to_json(POOL)
    assert {one["option"] for one in facts["options"]} == set(LIVE_KEYS)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    possible = [one["possible"] for one in facts["options"]]
    assert possible == sorted(possible, reverse=True)
    text = render(facts)
    assert "ruled out:" in text
    assert "vllm: --kv-cache-dtype fp8" in text


def test_numbers_come_from_the_map(make_snapshot: Make) -> None:
    states = np.array([4] + [2] * 5 + [1] * 2 + [0] * 2, dtype=np.uint8)
    snapshot = make_snapshot(states)
    pool = live_pool(snapshot, analyze(snapshot.states), 7)
    assert (pool.total_blocks, pool.usable_blocks, pool.live_blocks, pool.cached_blocks) == (10, 9, 5, 2)
    assert pool.waste_tokens == 7
    assert pool.live_share == pytest.approx(5 / 9)


@pytest.mark.parametrize("flag", ["sleeping", "degraded"])
def test_nothing_is_advised_on_states_that_mean_nothing(make_snapshot: Make, flag: str) -> None:
    states = np.full(100, 2, dtype=np.uint8)
    snapshot = make_snapshot(states)
    known = live_pool(snapshot, analyze(states), None)
    assert pressure(known)[0] is True
    pool = live_pool(replace(snapshot, flags=replace(snapshot.flags, **{flag: True})), analyze(states), None)
    short, words = pressure(pool)
    assert short is None
    assert words.startswith("whether memory is short is not known: ")
    facts = to_json(pool)
    assert (facts["memory_is_short"], facts["live_share"]) == (None, None)
    assert {one["option"] for one in facts["options"]} == set(LIVE_KEYS)
    assert not any(one["possible"] for one in facts["options"])


def test_of_an_engine_that_ended_nothing_is_advised(start_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = start_engine()
    engine.kill()
    assert main(["advise", str(engine.path)]) == 0
    assert "not known: the engine has ended, and this is the map that it left" in capsys.readouterr().out


def test_the_command_reads_a_map(
    start_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, geometry_config: dict[str, Any]
) -> None:
    engine = start_engine(block_tokens=64, block_bytes=64 * 131_072, dtype="bfloat16")
    assert main(["advise", str(engine.path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == "kvatlas.advise/v1"
    assert facts["memory_is_short"] is False
    assert facts["planned"] is None
    config = tmp_path / "config.json"
    config.write_text(json.dumps(geometry_config))
    assert main(["advise", str(engine.path), "--config", str(config)]) == 0
    assert "the map says 8,388,608 B a block, the planner 8,388,608 B" in capsys.readouterr().out
    assert main(["advise", "nobody"]) == 2
    assert "no engine 'nobody'" in capsys.readouterr().err
