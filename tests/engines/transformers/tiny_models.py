"""Tiny language models with random weights, in memory. Runs in the environment that has Transformers.

The weights' standard deviation of 0.25 makes every output token depend on the whole context: with the usual 0.02 wrong
KV contents would change nothing and a test of identity would prove nothing.
"""

from __future__ import annotations

from typing import Any

VOCABULARY, WINDOW = 512, 24


def make(kind: str) -> Any:
    """`full`: Llama, 4 layers. `hybrid`: Gemma 3, 3 sliding layers to 2 full: no block size divides the other."""
    import torch
    import transformers

    torch.manual_seed(7)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "attn_implementation": "sdpa",
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if kind == "full":
        config = transformers.LlamaConfig(num_hidden_layers=4, **common)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=5,
            sliding_window=WINDOW,
            layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")],
            **common,
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" not in name:
                weights.normal_(0, 0.25)
    return model.eval()
