"""Attention over a block table: rotary positions, grouped query heads, causal by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

QUERY_SLICE = 256  # queries at a time, so that the score matrix of a long prefill stays small


def rotate(vectors: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864): (tokens, heads, head_dim) at `positions` (tokens,).

    Halves of a head are paired, as in the Llama family.
    """
    half = vectors.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=vectors.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence.

    `queries` (n, query_heads, head_dim) are at positions start..start+n-1; `keys` and `values` (start+n, kv_heads,
    head_dim) are all tokens so far. Query head h reads KV head h // (query_heads / kv_heads). Returns (n, query_heads *
    head_dim), computed in float32.
    """
    count, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    by_head = keys.float().permute(1, 2, 0)[:, None]  # kv_heads, 1, head_dim, all tokens
    values_by_head = values.float().permute(1, 0, 2)[:, None]
    key_positions = torch.arange(keys.shape[0], device=keys.device)
    outputs = []
    for begin in range(0, count, QUERY_SLICE):
        part = queries[begin : begin + QUERY_SLICE].float() / math.sqrt(head_dim)
        reach = start + begin + len(part)  # no query of this slice looks at a later key
        grouped = part.view(len(part), kv_heads, query_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        scores = grouped @ by_head[..., :reach]
        scores.masked_fill_(key_positions[:reach] > key_positions[start + begin : reach, None], -math.inf)
        mixed = scores.softmax(dim=-1) @ values_by_head[:, :, :reach]  # kv_heads, group, queries, head_dim
        outputs.append(mixed.permute(2, 0, 1, 3).reshape(len(part), query_heads * head_dim))
    return torch.cat(outputs)
