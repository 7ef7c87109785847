"""Stands for a torch that has CUDA at work: the functions that the shim asks, with answers of torch's own structure."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 1 << 20
POOLS, MOMENTS = ("all", "large_pool", "small_pool"), ("current", "peak", "allocated", "freed")


def statistics(reserved: int, live: int, pending: int, stuck: int) -> dict[str, int]:
    """As torch.cuda.memory_stats flattens them."""
    sizes = {
        "allocated_bytes": live,
        "active_bytes": live + pending,
        "reserved_bytes": reserved,
        "requested_bytes": live - 100 if live else 0,
        "inactive_split_bytes": stuck,
        "segment": 3,
    }
    told = {f"{name}.{pool}.{moment}": size for name, size in sizes.items() for pool in POOLS for moment in MOMENTS}
    return {**told, "num_alloc_retries": 2, "num_ooms": 1, "max_split_size": -1}


class Cuda(SimpleNamespace):
    """torch.cuda of two devices, of which the second is not in use."""

    def __init__(self, segments: list[dict[str, Any]], *, initialised: bool = True, backend: str = "native") -> None:
        super().__init__(memory=SimpleNamespace(get_allocator_backend=lambda: backend))
        self.segments, self.initialised = segments, initialised
        self.held = threading.Event()  # cleared: the allocator's lock is the engine's
        self.held.set()

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return 2

    def memory_stats(self, device: int) -> dict[str, int]:
        self.held.wait(30)
        return statistics(60 * MIB, 30 * MIB, 4 * MIB, 20 * MIB) if device == 0 else statistics(0, 0, 0, 0)

    def memory_snapshot(self, mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces, "with traces it takes a second"
        return self.segments


def torch_with(cuda: Cuda, version: str | None = "12.8") -> ModuleType:
    module = ModuleType("torch")
    module.cuda = cuda  # type: ignore[attr-defined]
    module.version = SimpleNamespace(cuda=version, hip=None)  # type: ignore[attr-defined]
    return module


SEGMENTS = [
    {
        "device": 0,
        "address": 140000000000,
        "total_size": 20 * MIB,
        "allocated_size": 2 * MIB,
        "active_size": 2 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": 140000000000,
                "size": 2 * MIB,
                "requested_size": 2 * MIB - 100,
                "state": "active_allocated",
                "frames": [{"filename": "secret.py", "line": 1, "name": "f"}],
            },
            {"address": 140002097152, "size": 18 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
        ],
    }
]
