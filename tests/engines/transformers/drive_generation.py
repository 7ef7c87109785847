"""Generates with Transformers' continuous batching on the CPU and compares its maps with its cache at every step.

    python drive_generation.py WORK_FOLDER

Prints one line, `RESULT {...}`, for the tests beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models  # type: ignore[import-not-found]
import transformers
from generation import Generation, Log, Requests, requests  # type: ignore[import-not-found]

from engine_shim import MapReader
from engine_shim.adapters import transformers as adapter
from engine_shim.adapters.transformers import plugin
from engine_shim.adapters.transformers.tap import AllocatorTap

LOG = Log()
MODELS = {kind: tiny_models.make(kind) for kind in ("full", "hybrid")}
MAPS = Path(os.environ["KVATLAS_DIR"])


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    had = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, had)


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def stock(kind: str, wanted: Requests, **options: Any) -> dict[str, list[int]]:
    """What Transformers answers with nothing of ours on the cache."""
    with setting("KVATLAS_DISABLE", "1"):
        one = Generation(MODELS[kind], **options)
        assert one.attachment is None
        tokens: dict[str, list[int]] = one.serve(wanted)
        one.stop()
    return tokens


def watched(kind: str, wanted: Requests, *, cancel: frozenset[str] = frozenset(), **options: Any) -> dict[str, Any]:
    """The same, watched and compared at every step."""
    one = Generation(MODELS[kind], **options)
    truth = one.truth()
    truth.check()
    one.at_each_step(truth.check)
    tokens = one.serve(wanted, cancel=cancel)
    one.rest()
    truth.check()  # every block has gone back, and shows
    snapshot = truth.blocks.read()
    reason, freed = one.attachment.reason, weakref.ref(one.processor)
    names = sorted(path.name for path in MAPS.iterdir())
    truth.processor = None
    one.stop()
    return {
        **truth.report(),
        # When somebody gives up is a matter of time, and with it which requests are computed together.
        "same": None if cancel else tokens == stock(kind, wanted, **options),
        "answered": len(tokens),
        "maps": names,
        "maps_left": sorted(path.name for path in MAPS.iterdir()),
        "processor_freed": freed() is None,
        "counters": dict(snapshot.counters),
        "groups": [
            (group.kind, group.layers, group.block_tokens, group.window_tokens, group.bytes_per_block)
            for group in snapshot.groups
        ],
        "block_bytes": snapshot.identity.block_bytes,
        "headroom": [snapshot.identity.headroom_blocks, snapshot.identity.total_blocks],
        "identity": {
            name: getattr(snapshot.identity, name)
            for name in ("kind", "version", "runner", "model", "medium", "dtype", "engine_id")
        },
        "used_at_rest": int(snapshot.state_counts[2]),
        "reason": reason,
        "log": LOG.take(),
    }


def kept() -> dict[str, Any]:
    """`generate_batch` twice over one manager that is kept between the calls, then destroyed."""
    model = MODELS["full"]
    wanted = list(requests(6).values())
    config = transformers.generation.configuration_utils.ContinuousBatchingConfig(
        page_size=8, num_blocks=60, max_batch_tokens=64, use_async_batching=False, use_cuda_graph=False
    )
    generation = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    answers, hits, incarnations = [], [], set()
    for _ in range(2):
        done = model.generate_batch(
            wanted, generation_config=generation, continuous_batching_config=config, persistent_manager=True
        )
        answers.append([output.generated_tokens for output in done.values()])
        (attachment,) = adapter.attachments()
        assert attachment.observer.path is not None
        snapshot = MapReader(attachment.observer.path).read()
        hits.append(snapshot.counters["prefix_hit_tokens"])
        incarnations.add(snapshot.identity.incarnation)
    model.destroy_cached_continuous_batching_manager()
    del attachment
    return {
        "answers": [sum(map(len, one)) for one in answers],
        "hits": hits,
        "incarnations": len(incarnations),
        "maps_left": len(list(MAPS.iterdir())),
        "watched_left": len(adapter.attachments()),
        "log": LOG.take(),
    }


def controls() -> dict[str, Any]:
    """The comparison and the audit must notice a map that is wrong."""
    one = Generation(MODELS["full"], blocks=60)
    truth = one.truth()
    cache = one.processor.cache
    pool, (allocator,) = cache.pool, cache.cache_allocators.values()
    report: dict[str, Any] = {}
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:  # around every method that is hooked
            pool.allocate_sector(0)
            pool.allocate_sector(0)
            allocator.block_table["nobody"] = pool.get_free_blocks(0, 2)
            truth.check()
            report["noticed"] = len(truth.differences)
            truth.differences.clear()
        elif looks == 5:
            truth.check()
            report["after_repair"] = [line for line in truth.differences if "nobody" not in line]
            report["repairs"] = truth.blocks.read().counters["repairs"]

    one.at_each_step(look)
    one.serve(requests(3))
    report["reason"] = one.attachment.reason
    one.stop()
    report["log"] = LOG.take()
    return report


def faults(wanted: Requests, expected: dict[str, list[int]]) -> dict[str, Any]:
    """Ours fails in several ways; Transformers answers the same each time."""
    reports: dict[str, Any] = {}

    def attempt(name: str, prepare: Callable[[Generation], None] = lambda one: None) -> Generation:
        one = Generation(MODELS["full"], blocks=24)
        prepare(one)
        same = one.serve(wanted) == expected
        attachment = one.attachment
        reports[name] = {
            "same": same,
            "attached": attachment is not None,
            "reason": attachment.reason if attachment else "",
            "hooks_left": len(attachment.hooks) if attachment else 0,
            "map_left": bool(attachment and attachment.observer.path and attachment.observer.path.exists()),
            "log": LOG.take(),
        }
        return one

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    def break_calls(one: Generation) -> None:
        one.attachment.observer.allocated = broken

    one = attempt("raising observer", break_calls)
    reports["raising observer"]["degraded"] = MapReader(one.attachment.observer.path).read().flags.degraded
    one.stop()

    for name in ("_released", "_taken"):
        with replaced(AllocatorTap, name, broken):
            attempt(f"raising {name}").stop()

    attempt("vanished folder", lambda one: shutil.rmtree(MAPS)).stop()
    MAPS.mkdir(exist_ok=True)

    def turn_off(_: Generation) -> None:
        adapter.turn_off("the operator said so")

    attempt("turned off", turn_off).stop()

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        one = attempt("no room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one.stop()

    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import CacheAllocator

    fork = CacheAllocator.fork_blocks
    with replaced(CacheAllocator, "fork_blocks", lambda self, *given: fork(self, *given)):
        attempt("unknown shape").stop()
    with replaced(plugin, "SUPPORTED", "5.18"):
        attempt("another version").stop()
    return reports


def hashed_ids() -> dict[str, Any]:
    shown: set[str] = set()
    with setting("KVATLAS_HASH_REQUEST_IDS", "true"):
        one = Generation(MODELS["full"], blocks=60)
        (reader,) = one.readers()
        one.at_each_step(lambda: shown.update(entry.request_id for entry in reader.read().owners))
        one.serve({"secret-name": [5, 6, 7]})
        one.stop()
    return {"shown": sorted(shown), "wanted": [hashlib.sha256(b"secret-name").hexdigest()]}


def main() -> None:
    adapter.register()
    adapter.register()
    many = requests(24)
    results: dict[str, Any] = {
        "tight": watched("full", many, blocks=24),
        "roomy": watched("full", many, blocks=120),
        "given up": watched("full", many, blocks=120, cancel=frozenset({"r20", "r21"})),
        "forked": watched("full", requests(8), blocks=90, sequences=3),
        "hybrid": watched("hybrid", many, blocks=40),
        "hybrid forked": watched("hybrid", requests(6), blocks=60, sequences=2),
        "prefill first": watched("full", many, blocks=40, scheduler_type="prefill_first"),
    }
    results["kept"] = kept()
    results["controls"] = controls()
    results["hashed"] = hashed_ids()
    few = requests(8)
    expected = stock("full", few, blocks=24)
    results["faults"] = faults(few, expected)
    results["disabled"] = {"maps": len(list(MAPS.iterdir())), "watched": len(adapter.attachments())}
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
