"""A writer process for tests: churns a pool, publishes in short steps, prints a line when it is ready.

usage: restless_writer.py FOLDER BLOCKS STEP_SECONDS [die-in-publish]
Each step allocates and frees runs of blocks so that counts and states change everywhere. Ends when stdin closes.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from engine_shim import MapObserver, MapSpec

folder, blocks, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
observer = MapObserver.create(
    MapSpec(
        engine_id="restless",
        kind="reference",
        model="tiny",
        pool="kv",
        total_blocks=blocks,
        block_tokens=16,
        block_bytes=1024,
        dtype="float16",
    ),
    folder,
)
if observer.path is None:
    print(f"error: {observer.reason}", flush=True)
    sys.exit(1)
dice = random.Random(1)
free = list(range(blocks))
dice.shuffle(free)
used: list[list[int]] = []


def step() -> None:
    for _ in range(8):
        taken, free[:] = free[:16], free[16:]
        observer.allocated(taken)
        used.append(taken)
    # Another number each time, so that the counts of two publishes all but never agree.
    wanted = dice.randrange(blocks // 4, blocks // 2)
    while len(free) < wanted:
        back = used.pop(dice.randrange(len(used)))
        observer.freed(back)
        free.extend(back)
    observer.step_ended(len(used), 0)


for _ in range(blocks // 256):
    step()
print(observer.path, flush=True)
if sys.argv[4:] == ["die-in-publish"]:
    publisher = observer._publisher
    assert publisher is not None
    step()
    with publisher.writer.publishing():
        publisher.writer.columns["state"][: blocks // 2] = 2
        os.kill(os.getpid(), signal.SIGKILL)
while not select.select([sys.stdin], [], [], 0)[0]:
    step()
    time.sleep(pause)
observer.close()
