"""What the agent costs its pod: CPU time and memory at 1 Hz beside a pool of 100,000 blocks, scraped each 15 s.

CPU is user and system time from the first sample on; memory is the resident set; its slope is a least-squares line
through the readings after 120 s (or the second half of a shorter run, which says little).

    python benchmarks/agent_cost.py [--seconds 600] [--blocks 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _agent, _engines  # noqa: E402 - needs the path above

CPU_BAR = 0.01
MEMORY_BAR_MB = 120.0
SLOPE_BAR_MB_PER_MINUTE = 0.1
SETTLED_SECONDS = 120.0
SCRAPE_SECONDS = 15.0
READING_SECONDS = 2.0
STEPS_PER_SECOND = 20.0


def watch(pid: int, port: int, seconds: float) -> tuple[float, list[tuple[float, float]]]:
    """Share of a core, and (seconds, resident MB) readings."""
    process = psutil.Process(pid)
    began = time.monotonic()
    before = process.cpu_times()
    readings = []
    scraped = 0
    while (elapsed := time.monotonic() - began) < seconds:
        readings.append((elapsed, process.memory_info().rss / 1e6))
        if elapsed >= scraped * SCRAPE_SECONDS:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                response.read()
            scraped += 1
        time.sleep(READING_SECONDS)
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return spent / (time.monotonic() - began), readings


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Measure the agent's CPU time and memory.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder:
        engine = _engines.start(Path(folder), 1, options.blocks, STEPS_PER_SECOND)
        agent, port = _agent.start(Path(folder))
        try:
            time.sleep(3)
            cpu, readings = watch(agent.pid, port, options.seconds)
        finally:
            for process in (agent, engine):
                process.terminate()
                process.wait(10)
    times, memory = np.array(readings).T
    settled = times >= min(SETTLED_SECONDS, options.seconds / 2)
    slope = float(np.polyfit(times[settled], memory[settled], 1)[0]) * 60
    rows = {
        "cpu_share_of_a_core": (cpu, CPU_BAR),
        "resident_mb": (float(memory.max()), MEMORY_BAR_MB),
        "slope_mb_per_minute": (slope, SLOPE_BAR_MB_PER_MINUTE),
    }
    print(f"{options.blocks:,} blocks, {options.seconds:.0f} s")
    for name, (value, bar) in rows.items():
        print(f"{name:<24}{value:>10.4f}{bar:>10}{'' if value < bar else '  MISSED'}")
    if options.json:
        result = {name: {"value": value, "bar": bar} for name, (value, bar) in rows.items()}
        text = json.dumps({"seconds": options.seconds, "blocks": options.blocks, **result}, indent=2, allow_nan=False)
        options.json.write_text(text + "\n")
    return 0 if all(value < bar for value, bar in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
