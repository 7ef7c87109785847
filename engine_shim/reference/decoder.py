"""Model mode: a small Llama-like decoder with random weights that generates greedily over the block tables."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_shim.errors import SettingsError
from engine_shim.reference.attention import attend, rotate
from engine_shim.reference.content import Work
from engine_shim.reference.geometry import Geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.quantization import StoredFormat
from engine_shim.reference.sequence import Sequence

# Standard deviation of a projection's output for an input of unit RMS: 0.25 at a hidden size of 128. Much smaller
# weights, and the next token hardly depends on the context, so that a corrupt cache would not show.
PROJECTION_STD = 0.25 * math.sqrt(128)
NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections are (inputs, outputs)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A decoder. Norm gains are all one: those of a real model are in the projections that follow them."""

    embedding: Tensor  # vocabulary, hidden
    layers: tuple[LayerWeights, ...]
    head: Tensor | None = None  # vocabulary, hidden: the output projection; None where it is the embedding
    theta: float = 10_000.0  # base of the rotary frequencies

    @staticmethod
    def random(geometry: Geometry, seed: int, device: torch.device) -> Weights:
        """The same float32 weights for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(inputs: int, outputs: int) -> Tensor:
            return (torch.randn((inputs, outputs), generator=generator) * (PROJECTION_STD / math.sqrt(inputs))).to(
                device
            )

        hidden, inner = geometry.hidden, geometry.intermediate
        queries, keys = geometry.query_heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
        layers = tuple(
            LayerWeights(
                query=matrix(hidden, queries),
                key=matrix(hidden, keys),
                value=matrix(hidden, keys),
                output=matrix(queries, hidden),
                gate=matrix(hidden, inner),
                up=matrix(hidden, inner),
                down=matrix(inner, hidden),
            )
            for _ in range(geometry.layers)
        )
        embedding = torch.randn((geometry.vocabulary, hidden), generator=generator).to(device)
        return Weights(embedding, layers)


class LayerMemory(Protocol):
    """Where a forward pass puts keys and values, and finds those of earlier tokens."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the batch's new keys and values, (tokens, kv_heads, head_dim)."""
        ...

    def read(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """All keys and values so far of the batch's sequence `index`."""
        ...


def forward(
    weights: Weights, geometry: Geometry, tokens: Tensor, spans: Items[tuple[int, int]], memory: LayerMemory
) -> Tensor:
    """Logits (sequences, vocabulary) after the last token of each span; arguments are those of `hidden_states`."""
    bounds = np.cumsum([stop - start for start, stop in spans])
    return project(weights, hidden_states(weights, geometry, tokens, spans, memory)[bounds - 1])


def project(weights: Weights, hidden: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) of hidden states (tokens, hidden)."""
    return hidden @ (weights.embedding if weights.head is None else weights.head).T


def hidden_states(
    weights: Weights, geometry: Geometry, tokens: Tensor, spans: Items[tuple[int, int]], memory: LayerMemory
) -> Tensor:
    """Normalised hidden states (tokens, hidden) after the last layer.

    `tokens` are those of all spans one after the other; span i covers positions start..stop-1 of sequence i.
    """
    device = weights.embedding.device
    positions = torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])
    bounds = np.cumsum([0] + [stop - start for start, stop in spans]).tolist()
    hidden = weights.embedding[tokens]
    for index, layer in enumerate(weights.layers):
        normed = _normalize(hidden)
        queries = rotate(_heads(normed @ layer.query, geometry.head_dim), positions, weights.theta)
        keys = rotate(_heads(normed @ layer.key, geometry.head_dim), positions, weights.theta)
        memory.write(index, keys, _heads(normed @ layer.value, geometry.head_dim))
        attended = [
            attend(queries[bounds[i] : bounds[i + 1]], *memory.read(index, i), start)
            for i, (start, _) in enumerate(spans)
        ]
        hidden = hidden + torch.cat(attended) @ layer.output
        normed = _normalize(hidden)
        hidden = hidden + (torch.nn.functional.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
    return _normalize(hidden)


class PagedMemory:
    """The paged cache as a forward pass sees it: each sequence through its block table."""

    def __init__(self, cache: KVCache, batch: Items[Work]) -> None:
        self._cache = cache
        self._new = self._tensor([cache.slots(w.sequence.table, w.start, w.stop) for w in batch])
        self._all = [self._tensor([cache.slots(w.sequence.table, 0, w.stop)]) for w in batch]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._cache.write(2 * layer, self._new, keys)
        self._cache.write(2 * layer + 1, self._new, values)

    def read(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        slots = self._all[index]
        return self._cache.read(2 * layer, slots), self._cache.read(2 * layer + 1, slots)

    def _tensor(self, slots: Items[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(slots)).to(self._cache.device)


class ContiguousMemory:
    """One sequence's keys and values in one growing piece: what the paged cache must agree with."""

    def __init__(self, geometry: Geometry, stored: StoredFormat) -> None:
        self._format, self._head_dim = stored, geometry.head_dim
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * geometry.layers

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        encode, size = self._format.encode, self._head_dim
        keys, values = self._format.decode(encode(keys), size), self._format.decode(encode(values), size)
        if (kept := self._kept[layer]) is not None:
            keys, values = torch.cat((kept[0], keys)), torch.cat((kept[1], values))
        self._kept[layer] = (keys, values)

    def read(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        kept = self._kept[layer]
        if kept is None or index:
            raise IndexError(f"layer {layer} of sequence {index} was never written")
        return kept


class Decoder:
    """The runner of model mode. Greedy: the same context always gives the same token."""

    def __init__(self, cache: KVCache, seed: int = 1) -> None:
        geometry = cache.geometry
        if geometry.query_heads % geometry.kv_heads:
            raise SettingsError(f"{geometry.name}: {geometry.query_heads} query heads do not share the KV heads evenly")
        self.cache = cache
        self.weights = Weights.random(geometry, seed, cache.device)

    @torch.inference_mode()
    def run(self, batch: Items[Work]) -> list[list[int]]:
        """Compute all work of the step in one forward pass."""
        if not batch:
            return []
        tokens = np.concatenate([work.sequence.tokens[work.start : work.stop] for work in batch])
        spans = [(work.start, work.stop) for work in batch]
        logits = forward(
            self.weights,
            self.cache.geometry,
            torch.from_numpy(tokens).to(self.cache.device),
            spans,
            PagedMemory(self.cache, batch),
        )
        most = max(work.sequence.samples for work in batch)
        best = logits.topk(most, dim=-1).indices.tolist()
        return [_chosen(work, row) for work, row in zip(batch, best, strict=True)]

    def registered(self, sequence: Sequence, first: int, last: int) -> None:
        """Nothing to note: the tokens tell whether the contents are right."""

    def copied(self, copies: Items[tuple[int, int]]) -> None:
        """Nothing to note."""


@torch.inference_mode()
def generate_contiguous(
    weights: Weights, geometry: Geometry, prompt: Items[int], count: int, stored: StoredFormat
) -> list[int]:
    """Greedy tokens of one sequence over a contiguous cache of the given format, without any paging."""
    memory = ContiguousMemory(geometry, stored)
    tokens, start, chosen = list(prompt), 0, []
    for _ in range(count):
        fed = torch.tensor(tokens[start:], device=weights.embedding.device)
        logits = forward(weights, geometry, fed, [(start, len(tokens))], memory)
        start = len(tokens)
        chosen.append(int(logits[0].argmax()))
        tokens.append(chosen[-1])
    return chosen


def _chosen(work: Work, best: list[int]) -> list[int]:
    """The best tokens: one a sample where the samples part, else one."""
    sequence = work.sequence
    if not work.completes:
        return []
    return best[: sequence.samples] if sequence.length == sequence.prompt_tokens else best[:1]


def _normalize(hidden: Tensor) -> Tensor:
    """RMSNorm (Zhang, Sennrich, arXiv 1910.07467) with a gain of one."""
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + NORM_EPSILON)


def _heads(flat: Tensor, head_dim: int) -> Tensor:
    return flat.view(len(flat), -1, head_dim)
