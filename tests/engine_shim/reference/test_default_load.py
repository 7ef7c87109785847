"""The demo's load in virtual time: what is seen within half a minute, and that policies differ as they should."""

from __future__ import annotations

import pytest

from agent.demo.figures import suggest_blocks
from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.build import EngineSettings, arrivals
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine, Pace, Report
from engine_shim.reference.geometry import Geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.workload import load_workload

# How much a token takes changes no count of blocks; this keeps the whole pool at 22 MiB.
SMALLEST = Geometry("one-head", 1, 1, 4, 1, 4, 4, 16, "ours, for this test")
SPEED = 2.0


def serve(policy: str, *, seconds: float) -> Report:
    """The demo's engine on the demo's trace for so many seconds of the demo's clock."""
    workload = load_workload("mooncake-conversation")
    blocks = suggest_blocks(workload)
    pool = BlockPool(blocks, policy=policy, reserved=(0,))
    cache = KVCache(SMALLEST, blocks)
    clock = VirtualClock()
    engine = Engine(pool, cache, PatternContent(cache), clock=clock)
    feed = arrivals(workload, EngineSettings(engine_id="load"))
    engine.serve(feed, Pace(speed=SPEED), stop=lambda: clock.now() >= seconds)
    return engine.report()


@pytest.mark.parametrize("policy", ["vllm", "relocating"])
def test_the_live_share_is_plausible_within_thirty_seconds(policy: str) -> None:
    report = serve(policy, seconds=30.0)
    assert report.live_share_p50 is not None
    assert report.live_share_max is not None
    assert 0.25 <= report.live_share_p50 <= 0.5
    assert 0.3 <= report.live_share_max <= 0.7


def test_the_policies_differ_as_they_should() -> None:
    """The stock order scatters the allocatable blocks; relocation does not, and finds the same prefixes."""
    stock = serve("vllm", seconds=60.0)
    relocating = serve("relocating", seconds=60.0)
    assert stock.fragmentation_p50 is not None
    assert relocating.fragmentation_p50 is not None
    assert stock.fragmentation_p50 > 0.8  # the first fill of the pool, still in order, counts too
    assert relocating.fragmentation_p50 < 0.35
    assert relocating.prefix_hit_tokens == stock.prefix_hit_tokens > 0
    assert relocating.relocation_copies > 0
