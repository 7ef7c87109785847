"""Models and deployments by name: the shapes of released config.json files, and the articles' own example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.capacity.deployment import Deployment
from agent.capacity.gpus import find_gpu


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's config, and the deployment that it stands for where it is more than a model."""

    config: Mapping[str, Any]
    deployment: Deployment = field(default_factory=Deployment)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, wide: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": wide,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    } | more


_LLAMA_2_70B = _llama(80, 8192, 64, 8, 28672)
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
PRESETS: Mapping[str, Preset] = {
    "llama-2-7b": Preset(_llama(32, 4096, 32, 32, 11008)),
    "llama-2-13b": Preset(_llama(40, 5120, 40, 40, 13824)),
    "llama-2-70b": Preset(_LLAMA_2_70B),
    "llama-2-70b-8xa100": Preset(
        _LLAMA_2_70B,
        # The second article's deployment, setting by setting.
        Deployment(
            gpu=find_gpu("A100-80GB"), tp=4, pp=2, max_model_len=4096, max_num_seqs=64, utilization=0.85, kv_dtype="fp8"
        ),
    ),
    "llama-3.1-8b": Preset(_llama(32, 4096, 32, 8, 14336, **_LLAMA_3)),
    "llama-3.1-70b": Preset(_llama(80, 8192, 64, 8, 28672, **_LLAMA_3)),
    "llama-3.1-405b": Preset(_llama(126, 16384, 128, 8, 53248, **_LLAMA_3)),
    "mixtral-8x7b": Preset(
        _llama(32, 4096, 32, 8, 14336, max_position_embeddings=32768, torch_dtype="bfloat16", model_type="mixtral")
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "qwen2.5-7b": Preset(
        _llama(28, 3584, 28, 4, 18944, vocab_size=152064, max_position_embeddings=32768, model_type="qwen2")
        | {"torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    ),
    "qwen3-32b": Preset(
        _llama(64, 5120, 64, 8, 25600, vocab_size=151936, max_position_embeddings=40960, model_type="qwen3")
        | {"torch_dtype": "bfloat16", "head_dim": 128}
    ),
    "qwen3-30b-a3b": Preset(
        _llama(48, 2048, 32, 4, 6144, vocab_size=151936, max_position_embeddings=40960, model_type="qwen3_moe")
        | {"torch_dtype": "bfloat16", "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768}
    ),
    "gpt-oss-20b": Preset(
        _llama(24, 2880, 64, 8, 2880, vocab_size=201088, max_position_embeddings=131072, model_type="gpt_oss")
        | {"torch_dtype": "bfloat16", "head_dim": 64, "sliding_window": 128, "num_local_experts": 32}
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    ),
    "deepseek-v3": Preset(
        _llama(61, 7168, 128, 128, 18432, vocab_size=129280, max_position_embeddings=163840, model_type="deepseek_v3")
        | {"torch_dtype": "bfloat16", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
        | {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}}
    ),
}
