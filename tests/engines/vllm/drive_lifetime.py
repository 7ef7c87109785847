"""What befalls real vLLM engines that live long: requests that end in all ways, resets, sleep, the engine's own end.

    python drive_lifetime.py WORK_FOLDER [VARIANT...]

Prints one line, `RESULT {...}`, with a report for each variant.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model  # type: ignore[import-not-found]
from drive_in_process import KEPT, LOG, WORK, Engine, ahead_of_output, load, served  # type: ignore[import-not-found]
from engine_watch import SETTING, replaced  # type: ignore[import-not-found]
from pool_truth import Truth  # type: ignore[import-not-found]
from variants import run_variants  # type: ignore[import-not-found]
from vllm import SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.sampling_params import StructuredOutputsParams

from engine_shim import MapReader
from engine_shim.adapters import vllm as adapter
from engine_shim.adapters.hooks import is_hooked
from engine_shim.adapters.vllm import identity


def structured() -> dict[str, Any]:
    """Async scheduling and structured output: a step is scheduled, the output of the one before it is taken, with which
    requests end by themselves or are aborted, and then the grammar is asked for."""
    tiny_model.write_tokenizer(tiny_model.write(WORK / "full"))
    with ahead_of_output():
        engine = Engine(skip_tokenizer_init=False)
    scheduler, core = engine.scheduler, engine.core
    truth = Truth(scheduler, engine.reader)
    gone = {"ended": 0, "aborted": 0}
    aborted: set[str] = set()
    asked_for = scheduler.get_grammar_bitmask

    def get_grammar_bitmask(scheduler_output: Any) -> Any:
        result = asked_for(scheduler_output)
        for name in scheduler_output.num_scheduled_tokens:
            if name not in scheduler.requests:
                gone["aborted" if name in aborted else "ended"] += 1
        truth.check()
        return result

    scheduler.get_grammar_bitmask = get_grammar_bitmask
    for number in range(24):
        parameters = SamplingParams(max_tokens=60, temperature=0)
        if number % 4:
            regex = f"[a-j]{{{3 + number}}}"
            parameters.structured_outputs = StructuredOutputsParams(regex=regex)
        prompt = [3 + (number * 7 + place) % 1000 for place in range(30 + 3 * number)]
        engine.engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, parameters)
    reasons: dict[str, int] = {}
    steps, deadline = 0, time.monotonic() + 120
    while engine.engine.has_unfinished_requests() or core.batch_queue:
        steps += 1
        running = [request.request_id for request in scheduler.running]
        if running and steps % 9 == 0:  # as it comes from a client: taken when the step's output is
            aborted.add(running[-1])
            with replaced(engine.engine.engine_core, "abort_requests", core.aborts_queue.put_nowait):
                engine.engine.abort_request([running[-1]], internal=True)
        for output in engine.engine.step():
            if output.finished:
                reason = str(output.outputs[0].finish_reason)
                reasons[reason] = reasons.get(reason, 0) + 1
        if time.monotonic() > deadline:
            raise TimeoutError("requests are left")
    truth.check()
    return {
        **truth.report(),
        "gone_before_shown": gone,
        "finish_reasons": reasons,
        "reason": engine.attachment.reason if engine.attachment else "not attached",
        "degraded": engine.snapshot().flags.degraded,
        "repairs": engine.snapshot().counters["repairs"],
        "batches": core.batch_queue_size,
        "log": LOG.take(),
    }


def consumer() -> dict[str, Any]:
    """A KV consumer with two batches in flight: blocks of the requests that end wait for the step that still runs, and
    with one that ends in each step, some always wait."""
    with ahead_of_output():
        engine = Engine(
            kv_transfer_config={
                "kv_connector": "PassingConnector",
                "kv_connector_module_path": "holding_connector",
                "kv_role": "kv_both",
            }
        )
    scheduler, attachment = engine.scheduler, engine.attachment
    assert attachment is not None
    truth = Truth(scheduler, engine.reader)
    looks = {"steps": 0, "with_waiting_blocks": 0, "most_ended": 0, "unnamed": 0}

    def check() -> None:
        truth.check()
        snapshot = engine.snapshot()
        names = {entry.owner: entry.request_id for entry in snapshot.owners}
        waiting = [block.block_id for _, blocks in scheduler.deferred_frees for block in blocks if not block.is_null]
        looks["steps"] += 1
        looks["with_waiting_blocks"] += bool(waiting)
        looks["most_ended"] = max(looks["most_ended"], len(set(names.values()) - set(scheduler.requests)))
        # A shared one may name its other holder, but none names nobody.
        looks["unnamed"] += sum(int(snapshot.owner[block]) not in names for block in waiting)

    engine.at_each_step(check)
    # One whose answer has its full length is in no step any more when it ends; one that stops is.
    stops = SamplingParams(
        max_tokens=60,
        min_tokens=5,
        stop_token_ids=list(range(20, 1024)),
        temperature=0,
        ignore_eos=True,
        detokenize=False,
    )
    number, deadline = 0, time.monotonic() + 120
    while number < 150 or engine.engine.has_unfinished_requests() or engine.core.batch_queue:
        if number < 150:
            prompt = [3 + (number * 11 + place) % 1000 for place in range(40)]
            engine.engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, stops)
            number += 1
        engine.step()
        if time.monotonic() > deadline:
            raise TimeoutError("requests are left")
    load(engine, 24, resets=False)
    while engine.core.batch_queue:
        engine.step()
    truth.check()
    ensure_kv_transfer_shutdown()  # the worker's half is the process's, and later engines have none
    return {
        "differences": [line for line in truth.differences if line and "owners that have ended" not in line],
        "defers": scheduler.defer_block_free,
        "served": len(engine.tokens),
        "owners_at_rest": len(engine.snapshot().owners),
        "repairs": engine.snapshot().counters["repairs"],
        "reason": attachment.reason,
        "log": LOG.take(),
        **looks,
    }


def resets() -> dict[str, Any]:
    """Each reset of the prefix cache makes another table of hashes."""
    engine = Engine()
    assert engine.attachment is not None
    pool = engine.scheduler.kv_cache_manager.block_pool
    hooks, tables = [], []
    for _ in range(4):
        served(engine)
        hooks.append(len(engine.attachment.hooks))
        tables.append(weakref.ref(pool.cached_block_hash_to_block))
        assert len(pool.cached_block_hash_to_block) > 0
        assert engine.core.reset_prefix_cache()
    gc.collect()
    truth = Truth(engine.scheduler, engine.reader)
    engine.at_each_step(truth.check)
    served(engine)
    return {
        "hooks": hooks,
        "tables_left": sum(table() is not None for table in tables),
        "watched": is_hooked(pool.cached_block_hash_to_block, "pop"),
        "differences": truth.differences,
    }


def named_devices() -> dict[str, Any]:
    """The devices of an engine that sleeps and wakes; this machine has none, so their names are ours."""
    names: list[list[str]] = []
    with replaced(identity, "gpu_uuids", lambda config: ["GPU-1", "GPU-2"]):
        engine = Engine()
        for _ in range(3):
            served(engine)
            names.append(list(engine.snapshot().identity.gpu_uuids))
            engine.core.sleep(1)
            engine.core.wake_up()
            assert engine.attachment is not None
            path = engine.attachment.pools[0].observer.path
            assert path is not None
            engine.reader = MapReader(path)
    return {"names": names}


def woken_without_a_map() -> dict[str, Any]:
    """Whoever relocates needs a map that says so, and a socket that can stop it."""
    os.environ[SETTING] = "relocating"
    folder = os.environ["KVATLAS_DIR"]
    try:
        engine = Engine()
        assert engine.attachment is not None
        relocator = engine.attachment.steering.relocator
        assert relocator is not None
        before, relocated = served(engine), relocator.on
        engine.core.sleep(1)
        (WORK / "a file").touch()
        os.environ["KVATLAS_DIR"] = str(WORK / "a file")
        engine.core.wake_up()
        os.environ["KVATLAS_DIR"] = folder
        after = served(engine)
    finally:
        os.environ |= {SETTING: "stock", "KVATLAS_DIR": folder}
    cache = engine.scheduler.kv_cache_manager
    managers = cache.coordinator.single_type_managers
    owners = (engine.scheduler, cache, cache.block_pool, cache.coordinator, *managers)
    return {
        "relocated": [relocated, relocator.on],
        "reasons": [engine.attachment.reason, relocator.reason],
        "hooked": [name for owner in owners for name in vars(owner) if is_hooked(owner, name)],
        "watched": len(adapter.attachments()),
        "same": before == after,
        "log": LOG.take(),
    }


def let_go() -> dict[str, Any]:
    """An engine that was watched and has ended is freed as it would be without us. The last variant: with it go the
    process's communication groups."""
    engine = Engine()
    served(engine)
    held = {
        "core": weakref.ref(engine.core),
        "scheduler": weakref.ref(engine.scheduler),
        "executor": weakref.ref(engine.core.model_executor),
        "pool": weakref.ref(engine.scheduler.kv_cache_manager.block_pool),
    }
    watched = engine.attachment is not None
    engine.engine.engine_core.shutdown()
    KEPT.pop()
    del engine
    gc.collect()
    return {"watched": watched, "left": [name for name, one in held.items() if one() is not None]}


if __name__ == "__main__":
    run_variants(structured, consumer, resets, named_devices, woken_without_a_map, let_go)
