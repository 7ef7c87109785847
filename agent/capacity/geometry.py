"""What one model keeps in memory for each token and each sequence, layer by layer: data read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Confidence = Literal["high", "medium", "low", "refused"]
CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low", "refused")


class CacheKind(StrEnum):
    """How a layer attends, which decides how long it keeps a token."""

    FULL = "full"
    SLIDING = "sliding"  # the last `window` tokens
    CHUNKED = "chunked"  # the current chunk of `window` tokens
    MLA = "mla"  # one latent vector for a token, the same on every rank
    INDEXER = "indexer"  # keys of a sparse-attention indexer, the same on every rank
    CROSS = "cross"  # keys and values of the encoder's output: constant for a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCache:
    """Keys and values of one layer for one token.

    `kv_heads` is of the whole model; `key_dim` and `value_dim` are elements of one head. MLA keeps one vector, so its
    `value_dim` is 0. `window` is in tokens, None where every token is kept. `fixed_token_bytes` is set where the cache
    has a format of its own whatever the KV dtype.
    """

    kind: CacheKind
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    fixed_token_bytes: int | None = None

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the whole of it."""
        return self.kind in (CacheKind.MLA, CacheKind.INDEXER)

    def heads_on_rank(self, tp: int) -> int:
        """KV heads on one of `tp` ranks: at least one each, as vLLM and SGLang replicate them."""
        return self.kv_heads if self.replicated else max(1, self.kv_heads // tp)


StateType = Literal["model", "float32"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One recurrent state: `shape` is of one sequence on one rank; `dtype` "model" follows the model's."""

    name: str
    shape: tuple[int, ...]
    dtype: StateType

    @property
    def elements(self) -> int:
        """Numbers in it."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """The state of one state-space or linear-attention layer, constant for a sequence.

    Shapes depend on the number of ranks in ways of each family, so a function of `tp` stands in `shapes` by name.
    """

    family: Literal["mamba1", "mamba2", "gated-delta", "kda", "linear", "short-conv"]
    state_dtype: StateType
    heads: int = 0
    head_dim: int = 0
    key_heads: int = 0
    key_dim: int = 0
    groups: int = 0
    inner: int = 0
    state: int = 0
    kernel: int = 0

    def tensors(self, tp: int) -> tuple[StateTensor, ...]:
        """States of one sequence on one of `tp` ranks.

        Shapes as in vLLM 0.32 (model_executor/layers/mamba/mamba_utils.py). Sizes that `tp` does not divide are rounded
        up, as a padded shard would be.
        """
        kept = self.kernel - 1
        if self.family == "mamba1":
            inner = _shard(self.inner, tp)
            return (
                StateTensor("conv", (kept, inner), "model"),
                StateTensor("ssm", (inner, self.state), self.state_dtype),
            )
        if self.family == "mamba2":
            # Groups that the ranks do not divide are repeated, so that each rank has those of its heads.
            groups = self.groups if self.groups % tp == 0 else max(tp, self.groups)
            return (
                StateTensor("conv", (kept, _shard(self.inner + 2 * groups * self.state, tp)), "model"),
                StateTensor("ssm", (_shard(self.heads, tp), self.head_dim, self.state), self.state_dtype),
            )
        if self.family == "gated-delta":
            width = 2 * self.key_heads * self.key_dim + self.heads * self.head_dim
            return (
                StateTensor("conv", (kept, _shard(width, tp)), "model"),
                StateTensor("delta", (_shard(self.heads, tp), self.head_dim, self.key_dim), self.state_dtype),
            )
        if self.family == "kda":
            width = self.heads * self.head_dim + 2 * self.key_heads * self.key_dim
            return (
                StateTensor("conv", (kept, _shard(width, tp)), "model"),
                StateTensor("delta", (_shard(self.heads, tp), self.head_dim, self.head_dim), self.state_dtype),
            )
        if self.family == "linear":
            return (StateTensor("kv", (_shard(self.heads, tp), self.head_dim, self.head_dim), self.state_dtype),)
        return (StateTensor("conv", (kept, _shard(self.inner, tp)), "model"),)

    def bytes_on_rank(self, tp: int, model_bytes: int) -> int:
        """Bytes of one sequence on one of `tp` ranks, with `model_bytes` for a number of the model's dtype."""
        return sum(one.elements * (4 if one.dtype == "float32" else model_bytes) for one in self.tensors(tp))


Cache = AttentionCache | StateCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """A model as far as memory is concerned.

    `layers` has one entry a decoder layer, in order, each the caches that the layer owns (none where it shares those of
    an earlier layer, or has no attention). `encoder_tokens` is how many tokens a cross-attention cache holds.
    """

    name: str
    model_type: str
    layers: tuple[tuple[Cache, ...], ...]
    attention_heads: int
    hidden_size: int
    vocab_size: int | None
    max_position: int | None
    dtype: str
    dtype_note: str
    weight_format: str
    kv_scheme: str | None  # what the file asks of an "auto" KV dtype, such as "fp8"
    parameters: int | None  # of the whole model; None where the file does not say enough
    embedding_parameters: int  # embeddings, output head and norms, which quantization leaves alone
    expert_parameters: int
    tied_embeddings: bool  # the output head is the table of embeddings
    parameters_note: str
    intermediate_size: int | None
    encoder_tokens: int
    draft_layers: int  # multi-token prediction layers, which cost KV only with speculative decoding
    no_cache_reason: str | None  # why there is no KV cache to plan, such as an encoder
    confidence: Confidence
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def attention_caches(self) -> tuple[AttentionCache, ...]:
        """Of all layers, in order."""
        return tuple(one for layer in self.layers for one in layer if isinstance(one, AttentionCache))

    @property
    def state_caches(self) -> tuple[StateCache, ...]:
        """Of all layers, in order."""
        return tuple(one for layer in self.layers for one in layer if isinstance(one, StateCache))


def _shard(size: int, tp: int) -> int:
    return -(-size // tp)


def weakest(*found: Confidence) -> Confidence:
    """The least of several confidences."""
    return max(found, key=CONFIDENCES.index)
