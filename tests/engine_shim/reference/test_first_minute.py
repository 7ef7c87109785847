"""The demo's first minute as the README tells it, in virtual time: F of both engines, and their prefix hits."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import pytest

from agent.demo.figures import suggest_blocks
from agent.fragmentation import analyze
from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.build import EngineSettings, arrivals
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.content import PatternContent
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.kv_cache import KVCache
from engine_shim.workload import load_workload
from tests.engine_shim.reference.test_default_load import SMALLEST, SPEED


@dataclass(frozen=True)
class Served:
    """F once a second of the demo's clock, from its start on, and the prefix tokens that were found."""

    rates: list[float]
    hit_tokens: int


def serve(policy: str, seconds: int) -> Served:
    workload = load_workload("mooncake-conversation")
    blocks = suggest_blocks(workload)
    pool = BlockPool(blocks, policy=policy, reserved=(0,))
    cache = KVCache(SMALLEST, blocks)
    clock = VirtualClock()
    engine = Engine(pool, cache, PatternContent(cache), clock=clock)
    rates: list[float] = []

    def looked() -> bool:
        if clock.now() >= len(rates):
            rate = analyze(pool.states()).fragmentation_rate
            assert rate is not None
            rates.append(rate)
        return len(rates) > seconds

    engine.serve(arrivals(workload, EngineSettings(engine_id="minute")), Pace(speed=SPEED), stop=looked)
    return Served(rates, engine.report().prefix_hit_tokens)


def stays_above(rates: list[float], least: float) -> int | None:
    """The second from which on F is above `least` to the end; None where it is not so at the end."""
    lower = [second for second, rate in enumerate(rates) if rate <= least]
    since = max(lower, default=-1) + 1
    return since if since < len(rates) else None


@pytest.mark.parametrize(("rates", "since"), [([0.95, 0.5, 0.95], 2), ([0.95, 0.9], None), ([0.95, 0.91], 0)])
def test_a_dip_is_noticed(rates: list[float], since: int | None) -> None:
    assert stays_above(rates, 0.9) == since


def test_the_first_minute_is_as_the_readme_tells_it() -> None:
    stock, relocating = serve("vllm", 75), serve("relocating", 75)
    since = stays_above(stock.rates, 0.9)
    assert since is not None
    assert since < 60
    assert 0.1 <= median(relocating.rates[:61]) <= 0.3
    assert stays_above(relocating.rates, 0.9) is None
    assert relocating.hit_tokens == stock.hit_tokens > 0
