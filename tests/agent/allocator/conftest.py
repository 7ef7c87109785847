"""Snapshots as torch writes them, of an allocator that is simulated by torch's own documented rules.

The structure is that of torch.cuda.memory._snapshot's documentation and of torch/cuda/_memory_viz.py, which also reads
the older forms; a machine without CUDA cannot make a real one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass
class SimBlock:
    size: int
    requested: int
    state: str


@dataclass
class SimSegment:
    kind: str
    stream: int
    pool: tuple[int, int]
    blocks: list[SimBlock]
    expandable: bool = False
    device: int = 0
    address: int = 0

    @property
    def total(self) -> int:
        return sum(one.size for one in self.blocks)


@dataclass
class SimAllocator:
    """Best fit within pool, size class and stream; splits, frees and merges as torch's native allocator does."""

    segments: list[SimSegment] = field(default_factory=list)
    next_address: int = 0x7F00_0000_0000

    def allocate(self, requested: int, *, stream: int = 0, pool: tuple[int, int] = (0, 0), device: int = 0) -> SimBlock:
        size = max(512, -(-requested // 512) * 512)
        kind = "small" if size <= MIB else "large"
        fitting = [
            (block.size, place, segment)
            for segment in self.segments
            if (segment.kind, segment.stream, segment.pool, segment.device) == (kind, stream, pool, device)
            for place, block in enumerate(segment.blocks)
            if block.state == "inactive" and block.size >= size
        ]
        if fitting:
            _, place, segment = min(fitting, key=lambda one: (one[0], one[2].address))
        else:
            whole = 2 * MIB if kind == "small" else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment = SimSegment(kind, stream, pool, [SimBlock(whole, 0, "inactive")], device=device)
            segment.address, place = self.next_address, 0
            self.next_address += whole + 64 * MIB
            self.segments.append(segment)
        block = segment.blocks[place]
        rest = block.size - size
        if rest >= 512 if kind == "small" else rest > MIB:
            segment.blocks.insert(place + 1, SimBlock(rest, 0, "inactive"))
            block.size = size
        block.requested, block.state = requested, "active_allocated"
        return block

    def free(self, block: SimBlock, *, pending: bool = False) -> None:
        block.state = "active_pending_free" if pending else "inactive"
        segment = next(one for one in self.segments if any(two is block for two in one.blocks))
        merged: list[SimBlock] = []
        for one in segment.blocks:
            if merged and merged[-1].state == one.state == "inactive":
                merged[-1].size += one.size
            else:
                merged.append(one)
        segment.blocks = merged

    def snapshot(self) -> list[dict[str, Any]]:
        """As torch.cuda.memory_snapshot() gives it."""
        return [self._segment(one) for one in self.segments]

    @staticmethod
    def _segment(segment: SimSegment) -> dict[str, Any]:
        allocated = sum(one.size for one in segment.blocks if one.state == "active_allocated")
        active = sum(one.size for one in segment.blocks if one.state != "inactive")
        blocks, address = [], segment.address
        for one in segment.blocks:
            blocks.append(
                {
                    "address": address,
                    "size": one.size,
                    "requested_size": one.requested,
                    "state": one.state,
                    "frames": [],
                }
            )
            address += one.size
        return {
            "device": segment.device,
            "address": segment.address,
            "total_size": segment.total,
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": sum(one.requested for one in segment.blocks),
            "stream": segment.stream,
            "segment_type": segment.kind,
            "segment_pool_id": segment.pool,
            "is_expandable": segment.expandable,
            "frames": [],
            "blocks": blocks,
        }


def busy_allocator(seed: int, steps: int) -> SimAllocator:
    """An allocator after a run of allocations and frees, on two streams and with a captured graph's pool."""
    chance, allocator = random.Random(seed), SimAllocator()
    held: list[SimBlock] = []
    for _ in range(steps):
        if held and chance.random() < 0.45:
            allocator.free(held.pop(chance.randrange(len(held))), pending=chance.random() < 0.05)
        else:
            size = round(2 ** chance.uniform(6, 26))
            pool = (0, 1) if chance.random() < 0.1 else (0, 0)
            held.append(
                allocator.allocate(size, stream=chance.choice((0, 0, 0, 7)), pool=pool, device=chance.choice((0, 0, 1)))
            )
    return allocator


def whole_snapshot(segments: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """As torch.cuda.memory._snapshot() gives it, without recorded history."""
    return {
        "segments": segments,
        "device_traces": [[] for _ in range(2)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {"1": 0, "2": 0},
            **settings,
        },
        "external_annotations": [],
    }


def in_old_form(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As torch 1.13 wrote them: what was asked for stands in a block's history, and pools are not told."""
    old = []
    for segment in segments:
        kept = ("device", "address", "total_size", "allocated_size", "active_size", "stream", "segment_type")
        blocks = []
        for block in segment["blocks"]:
            one = {"size": block["size"], "state": block["state"]}
            if block["state"] == "active_allocated":
                frames = [{"filename": "a.py", "line": 1, "name": "f"}]
                one["history"] = [{"addr": block["address"], "frames": frames, "real_size": block["requested_size"]}]
            blocks.append(one)
        old.append({**{name: segment[name] for name in kept}, "blocks": blocks})
    return old


def block(size: int, state: str = "inactive", requested: int | None = None) -> dict[str, Any]:
    return {"size": size, "requested_size": size if requested is None else requested, "state": state, "frames": []}


def segment(*blocks: dict[str, Any], pool: tuple[int, int] = (0, 0), **given: Any) -> dict[str, Any]:
    """One segment of blocks, of the large class on stream 0 unless told otherwise."""
    return {
        "device": 0,
        "address": 0x7F00_0000_0000,
        "total_size": sum(one["size"] for one in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": list(blocks),
        **given,
    }


def traces(entries: int) -> Iterator[dict[str, Any]]:
    """Recorded history, with frames that many entries share, as torch shares them."""
    frames = [
        [
            {"filename": f"/srv/model/layer_{number}.py", "line": number, "name": f"forward_{number}"}
            for number in range(8)
        ]
        for _ in range(50)
    ]
    for number in range(entries):
        yield {
            "action": "alloc" if number % 2 else "free_completed",
            "addr": 0x7F00_0000_0000 + number * 512,
            "size": 512 * (number % 4096),
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + number,
            "compile_context": "N/A",
            "frames": frames[number % 50],
        }
