"""Measures the lasting history: the size of a day of one pool, what writing costs, and how long questions take.

Time is injected, so that a day takes a minute or two. Blocks change one by one at random, which is the worst case: an
allocator's changes come in runs.

    python -m benchmarks.history [--hours 24] [--blocks 100000] [--changes 600] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agent.history import METRICS, MemoryHistory
from agent.history.entries import Frame, Sample
from agent.history.keeper import HistoryKeeper
from agent.sampling.model import Clock

START_UNIX = 1_700_000_000.0
DAY = 86_400
REPEATS = 15
STATES, SHARES = 3, (0.2, 0.3, 0.5)  # free, cached and used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--changes", type=int, default=600, help="of blocks in a second")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(measure(Path(folder), given.hours, given.blocks, given.changes), indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


def measure(folder: Path, hours: float, blocks: int, changes: int) -> dict[str, object]:
    """Bytes after `hours`, CPU milliseconds of a second's writing, and milliseconds that questions take."""
    now = [START_UNIX]
    clock = Clock(wall=lambda: now[0], monotonic=lambda: now[0] - START_UNIX + 1e6)
    keeper = HistoryKeeper(folder / "day", 2**30, MemoryHistory(), clock)
    rng = np.random.default_rng(7)
    states = rng.choice(STATES, blocks, p=SHARES).astype(np.uint8)
    began = time.process_time()
    for _ in range(round(hours * 3600)):
        now[0] += 1
        states = states.copy()
        states[rng.integers(0, blocks, changes)] = rng.choice(STATES, changes, p=SHARES)
        keeper.writer.put(Sample("pool", now[0], {metric: float(rng.random()) for metric in METRICS}))
        keeper.writer.put(Frame("pool", now[0], "1", 2, states))
        keeper.writer.step()
    cpu = time.process_time() - began
    path = keeper.writer.path
    size = sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))
    frame_ms = _milliseconds(lambda: keeper.reader.frame_at("pool", START_UNIX + hours * 3600 * rng.random()))

    month = HistoryKeeper(folder / "month", 2**30, MemoryHistory(), clock)
    for minute in range(30 * DAY // 60):
        now[0] += 60
        month.writer.put(Sample("pool", now[0], {metric: float(rng.random()) for metric in METRICS}))
        if minute % 60 == 59:
            month.writer.step()
    end = now[0]
    ranges = {"30 days": 30 * DAY, "7 days": 7 * DAY, "1 day": DAY, "1 hour": 3600}
    return {
        "hours": hours,
        "blocks": blocks,
        "changes_a_second": changes,
        "file_megabytes": round(size / 1e6, 1),
        "write_cpu_ms_a_second": round(cpu / (hours * 3600) * 1000, 2),
        "frame_ms": frame_ms,
        "query_ms": {
            name: _milliseconds(lambda s=seconds: month.history.query("pool", "used", end - s, end, s / 600))  # type: ignore[misc]
            for name, seconds in ranges.items()
        },
        "query_30_days_3600_points_ms": _milliseconds(
            lambda: month.history.query("pool", "used", end - 30 * DAY, end, 720)
        ),
    }


def _milliseconds(work: Callable[[], object]) -> dict[str, float]:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1000)
    return {"median": round(statistics.median(taken), 1), "max": round(max(taken), 1)}


if __name__ == "__main__":
    main()
