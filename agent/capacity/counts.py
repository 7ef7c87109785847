"""Bytes of a token and of a sequence on one GPU, of the pipeline stage that holds most."""

from __future__ import annotations

from dataclasses import replace

from agent.capacity.block_layout import BlockLayout
from agent.capacity.deployment import Deployment
from agent.capacity.formats import KvFormat
from agent.capacity.geometry import AttentionCache, CacheKind, ModelGeometry, StateCache


def model_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one number of the model's dtype."""
    return 4 if geometry.dtype == "float32" else 2


class Counts:
    """Bytes of one GPU, of the pipeline stage that holds most."""

    def __init__(self, geometry: ModelGeometry, deployment: Deployment, kv: KvFormat, layout: BlockLayout) -> None:
        self._geometry, self._kv, self._tp = geometry, kv, deployment.tp
        self._float32 = deployment.state_float32
        self._model_bytes = model_bytes(geometry)
        self._stages = [
            [cache for index in stage for cache in geometry.layers[index]] for stage in layout.stages
        ]  # fmt: skip

    def per_token(self, *, windowed: bool) -> int:
        """For one token more; without `windowed`, only of layers that keep every token."""
        return max((sum(self._token(cache, windowed) for cache in stage) for stage in self._stages), default=0)

    def _token(self, cache: object, windowed: bool) -> int:
        if not isinstance(cache, AttentionCache) or cache.kind is CacheKind.CROSS:
            return 0
        return self._kv.of_token(cache, self._tp) if windowed or cache.window is None else 0

    def states(self) -> int:
        """Recurrent states of one sequence."""
        return max((sum(map(self._state, stage)) for stage in self._stages), default=0)

    def _state(self, cache: object) -> int:
        if not isinstance(cache, StateCache):
            return 0
        if self._float32 is not None:
            cache = replace(cache, state_dtype="float32" if self._float32 else "model")
        return cache.bytes_on_rank(self._tp, self._model_bytes)

    def cross(self) -> int:
        """Keys and values of the encoder's output for one sequence."""
        return max((sum(map(self._cross, stage)) for stage in self._stages), default=0)

    def _cross(self, cache: object) -> int:
        if isinstance(cache, AttentionCache) and cache.kind is CacheKind.CROSS:
            return self._geometry.encoder_tokens * self._kv.of_token(cache, self._tp)
        return 0

    def ideal(self, tokens: int) -> int:
        """What one sequence of `tokens` tokens has to keep: windows hold no more than their size."""
        return max((sum(self._kept(cache, tokens) for cache in stage) for stage in self._stages), default=0)

    def _kept(self, cache: object, tokens: int) -> int:
        if isinstance(cache, AttentionCache) and cache.kind is not CacheKind.CROSS:
            held = tokens if cache.window is None else min(tokens, cache.window)
            return held * self._kv.of_token(cache, self._tp)
        return self._state(cache) + self._cross(cache)
