"""A real engine process that runs only when it is told: `{"steps": 40}` on its standard input runs so many steps.

`stepping_engine.py JSON` takes one object: folder, blocks, policy, engine_id, seed, columns, medium, gpu_uuids.
Sequences of a few families share the beginnings of their prompts; they grow, and end. With `now_ns` beside `steps` it
is that time, and a millisecond later with each step; with `policy` the pool goes on under that one. It prints how many
steps it has run.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine_shim import BlockPool, MapObserver, MapSpec
from engine_shim.layout import COLUMNS

TOKENS = 16
FAMILIES = 5
SHARED_BLOCKS = 6


class Sequence:
    """One request: its table, and the hashes of its full blocks."""

    def __init__(self, owner: int, number: int, family: int, blocks: int) -> None:
        self.owner, self.number = owner, number
        self.hashes = [family * 1000 + 1 + i for i in range(SHARED_BLOCKS)] + [
            number * 1_000_000 + i for i in range(blocks * 4)
        ]
        self.prompt_blocks = SHARED_BLOCKS + blocks
        self.table: list[int] = []
        self.tokens = 0


class Engine:
    """A pool with traffic that depends on the seed alone."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.random = random.Random(options.get("seed", 1))
        blocks, policy = options.get("blocks", 600), options.get("policy", "vllm")
        spec = MapSpec(
            engine_id=options.get("engine_id", "engine"),
            kind="reference",
            model="org/model",
            pool="kv",
            total_blocks=blocks,
            block_tokens=TOKENS,
            block_bytes=4096,
            dtype="float16",
            policy=policy,
            headroom_blocks=blocks // 50,
            owner_slots=64,
            columns=tuple(options.get("columns", COLUMNS)),
            medium=options.get("medium", "cpu"),
            gpu_uuids=tuple(options.get("gpu_uuids", ())),
            events_per_second=options.get("events_per_second", 50_000),
        )
        self.now_ns: int | None = None
        self.observer = MapObserver.create(spec, Path(options["folder"]), clock_ns=self._clock_ns)
        self.pool = BlockPool(
            blocks, policy=policy, headroom=0.02, observer=self.observer, block_bytes=4096, reserved=(0,)
        )
        self.running: list[Sequence] = []
        self.number = self.steps = 0

    def _clock_ns(self) -> int:
        return time.time_ns() if self.now_ns is None else self.now_ns

    def step(self) -> None:
        self.steps += 1
        if self.now_ns is not None:
            self.now_ns += 1_000_000
        if len(self.running) < 12 and self.random.random() < 0.5:
            self._begin()
        for sequence in list(self.running):
            if self.random.random() < 0.04:
                self._end(sequence)
            else:
                self._grow(sequence)
        if self.running and self.random.random() < 0.05:
            block = self.running[0].table[-1]
            self.pool.pin([block])
            self.pool.unpin([block])
        if self.running:
            owners = [one.owner for one in self.running]
            self.observer.progressed(owners, [one.tokens for one in self.running])
        self.observer.step_ended(len(self.running), self.random.randrange(3))

    def _begin(self) -> None:
        self.number += 1
        family, own = self.random.randrange(FAMILIES), self.random.randrange(1, 6)
        hashes = [family * 1000 + 1 + i for i in range(SHARED_BLOCKS)]
        hit = self.pool.find_prefix(hashes)
        missing = SHARED_BLOCKS + own - len(hit)
        if not self.pool.can_allocate(missing + self.pool.num_unreferenced(hit), new_sequence=True):
            return
        owner = self.observer.open_owner(f"request-{self.number}", lora=f"lora-{family % 2}")
        sequence = Sequence(owner, self.number, family, own)
        hit = self.pool.pull(hit).blocks
        self.pool.acquire(hit, owner=owner)
        fresh = self.pool.allocate(missing, owner=owner, position=len(hit), new_sequence=True).blocks
        sequence.table = hit + fresh
        sequence.tokens = len(sequence.table) * TOKENS - self.random.randrange(1, TOKENS)
        full = sequence.tokens // TOKENS
        self.pool.register_blocks(sequence.table[len(hit) : full], sequence.hashes[len(hit) : full])
        filled = [TOKENS] * (len(fresh) - 1) + [sequence.tokens - (len(sequence.table) - 1) * TOKENS]
        self.observer.wrote(fresh, filled, sum(filled))
        self.observer.counted("prefix_query_tokens", sequence.tokens)
        self.observer.counted("prefix_hit_tokens", len(hit) * TOKENS)
        self.running.append(sequence)

    def _grow(self, sequence: Sequence) -> None:
        new = self.random.randrange(1, 4)
        while (sequence.tokens + new) > len(sequence.table) * TOKENS:
            if not self.pool.can_allocate(1, new_sequence=False) or len(sequence.table) >= len(sequence.hashes):
                self._end(sequence)
                return
            position = len(sequence.table)
            sequence.table += self.pool.allocate(1, owner=sequence.owner, position=position).blocks
        sequence.tokens += new
        full = sequence.tokens // TOKENS
        last = full - 1
        if sequence.tokens % TOKENS < new and last >= SHARED_BLOCKS and last < len(sequence.hashes):
            self.pool.register(sequence.table[last], sequence.hashes[last])
        block = sequence.table[-1]
        self.observer.wrote([block], [sequence.tokens - (len(sequence.table) - 1) * TOKENS], new)

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.table[::-1], owner=sequence.owner)
        self.observer.close_owner(sequence.owner)


def main() -> None:
    engine = Engine(json.loads(sys.argv[1]))
    engine.observer.publish()
    print(json.dumps({"path": str(engine.observer.path)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("close"):
            engine.observer.close()
            print(json.dumps({"steps": engine.steps}), flush=True)
            return
        engine.now_ns = command.get("now_ns")
        if policy := command.get("policy"):
            engine.pool.set_policy(policy)
            engine.observer.set_policy(policy)
            engine.observer.set_flag(relocating=policy == "relocating")
        for _ in range(command["steps"]):
            engine.step()
        print(json.dumps({"steps": engine.steps}), flush=True)


if __name__ == "__main__":
    main()
