"""Memory that two maps of one engine show, in blocks and in sectors, counts once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.devices.join import engines_of
from agent.sampling.model import AgentView
from engine_shim import MapObserver, MapReader, MapSpec


@pytest.mark.parametrize(("second", "wanted"), [("kv-sectors", 6 * 1024), ("kv-1", 12 * 1024)])
def test_sectors_are_the_memory_of_their_blocks(tmp_path: Path, second: str, wanted: int) -> None:
    samples: dict[str, Any] = {}
    observers = []
    for pool, blocks, size in (("kv", 6, 1024), (second, 2, 3072)):
        spec = MapSpec(
            engine_id="tiered",
            kind="test",
            model="none",
            pool=pool,
            total_blocks=blocks,
            block_tokens=4,
            block_bytes=size,
            dtype="int8",
            medium="cuda",
        )
        observers.append(MapObserver.create(spec, tmp_path))
        path = observers[-1].path
        assert path is not None
        snapshot = MapReader(path).read()
        samples[pool] = SimpleNamespace(state="running", identity=snapshot.identity, snapshot=snapshot)
    (engine,) = engines_of(cast(AgentView, SimpleNamespace(samples=samples)))
    assert engine.pool_bytes == wanted
    for observer in observers:
        observer.close()
