"""Reads a Llama-like model from a folder of `config.json` and `model.safetensors`, for the decoder of model mode.

A safetensors file is a little-endian 64-bit length, so many bytes of JSON with each tensor's dtype, shape and place,
and the tensors (huggingface/safetensors, README.md). Gains of norms are multiplied into the projections that follow.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.decoder import NORM_EPSILON, LayerWeights, Weights
from engine_shim.reference.geometry import Geometry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_HEADER_BYTES = 100 << 20  # what the format itself allows


def load_llama(folder: Path) -> tuple[Geometry, Weights]:
    """The model's shape, named as its folder, and its weights in float32 on the CPU.

    Raises:
        SettingsError: a file is missing or not as it should be, or the model needs what the decoder cannot compute.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = read_safetensors(folder / "model.safetensors")
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{folder / 'config.json'} is not JSON: {error}") from error
    try:
        geometry = _geometry(config, folder)
        return geometry, _weights(config, geometry, tensors)
    except KeyError as error:
        raise SettingsError(f"{folder} has no {error.args[0]!r}, which a Llama-like model needs") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file by name, in float32; SettingsError where it is none, or has other dtypes."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            data = bytearray(file.read())
            return {
                name: torch.frombuffer(
                    data, dtype=_DTYPES[one["dtype"]], count=_count(one), offset=one["data_offsets"][0]
                )
                .view(one["shape"])
                .float()
                for name, one in header.items()
            }
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise SettingsError(f"{path} is no safetensors file of floats: {error}") from error


def _count(entry: dict[str, Any]) -> int:
    first, last = entry["data_offsets"]
    count, left = divmod(last - first, _DTYPES[entry["dtype"]].itemsize)
    if left:
        raise ValueError(f"{last - first} bytes are no whole number of {entry['dtype']}")
    return int(count)


def _geometry(config: dict[str, Any], folder: Path) -> Geometry:
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for wrong in (
        "a rotary scaling" if rotary.get("rope_type", "default") != "default" else "",
        "biases" if config.get("attention_bias") or config.get("mlp_bias") else "",
        f"the activation {config['hidden_act']}" if config["hidden_act"] != "silu" else "",
        f"a norm's epsilon of {config['rms_norm_eps']}"
        if abs(config["rms_norm_eps"] / NORM_EPSILON - 1) > 1e-3
        else "",
        f"the model type {config['model_type']}" if config["model_type"] != "llama" else "",
    ):
        if wrong:
            raise SettingsError(f"{folder} has {wrong}, which this decoder does not compute")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return Geometry(
        name=folder.name,
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or hidden // heads,
        query_heads=heads,
        hidden=hidden,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        source="its config.json",
    )


def _weights(config: dict[str, Any], geometry: Geometry, tensors: dict[str, Tensor]) -> Weights:
    def projection(name: str, gain: Tensor | None = None) -> Tensor:
        weight = tensors[name]  # (outputs, inputs)
        return (weight if gain is None else weight * gain).T.contiguous()

    layers = []
    for index in range(geometry.layers):
        prefix = f"model.layers.{index}."
        before = tensors[prefix + "input_layernorm.weight"]
        after = tensors[prefix + "post_attention_layernorm.weight"]
        layers.append(
            LayerWeights(
                query=projection(prefix + "self_attn.q_proj.weight", before),
                key=projection(prefix + "self_attn.k_proj.weight", before),
                value=projection(prefix + "self_attn.v_proj.weight", before),
                output=projection(prefix + "self_attn.o_proj.weight"),
                gate=projection(prefix + "mlp.gate_proj.weight", after),
                up=projection(prefix + "mlp.up_proj.weight", after),
                down=projection(prefix + "mlp.down_proj.weight"),
            )
        )
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.get("tie_word_embeddings") else tensors["lm_head.weight"]
    rotary = config.get("rope_parameters") or {}
    theta = float(rotary.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return Weights(embedding, tuple(layers), head * tensors["model.norm.weight"], theta)
