"""Looks at a real vLLM engine while it serves, and holds what it sees against vLLM's own objects."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from drive_in_process import LOG, Engine  # type: ignore[import-not-found]
from pool_truth import Truth, faults_of_the_pool  # type: ignore[import-not-found]

from engine_shim.control.messages import encode_request
from engine_shim.control.peer import socket_address, socket_path

Requests = list[tuple[str, list[int], int]]

SETTING = "KVATLAS_VLLM_ALLOCATION"

BLOCK = 32


def conversation(requests: int, *, seed: int = 3, prefixes: int = 8, longest_answer: int = 40) -> Requests:
    """Prompts of 5 to 25 blocks that share prefixes. One in four is asked again, and ends where a block ends: vLLM then
    computes its last block again, which leaves two blocks of one hash."""
    dice = random.Random(seed)
    shared = [[dice.randrange(3, 1000) for _ in range(8 * BLOCK)] for _ in range(prefixes)]
    made: Requests = []
    for number in range(requests):
        if number % 4 == 3:
            prompt = list(made[dice.randrange(len(made))][1])
            prompt = prompt[: len(prompt) // BLOCK * BLOCK]
        else:
            prompt = dice.choice(shared)[: dice.choice((4, 8)) * BLOCK]
            prompt = prompt + [dice.randrange(3, 1000) for _ in range(dice.randrange(200, 700))]
        made.append((f"r{number}", prompt, dice.randrange(4, longest_answer)))
    return made


class Watch:
    """Looks at an engine while it serves: what is evicted, how the pool lies, and whether everything fits together."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        self.truth = Truth(engine.scheduler, engine.reader)
        self.evicted: list[str] = []
        self.cached_tokens: dict[str, int] = {}
        self.fragmentation: list[float] = []
        self.live: list[float] = []
        self.runs = self.fresh_blocks = self.prompts = self.duplicates = 0
        self.zeroed_sources = self.twice = self.copies = 0
        self.faults: list[str] = []
        self._counted: set[str] = set()
        self._hits: dict[str, int] = {}
        self._watch_evictions()
        self._watch_steps()
        engine.at_each_step(self.look)

    def _watch_evictions(self) -> None:
        stock = self.pool._maybe_evict_cached_block

        def evict(block: Any) -> Any:
            if block.block_hash is not None:
                self.evicted.append(bytes(block.block_hash).hex())
            return stock(block)

        self.pool._maybe_evict_cached_block = evict

    def _watch_steps(self) -> None:
        stock = self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            copies = output.kv_cache_block_copies or []
            self.copies += len(copies)
            self.zeroed_sources += len({copy.src_block_id for copy in copies} & set(output.new_block_ids_to_zero or ()))
            self.twice += len(copies) - len({copy.dst_block_id for copy in copies})
            return output

        self.scheduler.schedule = schedule
        cache = self.scheduler.kv_cache_manager
        record = cache.record_prefix_cache_stats

        def record_prefix_cache_stats(request: Any, num_hits: int) -> None:
            self._hits[request.request_id] = num_hits
            record(request, num_hits)

        cache.record_prefix_cache_stats = record_prefix_cache_stats

    def look(self) -> None:
        """Once a step."""
        self.truth.check()
        self.faults += faults_of_the_pool(self.scheduler)
        snapshot = self.engine.snapshot()
        allocatable = snapshot.states < 2
        edges = np.flatnonzero(np.diff(np.concatenate(([0], allocatable.astype(np.int8), [0]))))
        if allocatable.any():
            self.fragmentation.append(float(1 - (edges[1::2] - edges[::2]).max() / allocatable.sum()))
        self.live.append(float((snapshot.states == 2).mean()))
        entries = self.pool.cached_block_hash_to_block._cache.values()
        self.duplicates = max(self.duplicates, sum(isinstance(entry, dict) and len(entry) > 1 for entry in entries))
        self._count_runs()

    def _count_runs(self) -> None:
        """Contiguous runs of the blocks that a prompt was given anew, once it is computed: what a transfer pays for."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for request in self.scheduler.running:
            name = request.request_id
            if name in self._counted or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            self._counted.add(name)
            self.prompts += 1
            for manager in managers:
                hits = self._hits.get(name, 0) // BLOCK
                table = [block.block_id for block in manager.req_to_blocks[name][hits:] if not block.is_null]
                self.fresh_blocks += len(table)
                self.runs += sum(after != before + 1 for before, after in zip([-9, *table], table, strict=False))

    def serve(self, requests: Requests, at_once: int = 2) -> None:
        """Serve them, some arriving while others run."""
        dice = random.Random(7)
        waiting = requests[::-1]
        deadline = time.monotonic() + 900
        while waiting or self.engine.engine.has_unfinished_requests():
            for _ in range(min(len(waiting), dice.randrange(at_once))):
                self.engine.add(*waiting.pop())
            for output in self.engine.engine.step():
                self.engine.tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.cached_tokens[output.request_id] = output.num_cached_tokens
            if time.monotonic() > deadline:
                raise TimeoutError("requests are left")
        self.truth.check()

    def report(self) -> dict[str, Any]:
        """For the test that runs this driver."""
        one = self.engine.attachment.steering.relocator if self.engine.attachment else None
        counters = self.engine.snapshot().counters
        return {
            **self.truth.report(),
            "tokens": digest(sorted(self.engine.tokens.items())),
            "served": len(self.engine.tokens),
            "cached_tokens": digest(sorted(self.cached_tokens.items())),
            "evicted": digest(self.evicted),
            "evictions": len(self.evicted),
            "fragmentation_p50": float(np.median(self.fragmentation)) if self.fragmentation else None,
            "live_share": float(np.mean(self.live)),
            "runs_per_prompt": self.runs / max(1, self.prompts),
            "fresh_blocks_per_prompt": self.fresh_blocks / max(1, self.prompts),
            "duplicates": self.duplicates,
            "copies": self.copies,
            "copied": one.copied if one else 0,
            "reason": (one.reason if one else "no relocator"),
            "watched": self.engine.attachment.reason if self.engine.attachment else "not attached",
            "preemptions": counters["preemptions"],
            "repairs": counters["repairs"],
            "counted_copies": counters["relocation_copies"],
            "zeroed_sources": self.zeroed_sources,
            "written_twice": self.twice,
            "faults": self.faults[:5],
            "policy": self.engine.snapshot().identity.policy,
            "flag": self.engine.snapshot().flags.relocating,
            "log": LOG.take(),
        }


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute is another for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def ask(engine: Engine, request: Any) -> dict[str, Any]:
    """What the engine's control socket says to this."""
    assert engine.attachment is not None
    path = engine.attachment.pools[0].observer.path
    assert path is not None
    with socket.socket(socket.AF_UNIX) as connection, socket_address(socket_path(path)) as address:
        connection.settimeout(120)
        connection.connect(address)
        connection.sendall(encode_request(request))
        line = connection.makefile("rb").readline()
    reply: dict[str, Any] = json.loads(line)
    return reply
