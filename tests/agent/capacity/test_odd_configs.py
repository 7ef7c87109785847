"""Configs with fields that are short, of another type or beside the point: refused by name, or trusted less."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.gpus import find_gpu
from agent.capacity.reading import LayoutUnknown
from agent.capacity.request import load_model
from engine_shim.errors import SettingsError

DECODER = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LINEAR = {"model_type": "qwen3_next", "linear_num_key_heads": 16, "linear_key_head_dim": 128} | {
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
BLOCK = {"attention": {"n_heads_in_group": 8}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": ["a"] * 32}, "no_rope_layers"),
        ({"model_type": "minimax", "attn_type_list": [1, 0]}, "attn_type_list"),
        ({"model_type": "nemotron-nas", "block_configs": [BLOCK]}, "block_configs"),
        ({"model_type": "nemotron-nas", "block_configs": [{"attention": {"n_heads_in_group": True}}] * 32}, "in_group"),
        ({"model_type": "lfm2", "full_attn_idxs": ["a"]}, "full_attn_idxs in the config has 'a'"),
        ({"model_type": "lfm2", "full_attn_idxs": [32]}, "has 32, no layer of 0 to 31"),
        ({"model_type": "zamba2", "hybrid_layer_ids": ["1"]}, "hybrid_layer_ids in the config has '1'"),
        ({"cross_attention_layers": [99]}, "cross_attention_layers in the config has 99"),
        ({"cross_attention_layers": [True]}, "has True, no layer"),
        ({"num_key_value_heads": [True] * 32}, "num_key_value_heads"),
        ({"dtype": ["bfloat16"], "torch_dtype": None}, r"dtype=\['bfloat16'\] in the config is no text"),
        ({"quantization_config": "awq"}, "quantization_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "8"}}, "bits='8' in the config is no whole number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": True}}, "bits=True in the config"),
        ({"model_type": "mixtral", "num_local_experts": "8"}, "num_local_experts='8' in the config"),
    ],
)
def test_a_field_that_would_be_misread_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_geometry(DECODER | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": [None] * 32},
        {"layer_types": ["linear_attention"] * 32, "mamba_num_heads": 8, "ssm_state_size": 16},
        {"model_type": "mamba", "state_size": 16, "layer_types": ["full_attention"] * 32},
    ],
)
def test_layers_that_the_family_has_not_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutUnknown):
        read_geometry(DECODER | fields)


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        (DECODER | {"num_key_value_heads": [0] * 32}, "none of 32 layers keeps keys and values"),
        (DECODER | LINEAR | {"full_attention_interval": 100}, "none of 32 layers keeps keys and values"),
        (
            {"text_config": DECODER, "llm_config": DECODER | {"num_hidden_layers": 2}},
            r"2 language models \(text_config",
        ),
    ],
)
def test_what_may_be_misread_is_trusted_less(config: dict[str, Any], warning: str) -> None:
    found = read_geometry(config)
    assert found.confidence == "low"
    assert any(warning.replace("\\", "") in one for one in found.warnings)


def test_what_is_in_order_is_trusted() -> None:
    twice = {"model_type": "llava", "text_config": DECODER, "llm_config": dict(DECODER)}
    for config in (DECODER, twice, DECODER | LINEAR | {"full_attention_interval": 4}):
        assert read_geometry(config).confidence == "high", config


@pytest.mark.parametrize("bits", [0, 5, 16])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_bits_that_no_format_has_are_said_to_be_unknown(method: str, bits: int) -> None:
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": bits or 1, "type": "int"}}}}
    found = read_geometry(DECODER | {"quantization_config": {"quant_method": method, "bits": bits} | groups})
    assert found.weight_format == "bfloat16"
    assert f"quant_method {method} is not known here" in found.warnings[0]


def test_experts_that_are_listed_are_not_counted_as_none() -> None:
    found = read_geometry(DECODER | {"model_type": "mixtral", "num_local_experts": [8] * 32})
    assert found.parameters is None


@pytest.mark.parametrize(
    "name", ["A1000", "T400", "A100X", "RTX 4090 Laptop", "H100 80GB HBM3 MIG 1g.10gb", "A30 MIG 1g.6gb", "A10-24Q"]
)
def test_another_card_or_a_part_of_one_is_not_taken_for_a_whole(name: str) -> None:
    with pytest.raises(SettingsError, match="is not in the table"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H200 NVL", "H200"),
        ("H200-141GB", "H200"),
        ("RTX 3090 Ti", "RTX-3090"),
        ("L4 24GB", "L4"),
        ("4090", "RTX-4090"),
    ],
)
def test_other_spellings_of_a_card(name: str, card: str) -> None:
    assert find_gpu(name).name == card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(DECODER))
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("device", [None, "/dev/zero"])
def test_what_is_no_regular_file_is_not_read(folder: Path, name: str, device: str | None) -> None:
    (folder / name).unlink(missing_ok=True)
    if device is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(device)
    with pytest.raises(SettingsError, match="is no regular file"):
        load_model(str(folder))


@pytest.mark.parametrize("size", ["Infinity", "true", '"5"', "-1", "1e300", "NaN", "1.5"])
def test_an_index_without_a_size_is_refused_by_name(folder: Path, size: str) -> None:
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{"total_size": {size}}}}}')
    with pytest.raises(SettingsError, match="its total_size is"):
        load_model(str(folder))


def test_a_byte_order_mark_does_no_harm(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_model(str(folder))[0] == DECODER


@pytest.mark.parametrize("source", ["a" * 5000, "b" * 300])
def test_a_name_that_is_too_long_is_bad_usage(source: str) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_model(source)


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "a\nb", "x" * 5000])
@pytest.mark.parametrize("field", ["model_type", "_name_or_path", "torch_dtype"])
def test_text_that_cannot_be_shown_is_refused(field: str, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{field}=.*no name that can be shown"):
        read_geometry(DECODER | {field: name})


def test_odd_names_of_fields_and_files_are_shown_with_marks(tmp_path: Path) -> None:
    found = read_geometry(DECODER | {"\ud800\x1bmamba_state": 1, "layer_types": ["full_attention"] * 32})
    assert any("??mamba_state in the config" in one for one in found.warnings)
    path = tmp_path / os.fsdecode(b"\xff\x1b.json")
    path.write_text(json.dumps(DECODER))
    assert load_model(str(path))[1] == "??"
    with pytest.raises(LayoutUnknown, match=r"layer type '\\ud800' of llama"):
        read_geometry(DECODER | {"layer_types": ["\ud800"] * 32})
