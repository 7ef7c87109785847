"""Runs real vLLM engines with relocating allocation in this process, beside stock ones, and compares what they do.

    python drive_relocating.py WORK_FOLDER

Prints one line, `RESULT {...}`, with a report for each variant. Evictions, hits and tokens of all requests are told as
digests, so that the test can compare engines that have served the same.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import safetensors.torch  # type: ignore[import-not-found]
from drive_in_process import LOG, WORK, Engine, ahead_of_output  # type: ignore[import-not-found]
from engine_watch import (  # type: ignore[import-not-found]
    BLOCK,
    SETTING,
    Requests,
    Watch,
    ask,
    conversation,
    digest,
    replaced,
)
from pool_truth import faults_of_the_pool  # type: ignore[import-not-found]
from variants import run_variants  # type: ignore[import-not-found]

from engine_shim.adapters.hooks import is_hooked
from engine_shim.adapters.vllm import block_copies, contents, placement, relocator, worker_moves
from engine_shim.adapters.vllm.allocation import relocation_refusal
from engine_shim.control.messages import RelocationRequest, StatusRequest


def served(setting: str, requests: Requests, *, prepare: Callable[[Watch], None] | None = None, **engine: Any) -> Any:
    """The report of one engine that has served these requests under this setting."""
    os.environ[SETTING] = setting
    watch = Watch(Engine(**engine))
    if prepare is not None:
        prepare(watch)
    watch.serve(requests)
    return watch.report()


SIZES: dict[str, dict[str, Any]] = {
    "full": {"blocks": 480, "max_num_batched_tokens": 1024},
    "hybrid": {"blocks": 660, "max_num_batched_tokens": 1024, "hybrid": True},
    "tight": {"blocks": 110, "max_num_batched_tokens": 192},  # preemptions, and prompts in several chunks
}
SHORT = conversation(60, seed=11)


def compared() -> dict[str, Any]:
    """Stock beside relocating, and relocating without a part that it cannot do without."""
    reports: dict[str, Any] = {}
    for name, size in SIZES.items():
        requests = conversation(60, longest_answer=200) if name == "tight" else conversation(120)
        reports[name] = {setting: served(setting, requests, **size) for setting in ("stock", "relocating")}

    def nothing_copied(self: Any, others: Any) -> list[Any]:
        self._origins.clear()
        return list(others)

    with replaced(block_copies.StepCopies, "drain", nothing_copied):
        reports["full"]["without copies"] = served("relocating", conversation(120), **SIZES["full"])

    chosen = placement.Placement.choose_lower

    def careless(self: Any, hits: Any, allocatable: int, copies: int, keep: Any) -> Any:
        return chosen(self, hits, allocatable, copies, ())

    requests = conversation(120, seed=4)  # among whose hits are some that lie low while others are pulled down
    reports["hybrid"]["with exclusion"] = served("relocating", requests, **SIZES["hybrid"])
    with replaced(placement.Placement, "choose_lower", careless):
        reports["hybrid"]["without exclusion"] = served("relocating", requests, **SIZES["hybrid"])
    return reports


def two_in_flight() -> dict[str, Any]:
    with ahead_of_output():
        return {setting: served(setting, SHORT, **SIZES["full"]) for setting in ("stock", "relocating")}


def told() -> dict[str, Any]:
    """What vLLM tells others of its blocks: KV events in order, and the residency metrics of every block."""
    reports: dict[str, Any] = {}
    for setting in ("stock", "relocating"):
        events: list[Any] = []
        collectors: list[Any] = []

        def listen(watch: Watch, events: list[Any] = events, collectors: list[Any] = collectors) -> None:
            stock = watch.pool.take_events

            def take_events() -> Any:
                taken = stock()
                events.extend((type(event).__name__, [str(one) for one in event.block_hashes]) for event in taken)
                return taken

            watch.pool.take_events = take_events
            collectors.append(watch.pool.metrics_collector)
            collectors[0].drain_events = list  # kept, to be counted at the end

        report = served(
            setting, SHORT, prepare=listen, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
            kv_cache_metrics=True, kv_cache_metrics_sample=1.0, **SIZES["full"],
        )  # fmt: skip
        samples = collectors[0]._eviction_events
        reports[setting] = report | {
            "events": digest(events),
            "removals": sum(kind == "BlockRemoved" for kind, _ in events),
            "sampled": len(samples),
            "accesses": sorted(len(state.access_history) for state in collectors[0].block_metrics.values()),
        }
    return reports


def bounded() -> dict[str, Any]:
    """At most 1 MiB, 8 blocks of the tiny model, are copied with a step."""
    os.environ["KVATLAS_VLLM_RELOCATION_MIB"] = "1"
    most: list[int] = []

    def watch_copies(watch: Watch) -> None:
        stock = watch.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            most.append(len(output.kv_cache_block_copies or ()))
            return output

        watch.scheduler.schedule = schedule

    try:
        report = served("relocating", SHORT, prepare=watch_copies, **SIZES["full"])
    finally:
        del os.environ["KVATLAS_VLLM_RELOCATION_MIB"]
    return {**report, "most_copies_a_step": max(most), "stock": served("stock", SHORT, **SIZES["full"])}


def switched() -> dict[str, Any]:
    """With `auto` it is off until somebody asks for it over the control socket, and on until somebody asks again."""
    replies: list[dict[str, Any]] = []
    flags: list[bool] = []

    def ask_meanwhile(watch: Watch) -> None:
        plan = {
            30: RelocationRequest(on=True), 60: StatusRequest(), 90: RelocationRequest(on=False), 120: StatusRequest(),
        }  # fmt: skip

        def at_step() -> None:
            flags.append(watch.engine.snapshot().flags.relocating)
            if (request := plan.get(watch.truth.steps)) is not None:
                threading.Thread(target=lambda: replies.append(ask(watch.engine, request))).start()

        watch.engine.at_each_step(at_step)

    report = served("auto", conversation(120), prepare=ask_meanwhile, **SIZES["full"])
    return {**report, "replies": replies, "flags": sorted({*flags}), "first_flag": flags[0], "last_flag": flags[-1]}


def restored() -> dict[str, Any]:
    """vLLM's own connector that saves prompts to disk and loads them from there. What it has put into blocks is
    compared with its files; what it saved was in blocks that relocation had moved."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    dice = random.Random(5)
    prompts = [[dice.randrange(3, 1000) for _ in range(dice.randrange(100, 700))] for _ in range(24)]
    requests = [(f"p{number}", prompts[dice.randrange(24)], dice.randrange(4, 20)) for number in range(110)]
    compared: list[bool] = []
    stock_load = ExampleConnector.start_load_kv

    def start_load_kv(self: Any, forward_context: Any, **kwargs: Any) -> None:
        stock_load(self, forward_context, **kwargs)
        for request in self._get_connector_metadata().requests:
            for name, layer in forward_context.no_compile_layers.items():
                if request.is_store or getattr(layer, "kv_cache", None) is None:
                    continue
                path = self._generate_filename_debug(name, request.token_ids, request.mm_hashes)
                blocks, offsets = request.slot_mapping // BLOCK, request.slot_mapping % BLOCK
                there = layer.kv_cache[blocks, :, offsets].contiguous().numpy().tobytes()
                saved = safetensors.torch.load_file(path)["kv_cache"].contiguous().numpy().tobytes()
                compared.append(hashlib.sha256(there).digest() == hashlib.sha256(saved).digest())

    reports: dict[str, Any] = {}
    saved_prompts = WORK / "prompts"  # one for both: a process has one worker half, that of its first engine
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(saved_prompts)},
    }
    for setting in ("stock", "relocating"):
        compared.clear()
        shutil.rmtree(saved_prompts, ignore_errors=True)
        with replaced(ExampleConnector, "start_load_kv", start_load_kv):
            reports[setting] = served(setting, requests, blocks=150, max_num_batched_tokens=4096,
                                      kv_transfer_config=transfer)  # fmt: skip
        reports[setting] |= {"layers_restored": len(compared), "layers_equal": sum(compared)}

    def scribbled() -> Any:
        shutil.rmtree(saved_prompts, ignore_errors=True)
        return served("relocating", requests, prepare=filled_at_once, blocks=150, max_num_batched_tokens=4096,
                      kv_transfer_config=transfer)  # fmt: skip

    reports["filled at once"] = scribbled()

    def careless(self: Any, hook: Any) -> Any:
        return lambda *args, **kwargs: hook.inner(*args, **kwargs)

    with replaced(relocator.Relocator, "_around_loading", careless):
        reports["filled at once, without care"] = scribbled()
    return reports


def filled_at_once(watch: Watch) -> None:
    """The hastiest of connectors: something is in the blocks that it is to fill as soon as they have been handed out,
    long before the copies of the step are made."""
    runner = watch.engine.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for manager in watch.scheduler.kv_cache_manager.coordinator.single_type_managers:
        stock = manager.allocate_external_computed_blocks

        def allocate(name: str, *args: Any, manager: Any = manager, stock: Any = stock, **kwargs: Any) -> None:
            before = len(manager.req_to_blocks[name])
            stock(name, *args, **kwargs)
            handed_out = [block.block_id for block in manager.req_to_blocks[name][before:]]
            for rows in worker_moves._rows(runner):
                rows[handed_out] = 9.0

        manager.allocate_external_computed_blocks = allocate


def copied_twice() -> dict[str, Any]:
    """A hit that ends within a block is pulled down and then copied on write, in one step: the copy is of where the
    contents lie before the step. Schedulers of the models at hand never ask for that; the real managers do it here."""
    os.environ[SETTING] = "relocating"
    engine = Engine(blocks=120)
    scheduler = engine.scheduler
    cache = scheduler.kv_cache_manager
    pool, manager = cache.block_pool, cache.coordinator.single_type_managers[0]
    engine.add("old", list(range(3, 3 + 40 * BLOCK // 2)), 4)  # lies at the bottom, and is cached when it has ended
    engine.drain()
    engine.add("running", list(range(500, 570)), 30)
    engine.step()
    high = max((block for block in pool.blocks if block.ref_cnt == 0 and block.block_hash), key=lambda b: b.block_id)
    name = high.block_hash
    engine.add("second", list(range(3, 60)), 4)
    second = next(one for one in scheduler.requests if one.startswith("second"))
    cache.new_step_starts()
    cache.coordinator.allocate_new_computed_blocks(second, ([high],), 20, 0)
    hit = manager.req_to_blocks[second][0]
    manager.allocate_new_blocks(second, 57, 57)
    private = manager.req_to_blocks[second][0]
    copies, retained = cache.take_kv_cache_block_copies()
    scheduler._free_cow_retained_blocks(retained, 0)
    faults = faults_of_the_pool(scheduler)
    report = {
        "pulled": hit is not high and hit.block_hash == name,
        "from_before_the_step": [copy.src_block_id for copy in copies if copy.dst_block_id == private.block_id]
        == [high.block_id],
        "hit_copied": [copy.src_block_id for copy in copies if copy.dst_block_id == hit.block_id] == [high.block_id],
        "faults": faults,
    }
    manager.free(second)
    return report


def refused() -> dict[str, Any]:
    """What relocation cannot work with is said, and vLLM allocates by itself."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    LOG.take()
    reports: dict[str, Any] = {}
    with replaced(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda self: True)):
        os.environ[SETTING] = "relocating"
        engine = Engine()
        assert engine.attachment is not None
        reports["zeroing"] = {"log": LOG.take(), "relocator": engine.attachment.steering.relocator is not None}
        engine.add("one", list(range(3, 90)), 4)
        thread = threading.Thread(target=lambda: reports["zeroing"].update(ask(engine, RelocationRequest(on=True))))
        thread.start()
        while thread.is_alive():
            if not engine.engine.has_unfinished_requests():
                engine.add(f"more{time.monotonic_ns()}", list(range(3, 90)), 8)
            engine.step()
        engine.drain()
    config = engine.scheduler.vllm_config
    pool = engine.scheduler.kv_cache_manager.block_pool
    for name, owner, attribute, value in (
        ("HiSparse", config.attention_config, "hisparse_config", object()),
        ("another pool", pool, "__class__", type("HostPool", (type(pool),), {})),
        ("another device", config.device_config, "device_type", "tpu"),
        ("another scheduler", engine.scheduler, "__class__", type("S", (type(engine.scheduler),), {})),
    ):
        with replaced(owner, attribute, value):
            reports[name] = relocation_refusal(engine.scheduler)
    reports["nothing"] = relocation_refusal(engine.scheduler)
    os.environ[SETTING] = "sideways"
    engine = Engine()
    assert engine.attachment is not None
    reports["unknown"] = {"log": LOG.take(), "relocator": engine.attachment.steering.relocator is not None}
    return reports


def broken() -> dict[str, Any]:
    """Ours fails in the worst places; each time the same tokens are served and vLLM's pool is whole."""
    reports: dict[str, Any] = {"stock": served("stock", SHORT, **SIZES["full"])}

    def failing(owner: Any, name: str, after: int) -> Any:
        """The method or function, which raises at one call, once half of its work may be done."""
        stock = getattr(owner, name)
        calls = [0]

        def fail(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == after:
                raise RuntimeError("a fault of ours")
            return stock(*args, **kwargs)

        return replaced(owner, name, fail)

    watches: list[Watch] = []
    half = (("choosing", placement.Placement, "choose", 100), ("pulling", placement.Placement, "choose_lower", 10),
            ("between hashes and queue", contents, "_exchange_places", 57),
            ("between two blocks", relocator, "exchange", 101), ("composing", block_copies.StepCopies, "composed", 40),
            )  # fmt: skip
    for name, owner, attribute, after in half:
        with failing(owner, attribute, after):
            reports[name] = served("relocating", SHORT, prepare=watches.append, **SIZES["full"])
        reports[name]["hooks_left"] = hooks_left(watches.pop())
    for after in (61, 101):
        with failing(relocator, "exchange", after), replaced(relocator, "forget", lambda pool, blocks: None):
            reports[f"not mended {after}"] = served("relocating", SHORT, **SIZES["full"])

    def observer_fails(watch: Watch) -> None:
        """Observation ends in the middle of a step whose copies are still to be made."""
        attachment = watch.engine.attachment
        assert attachment is not None
        observer, one = attachment.pools[0].observer, attachment.steering.relocator
        assert one is not None
        stock = observer.allocated

        def allocated(*args: Any, **kwargs: Any) -> None:
            if watch.truth.steps > 40 and len(one._copies):
                raise RuntimeError("a fault of ours")
            stock(*args, **kwargs)

        observer.allocated = allocated

    reports["observer"] = served("relocating", SHORT, prepare=observer_fails, **SIZES["full"])

    def promised(self: Any) -> None:
        self._origins.clear()

    with replaced(relocator.Relocator, "stop", _losing(promised)):
        reports["copies lost"] = served("relocating", SHORT, prepare=observer_fails, **SIZES["full"])
    return reports


def hooks_left(watch: Watch) -> list[str]:
    """What is still hooked of the pool once everything has been turned off."""
    attachment = watch.engine.attachment
    assert attachment is not None
    attachment.stop("the test is over")
    cache = watch.scheduler.kv_cache_manager
    names = ("get_new_blocks", "free_blocks", "touch", "take_kv_cache_block_copies", "new_step_starts")
    return [name for name in names if is_hooked(watch.pool, name) or is_hooked(cache, name)]


def _losing(promised: Callable[[Any], None]) -> Callable[..., None]:
    """The control: relocation ends at once, with what was promised."""
    stock = relocator.Relocator.stop

    def stop(self: Any, reason: str) -> None:
        promised(self._copies)
        stock(self, reason)

    return stop


if __name__ == "__main__":
    run_variants(compared, two_in_flight, told, bounded, switched, copied_twice, refused, broken, restored)
