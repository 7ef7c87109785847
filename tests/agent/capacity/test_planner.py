"""The planner against measured pools, the articles' example, and the ways that it may not lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.geometry import ModelGeometry
from agent.capacity.gpus import GPUS, find_gpu
from agent.capacity.planner import Plan, plan
from agent.capacity.presets import PRESETS
from engine_shim.errors import SettingsError

GIB = 1 << 30
Read = Callable[..., ModelGeometry]


def preset(name: str) -> Plan:
    return plan(read_geometry(PRESETS[name].config, name), PRESETS[name].deployment)


@pytest.mark.parametrize(
    ("pool_gib", "blocks", "within", "fits"), [(3.81, 1951, 1, True), (2.89, 1479, 1, False)], ids=["3.81", "2.89"]
)
def test_measured_pools_of_llama_3_on_24_gb(
    geometry_of: Read, pool_gib: float, blocks: int, within: int, fits: bool
) -> None:
    """vllm-project/vllm#10517: an RTX 3090 had 1952 and 1478 blocks, and refused 29,000 tokens in the smaller pool."""
    found = plan(
        geometry_of("Llama-3.1-8B"), Deployment(kv_cache_bytes=int(pool_gib * GIB), max_model_len=29_000)
    )  # fmt: skip
    assert found.pool is not None
    assert abs(found.pool.num_blocks - blocks) <= within
    assert found.pool.pool_tokens == found.pool.num_blocks * 16
    assert found.fits is fits
    if not fits:
        assert found.pool.longest_sequence_tokens == 23_648
        assert "does not fit" in found.verdict


def test_the_pool_of_a_measured_start_follows_from_its_parts(geometry_of: Read) -> None:
    """vllm-project/vllm#10511: 79.22 GiB × 0.90, weights 14.96, others 1.79, activations 1.26: 53.29 GiB are left."""
    found = plan(
        geometry_of("Llama-3.1-8B"),
        Deployment(
            memory_bytes=int(79.22 * GIB),
            model_weight_bytes=int(14.96 * GIB),
            activation_bytes=int(1.26 * GIB),
            other_bytes=int(1.79 * GIB),
        ),
    )
    assert found.memory is not None
    assert found.memory.pool_bytes == pytest.approx(53.29 * GIB, abs=0.01 * GIB)
    # Without the last two given, the estimate of the activations is near what was measured.
    estimated = plan(read_geometry(PRESETS["llama-3.1-8b"].config), Deployment(memory_bytes=int(79.22 * GIB)))
    assert estimated.memory is not None
    assert estimated.memory.activation_bytes == pytest.approx(1.26 * GIB, rel=0.05)
    assert estimated.memory.weights_bytes == pytest.approx(14.96 * GIB, rel=0.001)


def test_a_measured_pool_of_81_gib(geometry_of: Read) -> None:
    """vllm-project/vllm#19503: 81.38 GiB hold 333,325 blocks of this model at TP 8."""
    found = plan(geometry_of("Llama-3.1-8B"), Deployment(tp=8, kv_cache_bytes=int(81.38 * GIB)))
    assert found.pool is not None
    assert abs(found.pool.num_blocks - 333_325) <= 0.005 * GIB // found.kv_bytes_per_block  # as printed, two digits


def test_windowed_layers_are_counted_both_ways(geometry_of: Read) -> None:
    """gpt-oss-20b, 32 sequences of 8,192 tokens: 12.00 GiB with every layer whole, 6.09 GiB within the windows."""
    found = plan(geometry_of("gpt-oss-20b"), Deployment(max_model_len=8192, kv_dtype="bf16", kv_cache_bytes=13 * GIB))
    assert 32 * 8192 * found.kv_bytes_per_token == 12 * GIB
    assert 32 * found.ideal_bytes_per_sequence / GIB == pytest.approx(6.09, abs=0.005)
    assert found.pool is not None
    assert found.pool.ideal_sequences > found.pool.reserve_sequences  # and the verdict takes the smaller
    assert found.max_concurrent_sequences == found.pool.reserve_sequences


def test_growth_is_no_straight_line(geometry_of: Read) -> None:
    geometry = geometry_of("gpt-oss-20b")
    sizes = [
        plan(geometry, Deployment(max_model_len=length)).ideal_bytes_per_sequence for length in (64, 128, 192, 256)
    ]
    assert sizes[1] - sizes[0] == 64 * 49_152
    assert sizes[3] - sizes[2] == 64 * 24_576


def test_the_articles_deployment(geometry_of: Read) -> None:
    """Llama-2-70B on 8 × A100-80GB, TP 4 × PP 2, FP8 KV, 85 %, 64 requests of 4,096 tokens."""
    found = preset("llama-2-70b-8xa100")
    assert found.deployment.gpus == 8
    assert found.weighing.total == 137_953_296_384  # "140 GB"
    assert found.kv_bytes_per_token == 20_480  # of one GPU; 40 layers, 2 KV heads of the 8
    assert found.fits is True
    assert found.memory is not None
    assert found.memory.budget_bytes is not None
    assert 8 * found.memory.budget_bytes / 1e9 == pytest.approx(578, abs=2)  # taken at once; "~500 GB" is not needed
    need = 64 * 4096 * found.kv_bytes_per_token * 8
    assert need / 1e9 == pytest.approx(42.9, abs=0.1)
    assert found.max_concurrent_sequences is not None
    assert found.max_concurrent_sequences > 600


def test_other_processes_may_keep_the_engine_from_starting(geometry_of: Read) -> None:
    alone = plan(geometry_of("GPT-2"), Deployment(memory_bytes=40 * GIB))
    beside = plan(geometry_of("GPT-2"), Deployment(memory_bytes=40 * GIB, co_tenant_bytes=22 * GIB))
    lower = plan(geometry_of("GPT-2"), Deployment(memory_bytes=40 * GIB, co_tenant_bytes=22 * GIB, utilization=0.45))
    assert alone.fits is True
    assert beside.fits is False
    assert "--gpu-memory-utilization 0.45 or less" in beside.verdict
    assert lower.fits is True


def test_weights_that_are_not_known_leave_the_question_open(geometry_of: Read) -> None:
    open_question = plan(geometry_of("DeepSeek-V3"), Deployment(memory_bytes=80 * GIB))
    assert open_question.fits is None
    assert open_question.confidence == "medium"
    assert any("--weights-memory" in one for one in open_question.warnings)
    assert open_question.pool is None  # experts of unknown size: no number would mean anything
    in_a_given_pool = plan(geometry_of("DeepSeek-V3"), Deployment(kv_cache_bytes=20 * GIB))
    assert in_a_given_pool.pool is not None
    assert in_a_given_pool.pool.num_blocks == 20 * GIB // in_a_given_pool.kv_bytes_per_block
    known = plan(geometry_of("DeepSeek-V3"), Deployment(memory_bytes=80 * GIB, model_weight_bytes=642 * GIB))
    assert known.fits is False
    assert "over the budget" in known.verdict
    enough_either_way = plan(geometry_of("Llama-2-7B"), Deployment(memory_bytes=80 * GIB))
    assert enough_either_way.fits is True
    assert enough_either_way.confidence == "medium"


def test_a_length_that_hardly_any_request_has_is_said(geometry_of: Read) -> None:
    found = plan(geometry_of("Llama-4-Scout"), Deployment())
    assert any("10,485,760" in one for one in found.warnings)
    assert not plan(geometry_of("Llama-4-Scout"), Deployment(max_model_len=8192)).warnings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide the model's 32 attention heads; use 1, 2, 4, 8, 16, 32"),
        ({"tp": 0}, "tp=0 is out of range"),
        ({"pp": 40}, "pp=40 stages for 32 layers"),
        ({"utilization": 1.2}, "gpu-memory-utilization=1.2 is no share"),
        ({"headroom": 1.0}, "headroom=1 is no share"),
        ({"block_tokens": 0}, "block-size=0 is out of range"),
        ({"kv_dtype": "fp7"}, "kv dtype 'fp7' is not known; use auto, float16"),
        ({"weight_dtype": "int3"}, "weight dtype 'int3' is not known"),
        ({"gpu": GPUS["GB10"]}, "GB10 shares the host's memory"),
    ],
)
def test_settings_that_are_none_are_refused_by_name(
    geometry_of: Read, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(geometry_of("Llama-3.1-8B"), Deployment(**settings))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_kv_heads_must_divide_or_be_divided(geometry_of: Read) -> None:
    with pytest.raises(SettingsError, match="tp=3 and 4 KV heads"):
        plan(
            geometry_of("Llama-3.1-8B", num_attention_heads=12, num_key_value_heads=4, hidden_size=768),
            Deployment(tp=3),
        )


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("nvidia h100 80gb hbm3", "H100-80GB"),
        ("H100", "H100-80GB"),
        ("4090", "RTX-4090"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("L4", "L4"),
    ],
)
def test_cards_are_found_however_they_are_spelt(said: str, meant: str) -> None:
    assert find_gpu(said).name == meant


def test_a_card_that_may_be_two_is_asked_about() -> None:
    with pytest.raises(SettingsError, match="may be A100-40GB or A100-80GB"):
        find_gpu("a100")
    with pytest.raises(SettingsError, match="not in the table"):
        find_gpu("voodoo 2")


def test_every_card_has_a_size_and_a_source() -> None:
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.unified == (gpu.memory_bytes is None)
        if gpu.driver_mib is not None and gpu.cuda_gib is not None:
            share = gpu.cuda_gib * 1024 / gpu.driver_mib
            assert 0.95 < share < 1.0, gpu.name
