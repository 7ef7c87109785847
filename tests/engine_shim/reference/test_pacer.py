"""A rate is held by an absolute schedule: pieces, late wake-ups and slow writes do not change the time for n bytes."""

from __future__ import annotations

import io
import threading
from array import array
from collections.abc import Iterator

import pytest

from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.geometry import named_geometry
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.pacer import Pacer
from engine_shim.reference.sequence import sequence_of
from engine_shim.reference.transfer import Transfers
from engine_shim.workload import TraceRequest

RATE = 1000.0
OVERSHOOT = 0.03125  # seconds; what a loaded machine adds to each wait


class LateClock:
    """Time that passes only in waits, each of which takes too long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + OVERSHOOT
        self.waits += 1


def seconds_for(pieces: list[int], *, forget: bool = False) -> float:
    """Time that sending these takes; `forget` begins the schedule anew at each piece, as a wait for each would."""
    clock = LateClock()
    pacer = Pacer(RATE, clock=clock, wait=clock.wait)
    pacer.begin()
    for piece in pieces:
        if forget:
            pacer.begin()
        pacer.sent(piece)
    pacer.end()
    return clock.now


def test_many_pieces_take_as_long_as_one() -> None:
    assert seconds_for([10_000]) == pytest.approx(10.0, abs=1.01 * OVERSHOOT)
    assert seconds_for([10] * 1000) == pytest.approx(10.0, abs=1.01 * OVERSHOOT)
    assert seconds_for([1] * 10_000) == pytest.approx(10.0, abs=1.01 * OVERSHOOT)
    assert seconds_for([10] * 1000, forget=True) > 20.0


def test_short_waits_are_put_together() -> None:
    clock = LateClock()
    pacer = Pacer(RATE, clock=clock, wait=clock.wait)
    for _ in range(1000):
        pacer.sent(1)  # a millisecond each
    pacer.end()
    assert clock.now == pytest.approx(1.0, abs=1.01 * OVERSHOOT)
    assert clock.waits < 40


def test_an_idle_link_saves_nothing_up_and_slow_writes_count() -> None:
    clock = LateClock()
    pacer = Pacer(RATE, clock=clock, wait=clock.wait)
    clock.now = 50.0
    pacer.begin()
    pacer.sent(2000)
    pacer.end()
    assert clock.now == pytest.approx(52.0, abs=2 * OVERSHOOT)
    pacer.begin()
    clock.now += 1.5  # reading and writing took so long
    pacer.sent(2000)
    pacer.end()
    assert clock.now == pytest.approx(54.0, abs=3 * OVERSHOOT)


class Nowhere:
    """A target that keeps nothing."""

    def open(self, _request_id: str) -> Iterator[io.BytesIO]:
        yield io.BytesIO()


@pytest.mark.parametrize("step", [1, 2])
def test_a_fragmented_table_is_sent_as_fast_as_a_contiguous_one(step: int) -> None:
    pool = BlockPool(128, policy="lowest-any")
    cache = KVCache(named_geometry("test-tiny"), 128)
    clock, done = LateClock(), threading.Event()
    rate = 32 * cache.block_bytes / 10.0
    transfers = Transfers(pool, cache, Nowhere(), bytes_per_second=rate, wake=done.set, clock=clock, wait=clock.wait)
    blocks = pool.allocate(64).blocks
    sequence = sequence_of(TraceRequest(0, 0.0, 512, 2), 16)
    sequence.table = array("q", blocks[: 32 * step : step])
    assert transfers.start(sequence)
    assert done.wait(120)
    assert transfers.collect() == [sequence]
    transfers.close()
    assert transfers.totals.descriptors == (1 if step == 1 else 32)
    assert transfers.totals.sent_bytes == 32 * cache.block_bytes
    assert clock.now == pytest.approx(10.0, abs=2 * OVERSHOOT)
