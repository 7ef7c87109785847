"""The planner against vLLM 0.32's own cache specs: block bytes, groups, blocks, tokens and concurrency are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.planner import Plan, plan

Report = dict[str, Any]
MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("planned_models.json").read_text(encoding="utf-8")
)
SPECS = {
    "full": "FullAttentionSpec",
    "sliding": "SlidingWindowSpec",
    "chunked": "ChunkedLocalAttentionSpec",
    "mla": "MLAAttentionSpec",
    "state": "MambaSpec",
}


@pytest.fixture(scope="module")
def specs(drive: Callable[..., Report]) -> Report:
    """What vLLM says of every model."""
    return drive("drive_specs", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def planned(name: str) -> Plan:
    """The same model in the planner."""
    case = MODELS[name]
    arguments = case.get("arguments", {})
    return plan(
        read_geometry(case["config"]),
        Deployment(
            kv_cache_bytes=case["pool_bytes"],
            block_tokens=arguments.get("block_size", 16),
            max_model_len=arguments.get("max_model_len"),
            kv_dtype=arguments.get("kv_cache_dtype", "auto"),
            max_batched_tokens=512,
            pp=len(case.get("stages", [1])),
            tp=case.get("ranks", 1),
            state_float32=True,  # vLLM's CPU platform keeps every recurrent state so
        ),
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_are_those_of_vllm(specs: Report, name: str) -> None:
    theirs, ours = specs[name], planned(name)
    assert "error" not in theirs, theirs
    assert ours.pool is not None
    assert list(ours.layout.stage_block_bytes) == theirs["block_bytes"]
    assert ours.pool.num_blocks == theirs["num_blocks"]
    assert ours.pool.engine_sequences == pytest.approx(theirs["concurrency"], rel=1e-12)
    groups = [
        [SPECS[group.kind], group.block_tokens, len([page for page in group.pages if page.layer in stage])]
        for group in ours.layout.groups
        for stage in ours.layout.stages[:1]
    ]
    assert sorted(groups) == sorted(theirs["groups"])
    assert ours.state_bytes_per_sequence == theirs["state_bytes"]
    if len(groups) == 1 and groups[0][0] in ("FullAttentionSpec", "MLAAttentionSpec"):
        assert ours.pool.pool_tokens == theirs["tokens"]


def test_the_comparison_covers_every_kind_and_would_notice(specs: Report) -> None:
    kinds = {group[0] for one in specs.values() for group in one["groups"]}
    assert kinds >= {"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec"}
    assert len(MODELS) >= 8
    config = MODELS["sliding-and-full"]["config"]
    wrong = plan(
        read_geometry(config | {"model_type": "gemma3_text"}),  # one full layer in six instead of two
        Deployment(kv_cache_bytes=MODELS["sliding-and-full"]["pool_bytes"], block_tokens=32),
    )
    assert wrong.kv_bytes_per_block != specs["sliding-and-full"]["block_bytes"][0]
