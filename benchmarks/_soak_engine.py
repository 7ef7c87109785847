"""One engine of the soak: a pool with a real map that says each second how far it came and whether it ever waited.

python benchmarks/_soak_engine.py FOLDER NUMBER BLOCKS STEPS_PER_SECOND (0: as fast as it goes)

A step that is not computing and not waiting for a core waits for something else: a lock, a disk, another process. That
wait is its wall time less its CPU time and less the time for which the kernel kept it waiting for a core.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._engines import MAX_SEQUENCES, Engine  # noqa: E402 - needs the path above

TELL_SECONDS = 1.0
LONG_MS = 10.0


class Delays:
    """What the kernel let this thread wait for a core, in nanoseconds (Documentation/scheduler/sched-stats.rst)."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> int:
        return int(os.pread(self._file, 128, 0).split()[1])


def main() -> None:
    folder, number, blocks, rate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    leaving = False

    def leave(*_: object) -> None:
        nonlocal leaving
        leaving = True

    signal.signal(signal.SIGTERM, leave)
    engine, delays = Engine(folder, number, blocks), Delays()
    for _ in range(2 * MAX_SEQUENCES):
        engine.step()
    print("ready", flush=True)
    told = due = time.monotonic()
    steps, longest, waited, waits = 0, 0.0, 0.0, 0
    while not leaving:
        wall, cpu, delay = time.perf_counter_ns(), time.thread_time_ns(), delays.read()
        engine.step()
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        delay = delays.read() - delay
        wait = max(0, wall - cpu - delay) / 1e6
        steps, longest, waited, waits = steps + 1, max(longest, wall / 1e6), max(waited, wait), waits + (wait > LONG_MS)
        now = time.monotonic()
        if now - told >= TELL_SECONDS:
            print(json.dumps({"steps": steps, "longest_ms": longest, "waited_ms": waited, "waits": waits}), flush=True)
            told, steps, longest, waited, waits = now, 0, 0.0, 0.0, 0
        if rate:
            due = max(due + 1 / rate, now - 1.0)
            time.sleep(max(0.0, due - now))
    engine.close()


if __name__ == "__main__":
    main()
