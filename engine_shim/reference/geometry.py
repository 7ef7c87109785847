"""What one token's keys and values take in models that people know, and which of them suits a pool of a given size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_shim.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's KV cache. Query heads and the rest matter to the small decoder only."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    source: str  # where the numbers come from

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


TEST_GEOMETRY = Geometry("test-tiny", 4, 2, 32, 4, 128, 256, 1024, "ours, for tests: the smallest with GQA")

# From a toy model whose cache for a whole production trace fits a laptop's memory to one that is served in earnest.
GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        TEST_GEOMETRY,
        Geometry("stories260K", 5, 4, 8, 8, 64, 172, 512, "karpathy/tinyllamas, stories260K config"),
        Geometry("stories15M", 6, 6, 48, 6, 288, 768, 32000, "karpathy/tinyllamas, stories15M config"),
        Geometry("Qwen2.5-0.5B", 24, 2, 64, 14, 896, 4864, 151936, "Qwen/Qwen2.5-0.5B config.json"),
        Geometry("SmolLM2-135M", 30, 3, 64, 9, 576, 1536, 49152, "HuggingFaceTB/SmolLM2-135M config.json"),
        Geometry("Llama-3.2-1B", 16, 8, 64, 32, 2048, 8192, 128256, "meta-llama/Llama-3.2-1B config.json"),
        Geometry("Llama-3.1-8B", 32, 8, 128, 32, 4096, 14336, 128256, "meta-llama/Llama-3.1-8B config.json"),
    )
}


def named_geometry(name: str) -> Geometry:
    """Look a geometry up by its model's name; SettingsError names the known ones."""
    try:
        return GEOMETRIES[name]
    except KeyError:
        raise SettingsError(f"no geometry named {name!r}; known are: {', '.join(GEOMETRIES)}") from None


def smallest_filling(
    num_blocks: int,
    *,
    block_tokens: int,
    token_bytes: Callable[[Geometry], int],
    least_bytes: int,
    among: Iterable[Geometry] | None = None,
) -> Geometry:
    """The geometry with the fewest bytes a token that makes `num_blocks` blocks take at least `least_bytes`.

    `token_bytes` are a geometry's bytes of one token's keys and values in the format at hand.
    Where even the largest does not, the largest: a pool of few blocks is small whatever model it belongs to.
    """
    candidates = among if among is not None else (g for g in GEOMETRIES.values() if g is not TEST_GEOMETRY)
    by_size = sorted(candidates, key=token_bytes)
    for geometry in by_size:
        if num_blocks * block_tokens * token_bytes(geometry) >= least_bytes:
            return geometry
    return by_size[-1]
