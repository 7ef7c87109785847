"""Layouts beyond the plain one, and those that are refused or not trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.geometry import ModelGeometry
from agent.capacity.planner import plan
from agent.capacity.reading import LayoutUnknown
from agent.capacity.words import arithmetic, attention_of, to_json
from engine_shim.errors import SettingsError

Read = Callable[..., ModelGeometry]
DECODER: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, Any] = DECODER | {
    "model_type": "deepseek_v32",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def token_bytes(config: dict[str, Any], **settings: Any) -> int:
    return plan(read_geometry(config), Deployment(**settings)).kv_bytes_per_token


def test_an_indexer_keeps_fp8_keys_and_scales_beside_the_latent() -> None:
    sparse = LATENT | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    assert token_bytes(sparse) == 4 * (576 * 2 + 132)
    assert token_bytes(sparse, kv_dtype="fp8_ds_mla", tp=8) == 4 * (656 + 132)
    assert token_bytes(sparse, kv_dtype="fp8") == token_bytes(sparse, kv_dtype="fp8_ds_mla")
    assert attention_of(read_geometry(sparse)) == "MLA + indexer"


def test_what_is_not_counted_is_said(cases: dict[str, dict[str, Any]]) -> None:
    unknown = read_geometry(DECODER | {"quantization_config": {"quant_method": "magic"}})
    assert "quant_method magic is not known here" in unknown.warnings[0]
    assert unknown.weight_format == "bfloat16"
    pictures = read_geometry(cases["Qwen3-VL-30B-A3B"]["config"])
    assert any("vision part are not counted" in note for note in pictures.notes)


def test_shared_layers_keep_nothing() -> None:
    shared = DECODER | {"model_type": "gemma3n_text", "head_dim": 64, "num_kv_shared_layers": 1, "sliding_window": 128}
    shared["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    geometry = read_geometry(shared)
    assert [len(layer) for layer in geometry.layers] == [1, 1, 1, 0]
    assert any("share the cache" in note for note in geometry.notes)


def test_heads_of_each_layer_may_differ() -> None:
    listed = DECODER | {"model_type": "openelm", "num_kv_heads": [1, 2, 4, 8], "head_dim": 64}
    assert token_bytes(listed) == 2 * (1 + 2 + 4 + 8) * 64 * 2
    blocks = [
        {"attention": {"n_heads_in_group": 4}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 8}},
    ]
    nas = DECODER | {"model_type": "nemotron-nas", "num_hidden_layers": 3, "block_configs": blocks}
    assert token_bytes(nas) == 2 * (2 + 1) * 64 * 2


def test_old_names_of_one_kv_head() -> None:
    mpt = {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 2, "max_seq_len": 2048}
    assert token_bytes(mpt) == 2 * 2 * 8 * 64 * 2
    assert token_bytes(mpt | {"attn_config": {"attn_type": "multiquery_attention"}}) == 2 * 2 * 64 * 2
    assert token_bytes(mpt | {"attn_config": {"kv_n_heads": 4}}) == 2 * 2 * 4 * 64 * 2
    falcon = {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    assert token_bytes(falcon) == 2 * 2 * 64 * 2
    assert token_bytes(falcon | {"multi_query": False}) == 2 * 2 * 8 * 64 * 2
    assert token_bytes(falcon | {"new_decoder_architecture": True, "num_kv_heads": 2}) == 2 * 2 * 2 * 64 * 2
    assert token_bytes({"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 8, "n_embd": 512}) == 2 * 2 * 64 * 2


def test_heads_of_a_decoder_divide_its_width() -> None:
    whisper = {"model_type": "whisper", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 64}
    with pytest.raises(SettingsError, match="d_model=8 is no multiple of 64 heads"):
        read_geometry(whisper | {"vocab_size": 100, "intermediate_size": 8, "max_position_embeddings": 448})


def test_cross_attention_is_constant_for_a_sequence() -> None:
    whisper = {
        "model_type": "whisper",
        "d_model": 64,
        "decoder_layers": 3,
        "encoder_layers": 2,
        "decoder_attention_heads": 4,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 51866,
        "torch_dtype": "float16",
        "num_hidden_layers": 2,
    }
    found = plan(read_geometry(whisper), Deployment(block_tokens=32))
    assert found.kv_bytes_per_token == 3 * 2 * 4 * 16 * 2
    assert found.cross_bytes_per_sequence == 1500 * 3 * 2 * 4 * 16 * 2
    assert found.engine_blocks_per_sequence == 448 // 32 + -(-1500 // 32)
    pictures = DECODER | {"model_type": "mllama_text_model", "cross_attention_layers": [1, 3]}
    nested = {"model_type": "mllama", "text_config": pictures, "vision_config": {"image_size": 560, "patch_size": 14}}
    geometry = read_geometry(nested)
    assert geometry.encoder_tokens == 4 * 1601
    assert plan(geometry, Deployment()).kv_bytes_per_token == 2 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("config", "family", "state_bytes"),
    [
        (
            {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 64,
             "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
            "mamba2", 3 * (3 * (1024 + 2 * 128) * 2 + 16 * 64 * 128 * 2),
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
            "short-conv", 3 * 2 * 512 * 2,
        ),
        (
            {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1,
             "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_d_ssm": 512},
            "mamba2", 4 * (3 * (512 + 2 * 64) * 2 + 8 * 64 * 64 * 2),
        ),
        (
            {"model_type": "kimi_linear", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
             "v_head_dim": 128, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 8,
             "head_dim": 64, "short_conv_kernel_size": 4}},
            "kda", 3 * (3 * 3 * 8 * 64 * 2 + 8 * 64 * 64 * 4),
        ),
    ],
    ids=["bamba", "lfm2", "falcon_h1", "kimi_linear"],
)  # fmt: skip
def test_states_of_other_families(config: dict[str, Any], family: str, state_bytes: int) -> None:
    geometry = read_geometry(DECODER | config)
    assert {cache.family for cache in geometry.state_caches} == {family}
    assert plan(geometry, Deployment()).state_bytes_per_sequence == state_bytes


def test_a_state_is_divided_among_ranks(geometry_of: Read) -> None:
    sizes = [
        plan(geometry_of("Nemotron-3-Nano-30B-A3B"), Deployment(tp=tp)).state_bytes_per_sequence for tp in (1, 2, 4)
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "deepseek_v4", "compress_ratios": [4, 128]}, "compress_ratios"),
        ({"model_type": "rwkv7"}, "model_type rwkv7 keeps something other"),
        ({"model_type": "brand_new", "recurrent_size": 64}, "recurrent_size"),
        ({"model_type": "brand_new", "kv_lora_rank": 512, "latent_size": 8}, "latent_size"),
        ({"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern"),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ({"layer_types": ["full_attention"] * 3 + ["hyper_attention"]}, "hyper_attention"),
        ({"model_type": "jamba"}, "does not say which of its layers"),
    ],
)
def test_layouts_that_are_not_known_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(LayoutUnknown, match=reason):
        read_geometry(DECODER | changed)


@pytest.mark.parametrize(
    ("changed", "confidence"),
    [
        ({}, "high"),
        ({"model_type": "brand_new"}, "low"),
        ({"model_type": None}, "low"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "low"),
        ({"model_type": "brand_new", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "low"),
        ({"mamba_d_state": 16}, "low"),
        ({"sliding_window": 1024}, "medium"),
        ({"model_type": "brand_new", "sliding_window": 1024}, "low"),
        ({"model_type": "deepseek_v3"}, "low"),
    ],
)
def test_confidence_falls_with_what_is_not_known(changed: dict[str, Any], confidence: str) -> None:
    geometry = read_geometry(DECODER | changed)
    assert geometry.confidence == confidence
    assert bool(geometry.warnings) == (confidence != "high")


def test_latent_attention_is_never_counted_as_full_heads_in_silence() -> None:
    """vllm-project/vllm#44376: a model with kv_lora_rank was sized by its heads, and refused a length that fits."""
    silent = read_geometry(DECODER | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 64})
    assert token_bytes(DECODER | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}) == 4 * 576 * 2
    assert "an engine that keeps full heads needs" in silent.warnings[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": None}, "no usable num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers='32' in the config is no whole number"),
        ({"num_hidden_layers": 10**6}, "no usable num_hidden_layers"),
        ({"num_attention_heads": None}, "no usable num_attention_heads"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"hidden_size": 500}, "add head_dim"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 KV heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2 in the config is not in 1 to"),
        ({"layer_types": ["full_attention"]}, "4 entries, one a layer"),
        ({"layer_types": ["sliding_attention"] * 4}, "no usable sliding_window"),
        ({"use_sliding_window": "yes", "sliding_window": 8, "model_type": "qwen2"}, "neither true nor false"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "no usable qk_rope_head_dim"),
    ],
)
def test_bad_fields_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_geometry(DECODER | changed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 4),
        ({"model_type": "mixtral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, 0),
        ({"model_type": "gemma2", "sliding_window": 64}, 2),
        ({"model_type": "cohere2", "sliding_window": 64, "sliding_window_pattern": 4}, 3),
    ],
)
def test_windows_by_family(changed: dict[str, Any], sliding: int) -> None:
    geometry = read_geometry(DECODER | changed)
    assert sum(cache.window == 64 for cache in geometry.attention_caches) == sliding


def test_the_sums_are_said_in_words(geometry_of: Read) -> None:
    text = "\n".join(arithmetic(plan(geometry_of("Llama-2-7B"), Deployment())))
    assert "full: 32 layers × 2 (K, V) × 32 KV heads × 128 × 2 B = 524,288 B a token" in text
    latent = "\n".join(arithmetic(plan(geometry_of("DeepSeek-V3"), Deployment(kv_dtype="fp16"))))
    assert "mla: 61 layers × 1 latent vector × 576 × 2 B = 70,272 B a token" in latent
    states = "\n".join(arithmetic(plan(geometry_of("Jamba-v0.1"), Deployment())))
    assert "28 layers × (conv 3 × 8192 × 2 B + ssm 8192 × 16 × 4 B) = 16,056,320 B" in states


def test_an_encoder_gets_an_answer_and_no_number(geometry_of: Read) -> None:
    facts = to_json(plan(geometry_of("Encoder-only-BERT"), Deployment(memory_bytes=1 << 34)))
    assert facts["kv_bytes_per_token"] is None
    assert facts["num_blocks"] is None
    assert facts["confidence"] == "refused"
    assert "no KV cache" in facts["arithmetic"][0]
