"""What is asked of the planner: the GPUs, how the model is spread over them, and the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from agent.capacity.fields import show
from agent.capacity.geometry import ModelGeometry
from agent.capacity.gpus import Gpu
from engine_shim.errors import SettingsError

DEFAULT_UTILIZATION = 0.90
DEFAULT_BLOCK_TOKENS = 16
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_SEQUENCES = 256
FALLBACK_LENGTH = 4096
MAX_TOKENS = 1 << 40
MAX_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Settings of one plan. Bytes are of one GPU unless the name says `model`.

    `memory_bytes` overrides the card's. `max_model_len` None takes the config's. `max_num_seqs` is how many sequences
    of that length must fit at once; None asks for one, as engines do at their start. `kv_cache_bytes` sets the pool
    itself, as vLLM's --kv-cache-memory-bytes does. `headroom` is the share of blocks that new sequences leave.
    """

    gpu: Gpu | None = None
    memory_bytes: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    utilization: float = DEFAULT_UTILIZATION
    headroom: float = 0.0
    max_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    model_weight_bytes: int | None = None
    activation_bytes: int | None = None
    other_bytes: int | None = None
    co_tenant_bytes: int = 0
    kv_cache_bytes: int | None = None
    hybrid_manager: bool = True
    prefix_cache: bool = True
    state_float32: bool | None = None

    def __post_init__(self) -> None:
        _within("tp", self.tp, 1, 4096)
        _within("pp", self.pp, 1, 4096)
        _within("dp", self.dp, 1, 4096)
        _within("block-size", self.block_tokens, 1, 1 << 20)
        _within("max-model-len", self.max_model_len, 1, MAX_TOKENS)
        _within("max-num-seqs", self.max_num_seqs, 1, 1 << 30)
        _within("max-num-batched-tokens", self.max_batched_tokens, 1, MAX_TOKENS)
        for name in ("memory_bytes", "model_weight_bytes", "activation_bytes", "other_bytes", "co_tenant_bytes",
                     "kv_cache_bytes"):  # fmt: skip
            _within(name.removesuffix("_bytes").replace("_", "-") + " in bytes", getattr(self, name), 0, MAX_BYTES)
        if not 0.0 < self.utilization <= 1.0:
            raise SettingsError(f"gpu-memory-utilization={self.utilization:g} is no share; give more than 0, at most 1")
        if not 0.0 <= self.headroom < 1.0:
            raise SettingsError(f"headroom={self.headroom:g} is no share; give 0 or more and less than 1, such as 0.1")

    @property
    def total_bytes(self) -> int | None:
        """Memory of one GPU as CUDA offers it; None where no GPU was named. SettingsError for unified memory."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.gpu is None:
            return None
        if self.gpu.unified:
            raise SettingsError(
                f"{self.gpu.name} shares the host's memory, so its size is not known here; give --gpu-memory GIB, such "
                "as MemAvailable of /proc/meminfo"
            )
        return self.gpu.memory_bytes

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.tp * self.pp * self.dp

    def check(self, geometry: ModelGeometry) -> None:
        """SettingsError where the model cannot be spread so."""
        if self.pp > max(1, len(geometry.layers)):
            raise SettingsError(f"pp={self.pp} stages for {len(geometry.layers)} layers; use at most one a layer")
        heads = geometry.attention_heads
        if heads and heads % self.tp:
            raise SettingsError(
                f"tp={self.tp} does not divide the model's {heads} attention heads; use {_divisors(heads)}"
            )
        for cache in geometry.attention_caches:
            if not cache.replicated and cache.kv_heads % self.tp and self.tp % cache.kv_heads:
                raise SettingsError(f"tp={self.tp} and {cache.kv_heads} KV heads: one must divide the other")


def _within(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise SettingsError(f"{name}={show(value)} is out of range; give {least} to {most}")


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, min(number, 64) + 1) if number % one == 0)
