"""The advisor's predictions against real vLLM: started with an option, its pool is what was said, within one block.

vLLM's CPU build sizes its pool from a number of bytes, so options that free weights or activations cannot be tried
here; and it takes blocks of a multiple of 32 tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.capacity.advisor import Option, advise
from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.planner import Plan, plan

Report = dict[str, Any]
MODELS = json.loads(Path(__file__).with_name("planned_models.json").read_text(encoding="utf-8"))
POOL_BYTES = 1 << 30  # VLLM_CPU_KVCACHE_SPACE=1
GROUPED = MODELS["grouped"]["config"] | {"head_dim": 32}  # the CPU's FP8 cache wants heads of 32
WINDOWED = MODELS["sliding-and-full"]["config"]
# What is deployed, and for each option the arguments of vLLM that carry it out.
BASES: dict[str, tuple[dict[str, Any], dict[str, Any], Deployment]] = {
    "grouped": (
        GROUPED,
        {"block_size": 128},
        Deployment(kv_cache_bytes=POOL_BYTES, block_tokens=128, max_batched_tokens=512),
    ),
    "windowed": (
        WINDOWED,
        {"block_size": 32, "disable_hybrid_kv_cache_manager": True},
        Deployment(kv_cache_bytes=POOL_BYTES, block_tokens=32, max_batched_tokens=512, hybrid_manager=False),
    ),
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kv-fp8": ("grouped", {"kv_cache_dtype": "fp8"}),
    "shorter-length": ("grouped", {"max_model_len": 1024}),
    "hybrid-manager": ("windowed", {"disable_hybrid_kv_cache_manager": False}),
}


@pytest.fixture(scope="module")
def pools(drive: Callable[..., Report]) -> Report:
    """Of each deployment as it is, and of each option."""
    cases = {name: {"config": config, "arguments": arguments} for name, (config, arguments, _) in BASES.items()}
    for key, (base, arguments) in OPTIONS.items():
        cases[key] = {"config": cases[base]["config"], "arguments": cases[base]["arguments"] | arguments}
    return drive(
        "drive_advice",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        KVATLAS_TEST_ADVICE=json.dumps(cases),
    )


def base_plan(name: str) -> Plan:
    config, _, deployment = BASES[name]
    return plan(read_geometry(config), deployment)


def option_of(key: str) -> tuple[Plan, Option]:
    base = OPTIONS[key][0]
    config, _, deployment = BASES[base]
    found = next(one for one in advise(read_geometry(config), deployment) if one.key == key)
    return base_plan(base), found


@pytest.mark.parametrize("name", sorted(BASES))
def test_the_pool_as_it_is(pools: Report, name: str) -> None:
    found = base_plan(name)
    assert found.pool is not None
    assert found.pool.num_blocks == pools[name]["num_blocks"]
    assert found.pool.engine_sequences == pytest.approx(pools[name]["concurrency"])


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_the_pool_with_an_option_is_what_was_predicted(pools: Report, key: str) -> None:
    base, option = option_of(key)
    assert option.gain is not None
    assert base.pool is not None
    theirs, before = pools[key], pools[OPTIONS[key][0]]
    predicted = option.outcome
    assert predicted is not None
    assert abs(predicted.num_blocks - theirs["num_blocks"]) <= 1
    assert predicted.engine_sequences == pytest.approx(theirs["concurrency"], rel=0.01)
    # And it is an effect: the engine's pool or what it serves is not what it was.
    assert (theirs["num_blocks"], theirs["concurrency"]) != (before["num_blocks"], before["concurrency"])
    assert theirs["concurrency"] > before["concurrency"]
