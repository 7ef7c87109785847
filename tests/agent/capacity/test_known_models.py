"""Every released model: bytes a token, a block and a sequence, exact to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.geometry import ModelGeometry
from agent.capacity.planner import plan
from tests.agent.capacity.conftest import CASES_FILE, Cases

NAMES = sorted(json.loads(CASES_FILE.read_text(encoding="utf-8")))
Read = Callable[..., ModelGeometry]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_token_are_exact(cases: Cases, geometry_of: Read, name: str) -> None:
    case = cases[name]
    found = plan(geometry_of(name), Deployment(kv_dtype="fp16"))
    right = case["expected_kv_bytes_per_token_fp16"]
    if right is None:
        assert found.kv_bytes_per_token == 0
        assert found.geometry.no_cache_reason is not None
        assert found.confidence == "refused"
        return
    assert found.kv_bytes_per_token == right
    assert found.kv_bytes_per_token_ideal == case.get("marginal_beyond_window", right)
    assert found.state_bytes_per_sequence == case.get("const_state_bytes_per_seq", found.state_bytes_per_sequence)
    assert found.confidence == "high"
    assert {cache.window for cache in found.geometry.attention_caches if cache.window} == (
        {case["window"]} if "window" in case else set()
    )


def test_there_are_28_of_them_and_one_that_is_wrong_is_noticed(geometry_of: Read) -> None:
    assert len(NAMES) == 28
    wrong = plan(geometry_of("Qwen3-32B", head_dim=80), Deployment(kv_dtype="fp16"))
    assert wrong.kv_bytes_per_token == 163_840


def test_automatic_kv_dtype_follows_the_checkpoint(cases: Cases, geometry_of: Read) -> None:
    quantized = plan(geometry_of("Gemma-4-31B-NVFP4"), Deployment())
    assert quantized.kv.name == "fp8"
    assert quantized.kv_bytes_per_token == cases["Gemma-4-31B-NVFP4"]["expected_auto_bytes_per_token"]
    assert plan(geometry_of("Gemma-2-9B"), Deployment()).kv.name == "bfloat16"
    assert "float32" in geometry_of("Gemma-2-9B").dtype_note


def test_states_raise_the_block_as_the_engine_does(geometry_of: Read) -> None:
    found = plan(geometry_of("Qwen3-Next-80B-A3B"), Deployment())
    assert found.layout.block_tokens == 544  # what vLLM logs for it
    assert found.kv_bytes_per_block == 12 * 544 * 2048
    halved = plan(geometry_of("Jamba-v0.1"), Deployment(state_float32=False))
    assert 16_056_320 - halved.state_bytes_per_sequence == 28 * 8192 * 16 * 2  # 7.0 MiB less


@pytest.mark.parametrize(("tp", "expected"), [(1, 70_272), (4, 70_272), (8, 70_272)])
def test_latent_attention_is_whole_on_every_rank(geometry_of: Read, tp: int, expected: int) -> None:
    found = plan(geometry_of("DeepSeek-V3"), Deployment(tp=tp, kv_dtype="fp16"))
    assert found.kv_bytes_per_token == expected
    assert any("kept whole" in one for one in found.warnings) == (tp > 1)
    assert plan(geometry_of("DeepSeek-V3"), Deployment(kv_dtype="fp8_ds_mla")).kv_bytes_per_token == 61 * 656


@pytest.mark.parametrize(
    ("tp", "expected"), [(1, 327_680), (2, 163_840), (4, 81_920), (8, 40_960), (16, 40_960), (64, 40_960)]
)
def test_grouped_heads_are_divided_until_there_is_one_each(geometry_of: Read, tp: int, expected: int) -> None:
    found = plan(geometry_of("Llama-2-70B"), Deployment(tp=tp, kv_dtype="fp16"))
    assert found.kv_bytes_per_token == expected
    assert any("are kept" in one or "is kept" in one for one in found.warnings) == (tp > 8)


def test_the_fullest_pipeline_stage_decides(geometry_of: Read) -> None:
    found = plan(geometry_of("Llama-3.1-405B"), Deployment(pp=4, kv_dtype="fp16"))
    assert [len(stage) for stage in found.layout.stages] == [31, 32, 32, 31]
    assert found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_nested_and_plain_files_read_alike(cases: Cases) -> None:
    config = cases["Qwen3-VL-30B-A3B"]["config"]
    inner = read_geometry(config["text_config"])
    assert inner.layers == read_geometry(config).layers
    assert read_geometry({"thinker_config": {"text_config": config["text_config"]}}).layers == inner.layers
