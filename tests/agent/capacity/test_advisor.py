"""Advice: each gain is the difference of two plans, ranked, and what is ruled out says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.capacity.advisor import ASKING_FOR_LESS, Option, advise
from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.engine_flags import RECIPES
from agent.capacity.geometry import ModelGeometry
from agent.capacity.gpus import find_gpu
from agent.capacity.planner import plan
from agent.capacity.presets import PRESETS
from agent.capacity.together import together
from agent.capacity.words import render_advice
from engine_shim.errors import SettingsError

SMALL = Deployment(gpu=find_gpu("rtx-4090"), max_num_seqs=4, headroom=0.1, block_tokens=128)


def model(name: str = "llama-2-7b") -> ModelGeometry:
    return read_geometry(PRESETS[name].config, name)


def by_key(options: tuple[Option, ...]) -> dict[str, Option]:
    return {one.key: one for one in options}


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("kv-fp8", {"kv_dtype": "fp8"}),
        ("kv-int8", {"kv_dtype": "int8"}),
        ("kv-int4", {"kv_dtype": "int4"}),
        ("weights-fp8", {"weight_dtype": "fp8"}),
        ("weights-int4", {"weight_dtype": "awq"}),
        ("shorter-length", {"max_model_len": 2048}),
        ("utilization", {"utilization": 0.95}),
        ("fewer-in-flight", {"max_batched_tokens": 2048}),
        ("headroom", {"headroom": 0.0}),
        ("block-size", {"block_tokens": 16}),
        ("tensor-parallel", {"tp": 2}),
        ("pipeline-parallel", {"pp": 2}),
        ("data-parallel", {"dp": 2}),
    ],
)
def test_each_gain_is_the_difference_of_two_plans(key: str, changed: dict[str, Any]) -> None:
    deployment = replace(SMALL, max_num_seqs=1)  # it fits, so that a shorter length is half and not the longest
    base, other = plan(model(), deployment), plan(model(), replace(deployment, **changed))
    option = by_key(advise(model(), deployment))[key]
    assert option.gain is not None
    assert base.pool is not None
    assert other.pool is not None
    assert option.gain.sequences == (other.max_concurrent_sequences or 0) - (base.max_concurrent_sequences or 0)
    assert option.gain.tokens == other.pool.pool_tokens * other.deployment.dp - base.pool.pool_tokens
    assert option.gain.bytes_per_token == other.kv_bytes_per_token - base.kv_bytes_per_token
    assert option.fits == other.fits
    assert f"{other.pool.num_blocks:,}" in option.arithmetic


def test_what_makes_it_fit_for_least_effort_comes_first_and_another_model_last() -> None:
    assert plan(model(), SMALL).fits is False
    options = advise(model(), SMALL)
    possible = [one for one in options if one.possible]
    assert possible[0].fits is True
    assert possible[0].recipe.effort <= 2
    rescuing = [one for one in possible if one.fits and one.recipe.effort < 5 and one.key not in ASKING_FOR_LESS]
    assert [one.recipe.effort for one in rescuing] == sorted(one.recipe.effort for one in rescuing)
    assert {one.key for one in possible[-2:]} == {"gqa-model", "mla-model"}
    ruled_out = [one for one in options if not one.possible]
    assert options[-len(ruled_out) :] == tuple(ruled_out)


def test_every_option_has_flags_a_cost_and_a_source() -> None:
    options = by_key(advise(model(), SMALL))
    assert set(options) == set(RECIPES)
    for recipe in RECIPES.values():
        assert set(recipe.flags) == {"vllm", "sglang", "lmdeploy", "ollama"}
        assert recipe.quality
        assert recipe.source
    assert options["kv-fp8"].recipe.flags["vllm"] == "--kv-cache-dtype fp8"
    assert options["weights-fp8"].recipe.flags["ollama"] is None
    facts = options["kv-fp8"].to_json()
    assert facts["gain"]["kv_bytes_per_token"] == -262_144
    assert facts["difficulty"] == "low"


@pytest.mark.parametrize(
    ("name", "deployment", "key", "reason"),
    [
        ("llama-2-7b", SMALL, "allocation-policy", "adds no memory"),
        ("llama-2-7b", SMALL, "kv-offload", "131,072 tokens"),
        ("llama-2-7b", SMALL, "hybrid-manager", "every layer keeps every token"),
        ("llama-2-7b", replace(SMALL, kv_dtype="fp8"), "kv-int8", "the cache is fp8 already"),
        ("llama-2-7b", replace(SMALL, weight_dtype="awq"), "weights-int8", "the weights are awq-4-g128 already"),
        ("llama-2-7b", replace(SMALL, kv_cache_bytes=1 << 33), "weights-int4", "the pool has a fixed size"),
        ("llama-2-7b", replace(SMALL, utilization=0.97), "utilization", "0.97 already"),
        ("llama-2-7b", replace(SMALL, co_tenant_bytes=1 << 30), "utilization", "other processes use the GPU"),
        ("llama-2-70b", replace(SMALL, tp=8), "gqa-model", "8 query heads to a KV head already"),
        ("llama-2-70b", replace(SMALL, tp=64), "tensor-parallel", "tp=128 does not divide"),
        ("deepseek-v3", Deployment(gpu=find_gpu("h200"), tp=8), "kv-int4", "no engine has a latent cache in INT4"),
        ("deepseek-v3", Deployment(gpu=find_gpu("h200"), tp=8), "mla-model", "already"),
        ("llama-2-70b", replace(SMALL, tp=8), "mla-model", "whole on each of 8 ranks"),
    ],
)
def test_what_is_ruled_out_says_why(name: str, deployment: Deployment, key: str, reason: str) -> None:
    option = by_key(advise(model(name), deployment))[key]
    assert option.why_not is not None
    assert reason in option.why_not
    assert option.gain is None


def test_a_shorter_length_leaves_the_pool_and_serves_more_sequences() -> None:
    """A common claim is that half the length halves the memory: of one sequence, yes; the pool is what it was."""
    option = by_key(advise(model(), replace(SMALL, max_num_seqs=1)))["shorter-length"]
    assert option.gain is not None
    assert option.gain.pool_bytes == 0
    assert option.gain.tokens == 0
    assert option.gain.sequences > 0


def test_weights_given_in_bytes_shrink_by_their_quantized_part() -> None:
    geometry = model()
    counted = by_key(advise(geometry, SMALL))["weights-int4"]
    given = by_key(advise(geometry, replace(SMALL, model_weight_bytes=2 * (geometry.parameters or 0))))["weights-int4"]
    assert counted.gain is not None
    assert given.gain is not None
    assert given.gain.pool_bytes == pytest.approx(counted.gain.pool_bytes, rel=1e-6)


@pytest.mark.parametrize("current", ["fp8", "int8", "gptq-8-g128", "q8_0"])
def test_weights_given_in_8_bits_shrink_to_what_is_counted_in_4(current: str) -> None:
    """The embeddings stay in 16 bits in both: they are a larger part of the bytes than of the weights."""
    geometry = model("llama-3.1-8b")
    small = replace(SMALL, weight_dtype=current)
    total = plan(geometry, small).weighing.total
    counted = by_key(advise(geometry, small))["weights-int4"]
    given = by_key(advise(geometry, replace(small, model_weight_bytes=total)))["weights-int4"]
    assert counted.outcome is not None
    assert given.outcome is not None
    assert given.outcome.num_blocks == pytest.approx(counted.outcome.num_blocks, abs=1)


def test_weights_given_as_fewer_than_the_embeddings_do_not_grow() -> None:
    given = by_key(advise(model(), replace(SMALL, model_weight_bytes=1 << 20)))["weights-int4"]
    assert "brings nothing here" in (given.why_not or "")


def test_no_option_that_is_offered_brings_nothing() -> None:
    for deployment in (SMALL, replace(SMALL, tp=4), replace(SMALL, max_batched_tokens=1 << 20)):
        fits = plan(model(), deployment).fits
        for one in advise(model(), deployment):
            assert one.gain is None or one.gain.brings_something or one.fits != fits, one.key


def test_an_option_that_cannot_be_is_ruled_out_and_the_others_stand() -> None:
    options = by_key(advise(model(), replace(SMALL, dp=3000)))
    assert options["data-parallel"].why_not == "dp=6000 is out of range; give 1 to 4096"
    assert options["kv-fp8"].possible
    assert by_key(advise(model(), replace(SMALL, pp=32)))["pipeline-parallel"].why_not is not None


def test_a_grouped_model_divides_the_cache_by_its_groups() -> None:
    option = by_key(advise(model(), SMALL))["gqa-model"]
    assert option.gain is not None
    assert option.gain.bytes_per_token == 524_288 // 8 - 524_288  # 4 KV heads for 32, not an eighth of "MQA"


def test_advice_needs_a_memory_and_a_cache() -> None:
    with pytest.raises(SettingsError, match="advice needs the memory of a GPU"):
        advise(model(), Deployment())
    experts = {name: value for name, value in PRESETS["mixtral-8x7b"].config.items() if name != "intermediate_size"}
    with pytest.raises(SettingsError, match="give --weights-memory"):
        advise(read_geometry(experts), SMALL)
    encoder = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    assert advise(read_geometry(encoder), SMALL) == ()


def test_the_text_lists_what_to_do_and_what_not() -> None:
    text = render_advice(advise(model(), SMALL))
    assert text.startswith("what to change, best first:\n  1. ")
    assert "ruled out:\n" in text
    assert "vllm: --kv-cache-dtype fp8; sglang: --kv-cache-dtype fp8_e4m3" in text


def test_what_fits_already_is_not_said_to_fit_then() -> None:
    options = advise(model(), SMALL)
    assert "; fits then" in render_advice(options)
    assert "; fits then" not in render_advice(options, fits_already=True)


def test_options_together_fit_where_none_does_alone_and_none_is_idle() -> None:
    crowded = replace(SMALL, max_num_seqs=16)
    alone = [one for one in advise(model(), crowded) if one.recipe.effort < 3 and one.key not in ASKING_FOR_LESS]
    assert not any(one.fits for one in alone)
    found = together(model(), crowded)
    assert found is not None
    assert found.verdict.startswith("fits: 16 × 4,096 tokens")
    assert len(found.keys) >= 2
    assert found.gpus == 1
    settings: dict[str, dict[str, Any]] = {
        "kv-fp8": {"kv_dtype": "fp8"},
        "weights-int4": {"weight_dtype": "awq"},
        "headroom": {"headroom": 0.0},
        "utilization": {"utilization": 0.95},
        "fewer-in-flight": {"max_batched_tokens": 2048},
    }
    assert set(found.keys) <= set(settings)

    def fits(*keys: str) -> bool | None:
        changes: dict[str, Any] = {}
        for key in keys:
            changes |= settings[key]
        return plan(model(), replace(crowded, **changes)).fits

    assert fits(*found.keys) is True
    for left_out in found.keys:
        assert fits(*(key for key in found.keys if key != left_out)) is False
    assert render_advice(advise(model(), crowded), found).startswith("together: ")


def test_more_gpus_are_the_last_thing_that_is_tried_together() -> None:
    large = Deployment(gpu=find_gpu("L4"), max_num_seqs=8)
    found = together(model("llama-2-70b"), large)
    assert found is not None
    assert found.gpus > 1
    assert found.keys[-1] == "tensor-parallel"


def test_nothing_is_put_together_where_it_fits_or_nothing_would_do() -> None:
    assert together(model(), replace(SMALL, max_num_seqs=1)) is None
    one_is_enough = replace(SMALL, headroom=0.0, max_num_seqs=5)
    assert by_key(advise(model(), one_is_enough))["kv-fp8"].fits is True
    assert together(model(), one_is_enough) is None
    assert together(model(), replace(SMALL, max_num_seqs=100_000)) is None
