"""Bytes of a number in each format, scales included, and the weights of released models."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.fields import Fields
from agent.capacity.formats import WEIGHT_FORMATS, format_of_file, kv_format, weight_format
from agent.capacity.geometry import ModelGeometry
from agent.capacity.presets import PRESETS

Read = Callable[..., ModelGeometry]


@pytest.mark.parametrize(
    ("name", "vector_of_128"),
    [("fp16", 256), ("fp8", 128), ("fp8_e5m2", 128), ("int8", 132), ("int4", 68), ("nvfp4", 72), ("q8_0", 136),
     ("q4_0", 72), ("fp32", 512)],
)  # fmt: skip
def test_a_vector_takes_its_elements_and_its_scales(name: str, vector_of_128: int) -> None:
    assert kv_format(name).of_vector(128) == vector_of_128
    assert kv_format(name).of_vector(0) == 0


def test_eight_bits_are_half_plus_scales_and_not_three_eighths(geometry_of: Read) -> None:
    cache = geometry_of("Llama-2-7B").attention_caches[0]
    full = kv_format("fp16").of_token(cache, 1)
    assert kv_format("int8").of_token(cache, 1) / full == 0.515625
    assert kv_format("int4").of_token(cache, 1) / full == 0.265625
    assert kv_format("fp8").of_token(cache, 1) / full == 0.5


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("awq", Fraction(4) + Fraction(20, 128)),
        ("gptq-4-g32", Fraction(4) + Fraction(20, 32)),
        ("gptq-8-g128", Fraction(8) + Fraction(24, 128)),
        ("q4_0", Fraction(9, 2)),
        ("q8_0", Fraction(17, 2)),
        ("q6_k", Fraction(105, 16)),
        ("mxfp4", Fraction(17, 4)),
        ("nf4", Fraction(4) + Fraction(1, 8) + Fraction(1, 512)),
    ],
)
def test_weights_carry_their_scales(name: str, bits: Fraction) -> None:
    assert weight_format(name).bits == bits


def test_every_weight_format_says_its_sum_and_its_source() -> None:
    for one in WEIGHT_FORMATS.values():
        assert one.arithmetic
        assert one.source


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("deepseek-v3", 671_026_404_352),  # less 58 × 256 biases of its router, which the config does not name
    ],
)
def test_weights_of_released_models_are_counted_exactly(name: str, parameters: int) -> None:
    assert read_geometry(PRESETS[name].config).parameters == parameters


def test_weights_of_old_models_are_counted_exactly(geometry_of: Read) -> None:
    assert geometry_of("GPT-2").parameters == 124_439_808
    assert geometry_of("OPT-125M", ffn_dim=3072).parameters == 125_239_296


@pytest.mark.parametrize(
    ("format", "gigabytes"), [("fp16", 13.48), ("int8", 7.01), ("awq", 3.89), ("q4_0", 3.79), ("q4_k_m", 4.12)]
)
def test_llama_2_7b_in_each_format(format: str, gigabytes: float) -> None:
    geometry = read_geometry(PRESETS["llama-2-7b"].config)
    size = weight_format(format).bytes_of(geometry.parameters or 0, geometry.embedding_parameters, 0)
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (None, "bfloat16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq-4-g64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq-8-g128"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt_fp4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, None),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "modelopt_fp4", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "modelopt"}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}},
            "gptq-4-g128",
        ),
        ({"quant_method": "something new"}, None),
    ],
)  # fmt: skip
def test_the_format_of_a_checkpoint_is_read(quantization: dict[str, Any] | None, found: str | None) -> None:
    assert format_of_file(None if quantization is None else Fields(quantization), "bfloat16") == found


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "MIXED_PRECISION"])
def test_an_algorithm_that_is_not_known_is_said_and_counted_in_16_bits(algorithm: str) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm}
    found = read_geometry(dict(PRESETS["llama-2-7b"].config) | {"quantization_config": quantization})
    assert found.weight_format == "float16"
    assert "quant_method modelopt is not known here in the form that the config has" in found.warnings[0]


@pytest.mark.parametrize("name", ["bfloat16", "fp8", "awq", "q4_0"])
def test_what_a_format_keeps_is_a_part_of_its_bytes(name: str) -> None:
    format = weight_format(name)
    assert format.kept_bytes(1000) == format.bytes_of(1000, 1000, 0)
