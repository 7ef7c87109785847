"""What each tier holds on the disk, after restarts and clocks that were set, against a plain list of samples."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.history import MemoryHistory
from agent.history.keeper import HistoryKeeper
from agent.history.reading import Rows
from agent.history.tiers import SAMPLE_TIERS
from agent.sampling.model import Clock

POOL = "pool"
# Seconds to the next sample (below 0 the clock is set back), its value, and what the agent does then.
steps = st.lists(
    st.tuples(
        st.one_of(st.floats(0.05, 3), st.integers(1, 100), st.integers(-90, 0)),
        st.one_of(st.none(), st.floats(-1e5, 1e5, width=32)),
        st.sampled_from(["nothing", "nothing", "write", "restart"]),
    ),
    min_size=1,
    max_size=60,
)


def agrees(rows: Rows, wanted: dict[int, list[float]]) -> bool:
    """Does a tier hold these values, by the starts of their buckets?"""
    if rows.starts.tolist() != sorted(wanted):
        return False
    for start, record in zip(rows.starts, rows.records, strict=True):
        values = wanted[int(start)]
        if record["count"] != len(values):
            return False
        if values:
            room = 1e-5 * max(abs(value) for value in values)
            ends = (record["minimum"], record["maximum"]) == (min(values), max(values))
            if not ends or abs(record["mean"] - sum(values) / len(values)) > room:
                return False
    return True


@settings(max_examples=40)
@given(steps)
def test_each_tier_is_the_list_cut_into_its_buckets(given_steps: list[tuple[float, float | None, str]]) -> None:
    now, samples = 1_700_000_000.0, []
    with tempfile.TemporaryDirectory() as folder:

        def keeper() -> HistoryKeeper:
            clock = Clock(wall=lambda: now, monotonic=lambda: 1000.0)
            return HistoryKeeper(Path(folder), 64 * 2**20, MemoryHistory(), clock)

        kept = keeper()
        for gap, value, then in given_steps:
            now += gap
            samples.append((now, value))
            kept.history.append(POOL, now, {"used": value})
            if then != "nothing":
                kept.writer.step()
            if then == "restart":
                kept.writer._close()
                kept = keeper()
        kept.writer.step()
        for tier in SAMPLE_TIERS:
            wanted: dict[int, list[float]] = {}
            for time, value in samples:
                known = wanted.setdefault(math.floor(time / tier.step_seconds) * tier.step_seconds, [])
                known += [] if value is None else [value]
            rows = kept.reader.rows(POOL, "used", tier, 0, 2e9)
            assert rows is not None
            assert agrees(rows, wanted)
            # The negative control: one value more would be noticed.
            next(iter(wanted.values())).append(0.0)
            assert not agrees(rows, wanted)
        kept.writer._close()
