"""Runs real vLLM engines in this process, one after the other, and compares each map with its pool at every step.

    python drive_in_process.py WORK_FOLDER

Prints one line, `RESULT {...}`, with a report for each variant. Starting a second engine in a process takes a fraction
of a second where the first takes many, hence all in one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model  # type: ignore[import-not-found]  # beside this file
from pool_truth import Truth  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams

from engine_shim import MapReader
from engine_shim.adapters import vllm as adapter

WORK = Path(sys.argv[1])
KEPT: list[Any] = []  # an engine that is collected takes the process's communication groups with it


class Lines(logging.Handler):
    """What our logger said since it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


LOG = Lines()
logging.getLogger("kvatlas").addHandler(LOG)


class Engine:
    """An in-process engine with its scheduler and, where one is published, its map."""

    def __init__(self, *, hybrid: bool = False, blocks: int = 72, **settings: Any) -> None:
        for old in adapter.attachments():
            old.stop("the next variant begins")
        model = tiny_model.write(WORK / ("hybrid" if hybrid else "full"), hybrid=hybrid)
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            num_gpu_blocks_override=blocks,
            max_num_seqs=12,
            max_model_len=1024,
            seed=0,
            disable_log_stats=False,
            **{"max_num_batched_tokens": 192, "skip_tokenizer_init": True, **settings},
        )
        KEPT.append(self.llm)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        found = [one for one in adapter.attachments() if one.scheduler is self.scheduler]
        self.attachment = found[0] if found else None
        path = self.attachment.pools[0].observer.path if self.attachment else None
        self.reader = MapReader(path) if path else None
        self.tokens: dict[str, list[int]] = {}

    def at_each_step(self, check: Callable[[], None]) -> None:
        """Where a step is shown: outside of the hooks, so that it sees what they published."""
        stock = self.scheduler.get_grammar_bitmask

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            check()
            return result

        self.scheduler.get_grammar_bitmask = checked

    def add(self, name: str, prompt: list[int], length: int, salt: str = "") -> None:
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt:
            given["cache_salt"] = salt
        parameters = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, given, parameters)

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def drain(self) -> None:
        deadline = time.monotonic() + 900
        while self.engine.has_unfinished_requests():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError("requests are left")

    def snapshot(self) -> Any:
        assert self.reader is not None
        return self.reader.read()


def load(engine: Engine, requests: int, *, aborts: bool = True, resets: bool = True) -> dict[str, int]:
    """Requests with shared prefixes, more than the pool holds at once; some are aborted, the cache is reset."""
    dice = random.Random(3)
    prefixes = [[dice.randrange(3, 1000) for _ in range(160)] for _ in range(4)]
    waiting = [
        (
            f"r{number}",
            dice.choice(prefixes)[: dice.choice((64, 160))]
            + [dice.randrange(3, 1000) for _ in range(dice.randrange(4, 260))],
            dice.randrange(4, 40),
            dice.choice(("", "", "tenant-a")),
        )
        for number in range(requests)
    ]
    done = {"aborts": 0, "resets": 0, "steps": 0}
    deadline = time.monotonic() + 900
    while waiting or engine.engine.has_unfinished_requests():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(engine.scheduler.requests)} requests are left after {done}")
        for _ in range(min(len(waiting), dice.randrange(0, 3))):
            engine.add(*waiting.pop())
        engine.step()
        done["steps"] += 1
        running = [request.request_id for request in engine.scheduler.running]
        if aborts and running and done["steps"] % 37 == 0:
            engine.engine.abort_request([dice.choice(running)], internal=True)
            done["aborts"] += 1
        if resets and done["steps"] % 101 == 0:
            engine.core.reset_prefix_cache(reset_running_requests=True)
            done["resets"] += 1
    return done


def watched(hybrid: bool) -> dict[str, Any]:
    engine = Engine(hybrid=hybrid)
    truth = Truth(engine.scheduler, engine.reader)
    engine.at_each_step(truth.check)
    done = load(engine, 90)
    truth.check()  # at rest: every block has gone back, and shows
    snapshot = engine.snapshot()
    return {
        **truth.report(),
        **done,
        "counters": dict(snapshot.counters),
        "groups": [(group.kind, group.window_tokens, group.layers) for group in snapshot.groups],
        "block_bytes": snapshot.identity.block_bytes,
        "identity": {
            name: getattr(snapshot.identity, name) for name in ("kind", "version", "runner", "medium", "dtype")
        },
        "reason": engine.attachment.reason if engine.attachment else "not attached",
        "used_at_rest": int(snapshot.state_counts[2]),
        "log": LOG.take(),
    }


@contextmanager
def ahead_of_output() -> Iterator[None]:
    """Engines that are made meanwhile schedule a step before the one before it has its output. The CPU platform turns
    that off, and vLLM works with it all the same."""
    from vllm.platforms.cpu import CpuPlatform

    stock = vars(CpuPlatform)["check_and_update_config"]

    def ahead(config: Any) -> None:
        stock.__func__(CpuPlatform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(ahead)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = stock


def scheduled_ahead() -> dict[str, Any]:
    """Async scheduling: two batches in flight, so blocks and tokens of a step are settled early."""
    with ahead_of_output():
        engine = Engine()
    truth = Truth(engine.scheduler, engine.reader)
    engine.at_each_step(truth.check)
    same = served(engine)
    done = load(engine, 40, resets=False)
    while engine.core.batch_queue:
        engine.step()
    truth.check()
    return {
        **truth.report(),
        **done,
        "scheduler": type(engine.scheduler).__name__,
        "batches": engine.core.batch_queue_size,
        "tokens": same,
        "counters": dict(engine.snapshot().counters),
        "reason": engine.attachment.reason if engine.attachment else "not attached",
        "log": LOG.take(),
    }


def controls() -> dict[str, Any]:
    """The comparison and the audit must notice a map that is wrong."""
    engine = Engine()
    truth = Truth(engine.scheduler, engine.reader)
    engine.add("a", list(range(3, 100)), 4)
    engine.step()
    assert engine.attachment is not None
    watched_pool = engine.attachment.pools[0]
    LOG.take()
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = next(block for block in reversed(pool.blocks) if block.ref_cnt == 0)
    pool.free_block_queue.remove(free)  # around every method of the pool that is hooked
    free.ref_cnt = 3
    truth.check()
    noticed = len(truth.differences)
    engine.drain()
    repaired = Truth(engine.scheduler, engine.reader)
    repaired.check()
    report = {
        "noticed": noticed,
        "repairs": engine.snapshot().counters["repairs"],
        "after_repair": [line for line in repaired.differences if "waiting" not in line],
        "log": LOG.take(),
    }
    free.ref_cnt = 0
    pool.free_block_queue.append(free)
    watched_pool.observer.freed([free.block_id])
    return report


def copied_on_write() -> dict[str, Any]:
    """A prefix hit that ends within a block: vLLM's manager gives the request a copy of it. Schedulers of the models at
    hand never ask for that, so it is asked for here, of the real manager, for a request with a LoRA adapter."""
    from vllm.lora.request import LoRARequest

    engine = Engine()
    engine.add("first", list(range(3, 70)), 30)
    engine.step()
    engine.add("second", list(range(3, 60)), 4)
    scheduler, attachment = engine.scheduler, engine.attachment
    assert attachment is not None
    first, second = scheduler.requests
    scheduler.requests[second].lora_request = LoRARequest("adapter-of-a-tenant", 1, "/nowhere")
    cache = scheduler.kv_cache_manager
    manager = cache.coordinator.single_type_managers[0]
    truth = Truth(scheduler, engine.reader)

    def check() -> None:
        attachment._show(step=False)
        truth.check()

    source = manager.req_to_blocks[first][0]
    manager.add_local_computed_blocks(second, [source], 20, 0)
    check()
    manager.allocate_new_blocks(second, 57, 57)
    check()
    held = source.ref_cnt
    loras = [entry.lora for entry in engine.snapshot().owners if entry.request_id == second]
    _, retained = cache.take_kv_cache_block_copies()
    scheduler._free_cow_retained_blocks(retained, 0)
    check()
    manager.free(second)
    check()
    return {
        "differences": truth.differences,
        "steps": truth.steps,
        "references_of_the_source": [held, source.ref_cnt],
        "loras": loras,
        "copies": engine.snapshot().counters["copy_on_write"],
        "log": LOG.take(),
    }


def held_for_a_connector() -> dict[str, Any]:
    engine = Engine(
        kv_transfer_config={
            "kv_connector": "HoldingConnector",
            "kv_connector_module_path": "holding_connector",
            "kv_role": "kv_both",
        }
    )
    scheduler = engine.scheduler
    kept: set[str] = set()
    truth = Truth(scheduler, engine.reader, kept)
    holders: list[str] = []
    ages: list[float] = []

    def check() -> None:
        kept.clear()
        kept.update(name for name, request in scheduler.requests.items() if request.is_finished())
        truth.check()
        snapshot = engine.snapshot()
        pinned = (snapshot.states == 3).nonzero()[0].tolist()
        by_value = {entry.owner: entry.request_id for entry in snapshot.owners}
        holders.extend(by_value.get(int(snapshot.owner[block]), "") for block in pinned)
        now_ms = (time.time_ns() - snapshot.identity.created_unix_ns) // 1_000_000
        ages.extend((now_ms - int(snapshot.touched_ms[block])) / 1000 for block in pinned)

    engine.at_each_step(check)
    load(engine, 24, aborts=False, resets=False)
    engine.add("last", list(range(3, 60)), 12)
    engine.drain()
    while scheduler.has_requests():
        engine.step()
    truth.check()
    return {
        **truth.report(),
        "unnamed_holders": sum(not name for name in holders),
        "pinned_seen": len(holders),
        "oldest_pinned_seconds": max(ages, default=0.0),
        "pinned_at_rest": int(engine.snapshot().state_counts[3]),
        "repairs": engine.snapshot().counters["repairs"],
        "reason": engine.attachment.reason if engine.attachment else "not attached",
        "log": LOG.take(),
    }


def served(engine: Engine) -> list[list[int]]:
    """Greedy tokens of a fixed handful of requests, which each variant of vLLM must serve the same."""
    dice = random.Random(5)
    for number in range(6):
        engine.add(f"s{number}", [dice.randrange(3, 1000) for _ in range(40 + 30 * number)], 8)
    engine.drain()
    return [engine.tokens[f"s{number}"] for number in range(6)]


def faults(stock: list[list[int]]) -> dict[str, Any]:
    """Ours fails in several ways; vLLM serves the same tokens each time."""
    reports: dict[str, Any] = {}

    engine = Engine()
    assert engine.attachment is not None
    path = engine.attachment.pools[0].observer.path
    assert path is not None
    shutil.rmtree(path.parent)
    same = served(engine) == stock
    reports["vanished folder"] = {"same": same, "reason": engine.attachment.reason, "log": LOG.take()}
    path.parent.mkdir()

    engine = Engine()
    assert engine.attachment is not None
    attachment = engine.attachment

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    attachment.pools[0].observer.allocated = broken  # type: ignore[method-assign]
    same = served(engine) == stock
    reports["raising observer"] = {
        "same": same,
        "reason": attachment.reason,
        "degraded": engine.snapshot().flags.degraded,
        "hooks_left": len(attachment.hooks),
        "log": LOG.take(),
    }

    engine = Engine()
    assert engine.attachment is not None
    attachment = engine.attachment
    map_path = attachment.pools[0].observer.path
    adapter.turn_off("the operator said so")
    same = served(engine) == stock
    pool = engine.scheduler.kv_cache_manager.block_pool
    reports["turned off"] = {
        "same": same,
        "reason": attachment.reason,
        "map_left": bool(map_path and map_path.exists()),
        "hooked": [name for name in ("get_new_blocks", "free_blocks", "touch") if name in vars(pool)],
        "log": LOG.take(),
    }

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tiny_model.write(WORK / "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    write, tiny_model.write = tiny_model.write, lambda folder, **_: folder
    try:
        engine = Engine()
        same = served(engine) == stock
    finally:
        tiny_model.write = write
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reports["no room"] = {"same": same, "attached": engine.attachment is not None, "log": LOG.take()}

    from vllm.v1.core.block_pool import BlockPool

    touch = BlockPool.touch
    BlockPool.touch = lambda self, chosen: touch(self, chosen)
    try:
        engine = Engine()
        same = served(engine) == stock
    finally:
        BlockPool.touch = touch
    reports["unknown shape"] = {"same": same, "attached": engine.attachment is not None, "log": LOG.take()}

    from vllm.v1.core.kv_cache_manager import KVCacheManager

    record = KVCacheManager.record_prefix_cache_stats
    KVCacheManager.record_prefix_cache_stats = lambda self, who, num_hits: record(self, who, num_hits)
    try:
        engine = Engine()
        truth = Truth(engine.scheduler, engine.reader)
        engine.at_each_step(truth.check)
        same = served(engine) == stock
    finally:
        KVCacheManager.record_prefix_cache_stats = record
    reports["part of the shape unknown"] = {
        "same": same,
        "attached": engine.attachment is not None,
        "differences": truth.differences,
        "log": LOG.take(),
    }
    return reports


def slept() -> dict[str, Any]:
    """Sleep and wake through the engine core; the CPU's workers keep their memory, the executor's state is real."""
    engine = Engine()
    served(engine)
    before = engine.snapshot()
    engine.core.sleep(1)
    asleep = engine.snapshot()
    engine.core.wake_up()
    assert engine.attachment is not None
    path = engine.attachment.pools[0].observer.path
    assert path is not None
    engine.reader = MapReader(path)
    awake = engine.snapshot()
    truth = Truth(engine.scheduler, engine.reader)
    engine.at_each_step(truth.check)
    served(engine)
    return {
        "sleeping": [before.flags.sleeping, asleep.flags.sleeping, awake.flags.sleeping],
        "cached": [int(one.state_counts[1]) for one in (before, asleep, awake)],
        "incarnations": len({one.identity.incarnation for one in (before, asleep, awake)}),
        "differences": truth.differences,
        "steps": truth.steps,
        "log": LOG.take(),
    }


def hashed_ids() -> dict[str, Any]:
    os.environ["KVATLAS_HASH_REQUEST_IDS"] = "true"
    try:
        engine = Engine()
        engine.add("secret-name", list(range(3, 90)), 4)
        engine.step()
        snapshot = engine.snapshot()
        names = list(engine.scheduler.requests)
        engine.drain()
    finally:
        del os.environ["KVATLAS_HASH_REQUEST_IDS"]
    return {"requests": names, "shown": [entry.request_id for entry in snapshot.owners]}


def main() -> None:
    adapter.register()  # once more than vLLM did
    results: dict[str, Any] = {"full": watched(False), "hybrid": watched(True)}
    results["async"] = scheduled_ahead()
    results["controls"] = controls()
    results["copies"] = copied_on_write()
    results["sleep"] = slept()
    results["hashed"] = hashed_ids()
    engine = Engine()
    stock_like = served(engine)
    results["faults"] = faults(stock_like)
    results["tokens"] = stock_like
    results["connector"] = held_for_a_connector()
    results["registered_twice"] = len(adapter.attachments())
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
