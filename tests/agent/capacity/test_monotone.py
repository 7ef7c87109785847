"""More of what helps never plans less, and more of what costs never plans more, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.capacity.block_layout import lay_out
from agent.capacity.deployment import Deployment
from agent.capacity.formats import KV_FORMATS, WEIGHT_FORMATS
from agent.capacity.geometry import ModelGeometry
from agent.capacity.planner import Plan, plan
from tests.agent.capacity.test_known_models import NAMES

GIB = 1 << 30
Read = Callable[..., ModelGeometry]
MODELS = [name for name in NAMES if name != "Encoder-only-BERT"]
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

deployments = st.builds(
    Deployment,
    memory_bytes=st.integers(4, 200).map(lambda gib: gib * GIB),
    model_weight_bytes=st.integers(1, 150).map(lambda gib: gib * GIB),
    block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
    max_model_len=st.integers(1, 200_000),
    utilization=st.floats(0.3, 1.0),
    headroom=st.floats(0.0, 0.5),
    activation_bytes=st.integers(0, 4).map(lambda gib: gib * GIB),
    hybrid_manager=st.booleans(),
    max_batched_tokens=st.integers(1, 20_000),
    kv_dtype=st.sampled_from(["fp16", "fp8", "int8"]),
    dp=st.integers(1, 4),
)


def room(found: Plan) -> tuple[int, int, int, int]:
    """What a deployment can hold."""
    assert found.pool is not None
    pool = found.pool
    return pool.num_blocks, pool.longest_sequence_tokens, pool.reserve_sequences, pool.ideal_sequences


@quick
@given(name=st.sampled_from(MODELS), deployment=deployments, more=st.integers(1, 64), percent=st.integers(1, 30))
def test_more_memory_never_holds_less(
    geometry_of: Read, name: str, deployment: Deployment, more: int, percent: int
) -> None:
    geometry = geometry_of(name)
    base = room(plan(geometry, deployment))
    larger = replace(deployment, memory_bytes=(deployment.memory_bytes or 0) + more * GIB)
    share = replace(deployment, utilization=min(1.0, deployment.utilization * (1 + percent / 100)))
    lighter = replace(deployment, model_weight_bytes=(deployment.model_weight_bytes or 0) * (100 - percent) // 100)
    for better in (larger, share, lighter):
        assert all(new >= old for new, old in zip(room(plan(geometry, better)), base, strict=True))
    co_tenant = replace(deployment, co_tenant_bytes=more * GIB)
    assert all(new <= old for new, old in zip(room(plan(geometry, co_tenant)), base, strict=True))


@quick
@given(name=st.sampled_from(MODELS), deployment=deployments, factor=st.integers(2, 5))
def test_longer_sequences_never_fit_more_often(
    geometry_of: Read, name: str, deployment: Deployment, factor: int
) -> None:
    geometry = geometry_of(name)
    short = plan(geometry, deployment)
    long = plan(geometry, replace(deployment, max_model_len=(deployment.max_model_len or 1) * factor))
    assert short.pool is not None
    assert long.pool is not None
    assert long.ideal_bytes_per_sequence >= short.ideal_bytes_per_sequence
    if not geometry.state_caches or geometry.attention_caches:  # a block of states alone spans the longest sequence
        assert long.blocks_needed >= short.blocks_needed
    assert long.pool.reserve_sequences <= short.pool.reserve_sequences
    assert short.fits or not long.fits
    more = plan(geometry, replace(deployment, max_num_seqs=factor * deployment.dp + 1))
    assert short.fits or not more.fits
    assert more.pool is not None
    assert more.pool.shortfall_bytes >= short.pool.shortfall_bytes


@quick
@given(name=st.sampled_from(MODELS), deployment=deployments, less=st.floats(0.0, 1.0))
def test_headroom_and_replicas(geometry_of: Read, name: str, deployment: Deployment, less: float) -> None:
    geometry = geometry_of(name)
    base = plan(geometry, deployment)
    freer = plan(geometry, replace(deployment, headroom=deployment.headroom * less))
    assert base.pool is not None
    assert freer.pool is not None
    assert freer.pool.usable_blocks >= base.pool.usable_blocks
    doubled = plan(geometry, replace(deployment, dp=2 * deployment.dp))
    assert doubled.max_concurrent_sequences == 2 * (base.max_concurrent_sequences or 0)


@pytest.mark.parametrize("name", MODELS)
def test_more_ranks_and_stages_never_keep_more_on_one(geometry_of: Read, name: str) -> None:
    geometry = geometry_of(name)
    heads = geometry.attention_heads
    ranks = [tp for tp in (1, 2, 4, 8, 16) if heads and heads % tp == 0]
    ranks = [
        tp for tp in ranks
        if all(one.replicated or one.kv_heads % tp == 0 or tp % one.kv_heads == 0 for one in geometry.attention_caches)
    ]  # fmt: skip
    by_rank = [plan(geometry, Deployment(tp=tp)).kv_bytes_per_token for tp in ranks]
    assert by_rank == sorted(by_rank, reverse=True)
    by_stage = [plan(geometry, Deployment(pp=pp)) for pp in (1, 2, 3, 4)]
    assert [one.kv_bytes_per_token for one in by_stage] == sorted(
        (one.kv_bytes_per_token for one in by_stage), reverse=True
    )


@pytest.mark.parametrize("name", MODELS)
def test_narrower_formats_never_take_more(geometry_of: Read, name: str) -> None:
    geometry = geometry_of(name)
    sizes = {
        dtype: plan(geometry, Deployment(kv_dtype=dtype)).kv_bytes_per_token
        for dtype in KV_FORMATS
        if dtype != "fp8_ds_mla"
    }
    assert sizes["float32"] == 2 * sizes["float16"] == 4 * sizes["fp8"]
    assert sizes["float16"] > sizes["int8"] > sizes["fp8"] >= sizes["int4"] or name == "DeepSeek-V2-Lite"
    weights = [one.bytes_of(7 * 10**9, 10**8, 5 * 10**9) for one in WEIGHT_FORMATS.values() if one.keeps == "nothing"]
    bits = [one.bits for one in WEIGHT_FORMATS.values() if one.keeps == "nothing"]
    assert [size for _, size in sorted(zip(bits, weights, strict=True))] == sorted(weights)


def test_a_hybrid_manager_never_needs_more_for_long_sequences(geometry_of: Read) -> None:
    geometry = geometry_of("Gemma-2-9B")
    for length in (20_000, 50_000, 100_000):
        on, off = (plan(geometry, Deployment(max_model_len=length, hybrid_manager=flag)) for flag in (True, False))
        assert on.engine_blocks_per_sequence * on.kv_bytes_per_block < (
            off.engine_blocks_per_sequence * off.kv_bytes_per_block
        )


def test_blocks_of_a_sequence_grow_with_it(geometry_of: Read) -> None:
    for name in ("gpt-oss-20b", "Llama-4-Scout", "Jamba-v0.1", "Gemma-4-31B-NVFP4"):
        geometry = geometry_of(name)
        layout = lay_out(
            geometry, KV_FORMATS["float16"], tp=1, pp=1, block_tokens=16, model_bytes=2, max_model_len=10**6,
            hybrid_manager=True, prefix_cache=True,
        )  # fmt: skip
        for keep_all in (True, False):
            counts = [
                layout.blocks_for(tokens, keep_all=keep_all, in_flight=2048, encoder_tokens=0)
                for tokens in range(1, 20_000, 97)
            ]
            assert counts == sorted(counts)
