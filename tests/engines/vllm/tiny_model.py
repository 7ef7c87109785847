"""Writes a tiny Llama with random weights for vLLM's tests. Runs in vLLM's own environment.

The weights' standard deviation of 0.25 makes every output token depend on the whole context: with the usual 0.02, or
with vLLM's dummy weights, wrong KV contents would change nothing and a test of identity would prove nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY, WINDOW = 4, 4, 2, 128, 1024, 96


def write(folder: Path, *, hybrid: bool = False) -> Path:
    """A model folder; with `hybrid` every second layer attends to a window alone, which makes two KV cache groups."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    head = HIDDEN // HEADS
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if hybrid:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        config["sliding_window"] = WINDOW
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": random(HEADS * head, HIDDEN),
            f"{name}.self_attn.k_proj.weight": random(KV_HEADS * head, HIDDEN),
            f"{name}.self_attn.v_proj.weight": random(KV_HEADS * head, HIDDEN),
            f"{name}.self_attn.o_proj.weight": random(HIDDEN, HEADS * head),
            f"{name}.mlp.gate_proj.weight": random(2 * HIDDEN, HIDDEN),
            f"{name}.mlp.up_proj.weight": random(2 * HIDDEN, HIDDEN),
            f"{name}.mlp.down_proj.weight": random(HIDDEN, 2 * HIDDEN),
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer beside the model, of letters and words that nobody says: structured output needs one."""
    from tokenizers import Tokenizer, models  # type: ignore[import-not-found]

    names = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    names += [f"<{number}>" for number in range(len(names), VOCABULARY)]
    words = {name: number for number, name in enumerate(names)}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
