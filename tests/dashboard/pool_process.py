"""A block pool in a process of its own, driven line by line: a real pool, a real observer, a real map.

Usage: pool_process.py FOLDER ENGINE_ID BLOCKS POLICY. Each line on standard input is a command, answered by one line:
`churn N` serves N steps, `run` keeps serving until the next command, `hold` ends all steps with no request running,
`stall` claims that requests run and ends no further step, `sleep` and `wake` set the flag.
"""

from __future__ import annotations

import random
import select
import sys
from pathlib import Path

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.pool.block_pool import BlockPool

BLOCK_TOKENS = 16


class Churn:
    """Sequences come and go at random, the same way each time; one of them stays pinned."""

    def __init__(self, folder: Path, engine_id: str, blocks: int, policy: str) -> None:
        spec = MapSpec(
            engine_id=engine_id,
            kind="reference",
            model="example-8b",
            pool="kv",
            total_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            block_bytes=131072,
            dtype="float16",
            medium="cpu",
            headroom_blocks=blocks // 10,
            policy=policy,
        )
        self.observer = MapObserver.create(spec, folder)
        if self.observer.path is None:
            raise SystemExit(self.observer.reason)
        self.prefixes = policy == "vllm"
        self.pool = BlockPool(blocks, policy=policy, observer=self.observer, reserved=(0,), prefix_cache=self.prefixes)
        self.random = random.Random(11)
        self.live: list[tuple[list[int], int]] = []
        self.started = 0
        self.begin(9)
        self.pool.pin(self.live.pop()[0])  # never ends: a transfer that goes on

    def begin(self, size: int) -> None:
        owner = self.observer.open_owner(f"request-{self.started:05d}")
        blocks = self.pool.allocate(size, owner=owner, new_sequence=True).blocks
        if self.prefixes and self.started % 3:
            self.pool.register_blocks(blocks[:-1], [self.started * 10_000 + i for i in range(size - 1)])
        last = self.random.randint(1, BLOCK_TOKENS)
        self.observer.wrote(blocks, [BLOCK_TOKENS] * (size - 1) + [last], (size - 1) * BLOCK_TOKENS + last)
        self.observer.progressed([owner], [(size - 1) * BLOCK_TOKENS + last])
        self.live.append((blocks, owner))
        self.started += 1

    def step(self) -> None:
        most = self.pool.usable_blocks // 40 + 2
        while self.pool.num_used < 0.45 * self.pool.usable_blocks:
            size = self.random.randint(2, most)
            if not self.pool.can_allocate(size, new_sequence=True):
                break
            self.begin(size)
        for _ in range(1 + len(self.live) // 12):
            blocks, owner = self.live.pop(self.random.randrange(len(self.live)))
            self.pool.release(blocks[::-1], owner=owner)
            self.observer.close_owner(owner)
        self.observer.step_ended(len(self.live), 2)


def main() -> None:
    folder, engine_id, blocks, policy = sys.argv[1:]
    churn = Churn(Path(folder), engine_id, int(blocks), policy)
    churn.step()
    print("ready", flush=True)
    running = False
    while True:
        if running and not select.select([sys.stdin], [], [], 0.2)[0]:
            churn.step()
            continue
        command, *arguments = sys.stdin.readline().split() or ["quit"]
        running = command == "run"
        if command == "churn":
            for _ in range(int(arguments[0])):
                churn.step()
        elif command == "hold":
            churn.observer.step_ended(0, 0)
        elif command == "stall":
            churn.observer.step_ended(3, 1)
        elif command in ("sleep", "wake"):
            churn.observer.set_flag(sleeping=command == "sleep")
        elif command == "quit":
            churn.observer.close()
            return
        print("done", flush=True)


if __name__ == "__main__":
    main()
