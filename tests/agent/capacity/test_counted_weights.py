"""Weights counted from a config are those of the checkpoint: mixtures of experts, shared MLPs, lists by layer."""

from __future__ import annotations

from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.memory import activations
from agent.capacity.planner import plan
from engine_shim.errors import SettingsError

Config = dict[str, Any]


def attention_at(*layers: int, of: int, other: str) -> list[str]:
    return ["attention" if index in layers else other for index in range(of)]


ERNIE: Config = {
    "model_type": "ernie4_5_moe",
    "use_bias": False,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_layer_interval": 1,
}
ERNIE_21B = ERNIE | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "tie_word_embeddings": True,
}
ERNIE_300B = ERNIE | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 3584,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 53,
    "tie_word_embeddings": False,
}
LFM2_8B = {
    "model_type": "lfm2_moe",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_dense_layers": 2,
    "num_experts": 32,
    "conv_L_cache": 3,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
}
LFM2_1B = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "block_ff_dim": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_embedding": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
GRANITE: Config = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "num_hidden_layers": 40,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "tie_word_embeddings": True,
    "layer_types": attention_at(5, 15, 25, 35, of=40, other="mamba"),
}
GRANITE_H_SMALL = GRANITE | {
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "mamba_n_heads": 128,
}
GRANITE_H_1B = GRANITE | {
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 4096,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "mamba_n_heads": 48,
}
GRANITE_SHARED = {
    "model_type": "granitemoeshared",
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "tie_word_embeddings": True,
}
QWEN3_CODER = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
HUNYUAN_A13B = {
    "model_type": "hunyuan_v1_moe",
    "vocab_size": 128167,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_shared_expert": [1] * 32,
    "use_mixed_mlp_moe": True,
    "moe_layer_num_skipped": 0,
    "tie_word_embeddings": True,
}
APERTUS_8B = {
    "model_type": "apertus",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
AFM_4B = {
    "model_type": "arcee",
    "vocab_size": 128004,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_hidden_layers": 36,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
ZAMBA2 = {
    "model_type": "zamba2",
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 54,
    "layers_block_type": ["hybrid" if index in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for index in range(54)],
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 80,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_head_dim": 160,
    "num_mem_blocks": 2,
    "adapter_rank": 128,
}
GLM_LITE = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "mlp_layer_types": ["dense"] + ["sparse"] * 46,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_latent_size": 256,
}

KIMI_LINEAR: Config = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


# Each is also what Transformers 5.19's own class of that config has on the meta device, ties counted once. Beside it
# stands where the checkpoint's own figure is published.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(ERNIE_21B, 21_825_437_888, id="ERNIE-4.5-21B-A3B"),
        pytest.param(ERNIE_300B, 299_484_163_264, id="ERNIE-4.5-300B-A47B"),
        # Hugging Face's API: BF16 8,339,929,856 and F32 704, the biases of its 22 routers.
        pytest.param(LFM2_8B, 8_339_929_856 + 704, id="LFM2-8B-A1B"),
        pytest.param(LFM2_1B, 1_170_340_608, id="LFM2-1.2B"),
        # n-params of llama.cpp for unsloth/granite-4.0-h-small-GGUF.
        pytest.param(GRANITE_H_SMALL, 32_207_337_984, id="Granite-4.0-H-Small"),
        pytest.param(GRANITE_H_1B, 1_461_538_368, id="granitemoehybrid without experts"),
        pytest.param(GRANITE_SHARED, 1_410_122_752, id="granitemoeshared"),
        # Hugging Face's API, revision 9d90cf8 of Qwen3-Coder-480B-A35B-Instruct: BF16 480,154,875,392.
        pytest.param(QWEN3_CODER, 480_154_875_392, id="Qwen3-Coder-480B-A35B"),
        pytest.param(HUNYUAN_A13B, 80_393_183_232, id="Hunyuan-A13B"),
        pytest.param(APERTUS_8B, 8_053_338_176 - 64, id="Apertus-8B, less two slopes of each layer's activation"),
        pytest.param(AFM_4B, 4_619_184_640, id="arcee"),
        pytest.param(ZAMBA2, 2_662_214_560, id="zamba2"),
        pytest.param(GLM_LITE, 29_943_390_976, id="glm4_moe_lite"),
        pytest.param(KIMI_LINEAR, 49_122_675_072, id="Kimi-Linear-48B-A3B"),
        pytest.param(NEMOTRON_H, 305_548_480, id="nemotron_h with latent experts"),
    ],
)
def test_weights_are_those_of_the_checkpoint(config: Config, parameters: int) -> None:
    assert read_geometry(config).parameters == parameters


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (ERNIE_21B, {"moe_layer_start_index": 0}),
        (ERNIE_21B, {"moe_layer_end_index": 20}),
        (ERNIE_21B, {"moe_layer_interval": 2}),
        (ERNIE_21B, {"moe_num_shared_experts": 1}),
        (LFM2_8B, {"num_dense_layers": 0}),
        (LFM2_1B, {"block_auto_adjust_ff_dim": False}),
        (LFM2_1B, {"tie_embedding": False}),
        (GRANITE_H_SMALL, {"shared_intermediate_size": 0}),
        (GRANITE_SHARED, {"shared_intermediate_size": 0}),
        (QWEN3_CODER, {"shared_expert_intermediate_size": 2560}),
        (QWEN3_CODER, {"decoder_sparse_step": 0}),
        (HUNYUAN_A13B, {"moe_intermediate_size": [3072] * 31 + [1024]}),
        (HUNYUAN_A13B, {"use_mixed_mlp_moe": False}),
        (HUNYUAN_A13B, {"moe_layer_num_skipped": 1, "intermediate_size": 4096}),
        (GLM_LITE, {"mlp_layer_types": ["sparse"] * 47}),
        (GLM_LITE, {"mlp_layer_types": None, "moe_layer_freq": [0, 0] + [1] * 45}),
        (KIMI_LINEAR, {"num_shared_experts": 0}),
        (KIMI_LINEAR, {"moe_layer_freq": 2}),
        (NEMOTRON_H, {"moe_latent_size": None}),
        (NEMOTRON_H, {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "moe"]}),
        (ZAMBA2, {"num_mem_blocks": 1}),
        (ZAMBA2, {"use_shared_attention_adapter": True}),
    ],
)
def test_every_field_is_read(config: Config, changed: Config) -> None:
    assert read_geometry(config | changed).parameters != read_geometry(config).parameters


def test_a_list_of_widths_is_planned_and_its_largest_counts_for_activations() -> None:
    listed = {
        "model_type": "gemma3n_text",
        "vocab_size": 262400,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": [8192, 16384, 16384, 8192],
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    geometry = read_geometry(listed)
    assert plan(geometry, Deployment(kv_dtype="fp16")).kv_bytes_per_token == 4 * 2 * 2 * 256 * 2
    assert geometry.parameters is None
    assert geometry.intermediate_size == 16384
    widest = read_geometry(listed | {"intermediate_size": 16384})
    assert activations(geometry, Deployment()) == activations(widest, Deployment())
    with pytest.raises(SettingsError, match="intermediate_size='wide' in the config is no whole number"):
        read_geometry(listed | {"intermediate_size": [8192, "wide", 1, 1]})


def test_a_list_of_widths_is_counted_layer_by_layer() -> None:
    dense = {name: HUNYUAN_A13B[name] for name in HUNYUAN_A13B if "moe" not in name and "expert" not in name}
    dense |= {"model_type": "llama"}
    wide, narrow, mixed = (
        read_geometry(dense | {"intermediate_size": widths}).parameters or 0
        for widths in (8192, 4096, [8192] * 8 + [4096] * 24)
    )
    assert mixed == narrow + (wide - narrow) // 4
    short = read_geometry(HUNYUAN_A13B | {"moe_intermediate_size": [3072, 512]})
    assert short.parameters is None
    assert short.parameters_note == "moe_intermediate_size is listed for 2 of 32 layers: not counted"


OPENELM_1B: Config = {
    "model_type": "openelm",
    "vocab_size": 32000,
    "num_transformer_layers": 28,
    "model_dim": 2048,
    "head_dim": 64,
    "max_context_length": 2048,
    "num_kv_heads": [4] * 3 + [5] * 7 + [6] * 8 + [7] * 6 + [8] * 4,
    "num_query_heads": [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4,
    "ffn_multipliers": [0.5] * 14 + [4.0] * 14,
    "share_input_output_layers": True,
}


def test_openelm_is_read_by_its_own_names() -> None:
    found = plan(read_geometry(OPENELM_1B), Deployment(kv_dtype="fp16"))
    assert found.kv_bytes_per_token == 2 * 2 * 64 * sum(OPENELM_1B["num_kv_heads"])
    assert found.confidence == "high"
    assert (found.geometry.hidden_size, found.geometry.max_position) == (2048, 2048)
    assert found.geometry.attention_heads == 4  # what every layer's heads are a multiple of
    assert found.geometry.parameters is None
    assert found.geometry.embedding_parameters == 32000 * 2048
    with pytest.raises(SettingsError, match="num_query_heads"):
        read_geometry(OPENELM_1B | {"num_query_heads": [16] * 27})
    with pytest.raises(SettingsError, match="3 attention heads cannot share 2 KV heads"):
        read_geometry(OPENELM_1B | {"num_query_heads": [3] * 28, "num_kv_heads": [2] * 28})


def test_a_file_as_transformers_5_saves_it_reads_as_the_published_one() -> None:
    linear = KIMI_LINEAR["linear_attn_config"]
    saved = {name: value for name, value in KIMI_LINEAR.items() if name != "linear_attn_config"}
    saved |= {
        "layer_types": [
            "full_attention" if index + 1 in linear["full_attn_layers"] else "linear_attention" for index in range(27)
        ],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
    }
    assert read_geometry(saved).layers == read_geometry(KIMI_LINEAR).layers
    assert read_geometry(saved).parameters == read_geometry(KIMI_LINEAR).parameters


def test_a_window_of_0_is_none_and_indexed_layers_are_those_of_latent_models() -> None:
    qwen = QWEN3_CODER | {"model_type": "qwen2_moe"}
    assert read_geometry(qwen | {"sliding_window": 0}).layers == read_geometry(qwen).layers
    sparse = GLM_LITE | {"model_type": "glm_moe_dsa", "index_head_dim": 128, "index_n_heads": 32}
    listed = read_geometry(sparse | {"layer_types": ["indexed_attention"] * 47})
    assert listed.layers == read_geometry(sparse).layers
    assert {len(layer) for layer in listed.layers} == {2}
