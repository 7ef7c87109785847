"""Says in the map's terms what a paged attention cache is: its units, its groups, its bytes.

Each allocator (one for each kind of attention) cuts the sectors it was given into blocks of its own size, all of the
same memory. So that one map can show them all, its entry is the largest piece that every allocator's blocks are whole
multiples of: with one kind of attention a block itself, and with several a part of one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_shim.adapters.opening import engine_id
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.snapshot import GroupEntry

_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
SECTOR_EVENTS_PER_SECOND = 2_000


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a cache's memory is cut. A unit is one entry of the map; `widths` are units a block, by allocator."""

    unit_bytes: int
    units_per_sector: int
    sectors: int  # with the reserved ones, which come first
    reserved_sectors: int
    widths: tuple[int, ...]
    has_tiers: bool  # does any sector hold more than one block?

    @property
    def total_units(self) -> int:
        return self.sectors * self.units_per_sector


def measure(cache: Any) -> Geometry:
    """The geometry of one PagedAttentionCache."""
    allocators = list(cache.cache_allocators.values())
    unit = math.gcd(*(int(allocator.bytes_per_block) for allocator in allocators))
    widths = tuple(int(allocator.bytes_per_block) // unit for allocator in allocators)
    return Geometry(
        unit_bytes=unit,
        units_per_sector=int(cache.bytes_per_sector) // unit,
        sectors=int(cache.num_sectors) + int(cache.pool.num_reserved_sectors),
        reserved_sectors=int(cache.pool.num_reserved_sectors),
        widths=widths,
        has_tiers=any(int(allocator.blocks_per_sector) > 1 for allocator in allocators),
    )


def describe(processor: Any, geometry: Geometry, version: str, environment: Mapping[str, str]) -> MapSpec:
    """The map of one cache's blocks. Numbers are of this rank."""
    cache, helper, runner = processor.cache, processor.distributed_helper, processor.model_runner
    model = _model(processor.config)
    groups = tuple(_group(allocator) for allocator in cache.cache_allocators.values())
    usable = int(cache.num_sectors) * geometry.units_per_sector
    return MapSpec(
        engine_id=engine_id(model, environment),
        kind="transformers",
        version=version,
        runner=f"{type(runner).__module__.rpartition('.')[2]}.{type(runner).__name__}",
        model=model,
        pool="kv",
        total_blocks=geometry.total_units,
        block_tokens=min(group.block_tokens for group in groups),
        block_bytes=geometry.unit_bytes,
        dtype=str(getattr(cache, "dtype", "")).removeprefix("torch."),
        medium=str(cache.cache_tensor.device.type),
        policy="transformers",
        # Below its safety margin the scheduler lets running requests grow and admits no new ones.
        headroom_blocks=math.ceil(float(processor.scheduler.safety_margin or 0) * usable),
        data_parallel=_ranks(helper, "dp_size", int(getattr(helper, "dp_rank", 0) or 0)),
        tensor_parallel=_ranks(helper, "tp_size", int(getattr(helper, "tp_local_rank", 0) or 0)),
        gpu_uuids=_gpu_uuids(cache.cache_tensor.device),
        groups=groups,
    )


def describe_sectors(blocks: MapSpec, geometry: Geometry, bytes_per_sector: int) -> MapSpec:
    """The map of the same memory by sectors, which carries no owners and tokens: those are of blocks."""
    return MapSpec(
        engine_id=blocks.engine_id,
        kind=blocks.kind,
        version=blocks.version,
        runner=blocks.runner,
        model=blocks.model,
        pool="kv-sectors",
        total_blocks=geometry.sectors,
        block_tokens=blocks.block_tokens,
        block_bytes=bytes_per_sector,
        dtype=blocks.dtype,
        medium=blocks.medium,
        policy=blocks.policy,
        data_parallel=blocks.data_parallel,
        tensor_parallel=blocks.tensor_parallel,
        gpu_uuids=blocks.gpu_uuids,
        groups=blocks.groups,
        columns=("state", "references", "touched", "group"),
        owner_slots=1,
        events_per_second=SECTOR_EVENTS_PER_SECOND,
    )


def _ranks(helper: Any, size_name: str, rank: int) -> tuple[int, int]:
    size = max(1, int(getattr(helper, size_name, 1) or 1))
    return rank % size, size


def _group(allocator: Any) -> GroupEntry:
    kind = str(allocator.layer_type)
    return GroupEntry(
        id=int(allocator.index),
        kind=_KINDS.get(kind, kind),
        block_tokens=int(allocator.tokens_per_page),
        layers=int(allocator.pages_per_block),
        bytes_per_block=int(allocator.bytes_per_block),
        window_tokens=int(getattr(allocator, "sliding_window", 0) or 0),
    )


def _model(config: Any) -> str:
    """The name or folder that the model was loaded from; a model made in the program has none."""
    return str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", "") or "model")


def _gpu_uuids(device: Any) -> tuple[str, ...]:
    """The UUID of a CUDA device, as NVML spells it; empty elsewhere, or where the driver does not tell."""
    # The tensor's own library, which is loaded since there is a tensor; nothing here may import it.
    torch = sys.modules.get("torch")
    if device.type != "cuda" or torch is None:
        return ()
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
    return (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",) if uuid else ()
