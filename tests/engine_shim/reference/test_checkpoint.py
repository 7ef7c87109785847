"""A model's files as the decoder's weights: gains are folded in, and what cannot be computed is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.attention import attend, rotate
from engine_shim.reference.checkpoint import load_llama
from engine_shim.reference.decoder import ContiguousMemory, hidden_states, project
from engine_shim.reference.quantization import STORED_FORMATS

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 9.999999747378752e-06, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
SHAPES = {
    "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
}  # fmt: skip


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    names |= {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in names.items()}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(config))


def norm(hidden: Tensor, gain: Tensor) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.float()


def plain_forward(tensors: dict[str, Tensor], tokens: Tensor, theta: float) -> Tensor:
    """A Llama as its paper has it, with gains where they stand in the file; logits of every token."""
    hidden = tensors["model.embed_tokens.weight"].float()[tokens]
    positions = torch.arange(len(tokens))
    for index in range(2):
        part = {name: tensors[f"model.layers.{index}.{name}.weight"].float() for name in SHAPES}
        normed = norm(hidden, part["input_layernorm"])
        queries = rotate((normed @ part["self_attn.q_proj"].T).view(-1, 4, 8), positions, theta)
        keys = rotate((normed @ part["self_attn.k_proj"].T).view(-1, 2, 8), positions, theta)
        mixed = attend(queries, keys, (normed @ part["self_attn.v_proj"].T).view(-1, 2, 8), 0)
        hidden = hidden + mixed @ part["self_attn.o_proj"].T
        normed = norm(hidden, part["post_attention_layernorm"])
        gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj"].T)
        hidden = hidden + (gate * (normed @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T
    return norm(hidden, tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].float().T


def test_a_models_files_compute_what_the_model_does(tmp_path: Path) -> None:
    tensors = random_tensors()
    write(tmp_path, tensors, CONFIG)
    geometry, weights = load_llama(tmp_path)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (2, 2, 8)
    tokens = torch.tensor([3, 60, 7, 7, 21, 0, 9])
    memory = ContiguousMemory(geometry, STORED_FORMATS["float32"])
    logits = project(weights, hidden_states(weights, geometry, tokens, [(0, 7)], memory))
    torch.testing.assert_close(logits, plain_forward(tensors, tokens, 500.0), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(logits, plain_forward(tensors, tokens, 10_000.0), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "the model type qwen2"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "a rotary scaling"),
        ({"attention_bias": True}, "biases"),
        ({"rms_norm_eps": 1e-6}, "a norm's epsilon of 1e-06"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"tie_word_embeddings": False}, "has no 'lm_head.weight'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, random_tensors(), CONFIG | change)
    with pytest.raises(SettingsError, match=message):
        load_llama(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.json cannot be read"):
        load_llama(tmp_path)
    write(tmp_path, random_tensors(), CONFIG)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for broken in (b"", b"\xff" * 8, whole[:100], whole[:-100], whole.replace(b"BF16", b"FP99")):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(SettingsError, match=r"model\.safetensors is no safetensors file of floats"):
            load_llama(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"config\.json is not JSON"):
        load_llama(tmp_path)
