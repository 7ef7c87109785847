"""From settings to a running engine: pool, KV memory, content, map and transfers, put together in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import engine_shim
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE
from engine_shim.errors import SettingsError
from engine_shim.observer import PoolObserver
from engine_shim.pool.block_pool import MAX_POOL_BLOCKS, BlockPool
from engine_shim.pool.relocation import RelocatingPolicy
from engine_shim.reference.clock import Clock
from engine_shim.reference.content import PatternContent, Runner
from engine_shim.reference.decoder import Decoder
from engine_shim.reference.engine import RELOCATION_BYTES, Engine, Pace
from engine_shim.reference.geometry import named_geometry
from engine_shim.reference.kv_cache import KVCache, choose_device
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.reference.transfer import PINNED_SHARE, FolderTarget, PeerTarget, Target, Transfers
from engine_shim.workload import Workload

RESERVED_BLOCKS = (0,)  # as vLLM's null block
MAX_SEED = 1 << 63  # torch's generators take no more


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything that makes an engine what it is, except the trace it serves."""

    engine_id: str
    policy: str = "vllm"
    blocks: int = 4096
    block_tokens: int = 16
    headroom: float = 0.10
    prefix_cache: bool = True
    model_geometry: str = "stories260K"
    dtype: str = "float16"
    device: str = "auto"
    content: str = "pattern"
    limits: Limits = field(default_factory=Limits)
    pace: Pace = field(default_factory=Pace)
    samples: int = 1
    seed: int = 1
    verify_every: int = 0
    relocation_bytes: int = RELOCATION_BYTES  # copied in one step at most
    compaction: RunSettings = field(default_factory=RunSettings)  # budgets of one run
    moving_time_share: float = MAX_TIME_SHARE  # of the time that there is work, for all runs; 1 is no bound
    moving: bool = True  # may live blocks be moved? Can be switched at run time
    elastic: bool = False  # what a run has emptied is given back to the host
    control: bool = True  # a control socket beside the map
    transfer_folder: Path | None = None
    transfer_peer: str | None = None
    transfer_every: int = 1
    transfer_bytes_per_second: float | None = None  # of trace time
    transfer_pinned_share: float = PINNED_SHARE  # of the usable blocks, pinned by all transfers together

    def __post_init__(self) -> None:
        if self.content not in ("pattern", "model"):
            raise SettingsError(f"content {self.content!r} is not known; use pattern or model")
        if self.blocks < 1 + len(RESERVED_BLOCKS):
            raise SettingsError(f"blocks={self.blocks}: block 0 is reserved, so an engine needs 2 or more")
        if self.blocks > MAX_POOL_BLOCKS:
            raise SettingsError(f"blocks={self.blocks}: a pool has at most {MAX_POOL_BLOCKS:,}")
        if not 0.0 <= self.headroom < 1.0:  # false for NaN
            raise SettingsError(f"headroom={self.headroom} is a share of the usable blocks: 0 or more, below 1")
        if not 0 <= self.seed < MAX_SEED:
            raise SettingsError(f"seed={self.seed} must be 0 or more, and below 2**63")
        if self.samples < 1:
            raise SettingsError(f"samples={self.samples} must be 1 or more")
        if self.transfer_folder is not None and self.transfer_peer is not None:
            raise SettingsError("transfers go to a folder or to a peer, not to both")


def build_engine(
    settings: EngineSettings, clock: Clock, *, map_folder: Path | None = None, observer: PoolObserver | None = None
) -> tuple[Engine, PoolObserver]:
    """Allocate everything; the observer is `observer` where one is given, else a map in `map_folder`."""
    geometry = named_geometry(settings.model_geometry)
    device = choose_device(settings.device)
    cache = KVCache(geometry, settings.blocks, block_tokens=settings.block_tokens, dtype=settings.dtype, device=device)
    make_runner: Callable[[KVCache, int], Runner] = PatternContent if settings.content == "pattern" else Decoder
    runner = make_runner(cache, settings.seed)
    if observer is not None:
        return _assemble(settings, clock, cache, runner, observer), observer
    written = MapObserver.create(_map_spec(settings, cache, runner), map_folder)
    try:
        written.set_flag(relocating=settings.policy == RelocatingPolicy.name)
        return _assemble(settings, clock, cache, runner, written), written
    except BaseException:
        written.close()  # no map stays behind of an engine that never was
        raise


def _assemble(settings: EngineSettings, clock: Clock, cache: KVCache, runner: Runner, observer: PoolObserver) -> Engine:
    pool = BlockPool(
        settings.blocks,
        policy=settings.policy,
        block_tokens=settings.block_tokens,
        headroom=settings.headroom,
        prefix_cache=settings.prefix_cache,
        reserved=RESERVED_BLOCKS,
        observer=observer,
        block_bytes=cache.block_bytes,
    )
    transfers = None
    if (target := _target(settings)) is not None:
        rate = settings.transfer_bytes_per_second
        transfers = Transfers(
            pool,
            cache,
            target,
            bytes_per_second=None if rate is None else rate * settings.pace.speed,
            pinned_share=settings.transfer_pinned_share,
            wake=clock.wake,
        )
    engine = Engine(
        pool,
        cache,
        runner,
        limits=settings.limits,
        observer=observer,
        clock=clock,
        transfers=transfers,
        transfer_every=settings.transfer_every,
        verify_every=settings.verify_every,
        relocation_bytes=settings.relocation_bytes,
        compaction=settings.compaction,
        moving_time_share=settings.moving_time_share,
        elastic=settings.elastic,
    )
    if not settings.moving:
        engine.compaction.set_moving(False, "this engine was started with moving off", at_start=True)
    if settings.control and isinstance(observer, MapObserver) and observer.path is not None:
        engine.offer_control(observer.path)
    return engine


def arrivals(workload: Workload, settings: EngineSettings, *, loop: bool = False) -> Iterator[tuple[float, Sequence]]:
    """The trace's requests as sequences with their arrival in trace seconds; made one by one, for prompts are long.

    With `loop` the trace starts again after its last arrival, with other contents, for ever.
    """
    vocabulary = named_geometry(settings.model_geometry).vocabulary if settings.content == "model" else None
    round_, offset = 0, 0.0
    while True:
        for request in workload.requests:
            sequence = sequence_of(
                request, settings.block_tokens, vocabulary=vocabulary, samples=settings.samples, round_=round_
            )
            yield offset + request.arrival_s, sequence
        if not loop:
            return
        round_ += 1
        offset += workload.requests[-1].arrival_s + 1.0


def _map_spec(settings: EngineSettings, cache: KVCache, runner: Runner) -> MapSpec:
    usable = settings.blocks - len(RESERVED_BLOCKS)
    return MapSpec(
        engine_id=settings.engine_id,
        kind="reference",
        version=engine_shim.__version__,
        runner=type(runner).__name__,
        model=settings.model_geometry,
        pool="kv",
        total_blocks=settings.blocks,
        block_tokens=settings.block_tokens,
        block_bytes=cache.block_bytes,
        dtype=settings.dtype,
        medium=cache.device.type,
        headroom_blocks=int(usable * settings.headroom),
        policy=settings.policy,
        gpu_uuids=_gpu_uuids(cache),
    )


def _gpu_uuids(cache: KVCache) -> tuple[str, ...]:
    if cache.device.type != "cuda":
        return ()
    return (f"GPU-{torch.cuda.get_device_properties(cache.device).uuid}",)


def _target(settings: EngineSettings) -> Target | None:
    if settings.transfer_folder is not None:
        return FolderTarget(settings.transfer_folder)
    if settings.transfer_peer is not None:
        return PeerTarget(settings.transfer_peer)
    return None
