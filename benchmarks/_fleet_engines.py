"""Engines of a fleet, several in one process to save memory: each has its own pool, and its map in a folder of its own.

python benchmarks/_fleet_engines.py FOLDER FIRST COUNT BLOCKS STEPS_PER_SECOND
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._engines import MAX_SEQUENCES, Engine  # noqa: E402 - needs the path above


def main() -> None:
    folder, first, count, blocks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rate = float(sys.argv[5])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    running = [Engine(folder / f"pod-{number}", number, blocks) for number in range(first, first + count)]
    for _ in range(2 * MAX_SEQUENCES):
        for engine in running:
            engine.step()
    print("ready", flush=True)
    try:
        pause = 1 / (rate * count)
        due = time.monotonic()
        while True:
            for engine in running:  # by turns, so that not all publish at the same moment
                engine.step()
                due = max(due + pause, time.monotonic() - 1.0)
                time.sleep(max(0.0, due - time.monotonic()))
    finally:
        for engine in running:
            engine.close()


if __name__ == "__main__":
    main()
