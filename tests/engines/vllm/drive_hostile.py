"""Does to real vLLM engines, and to what of ours is in them, whatever a hostile tester would think of, as they serve.

    python drive_hostile.py WORK_FOLDER [VARIANT...]

Prints one line, `RESULT {...}`, with a report for each variant.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from drive_in_process import LOG, Engine, ahead_of_output  # type: ignore[import-not-found]
from engine_watch import SETTING, Watch, ask, conversation, digest  # type: ignore[import-not-found]
from variants import run_variants  # type: ignore[import-not-found]

from engine_shim import MapReader
from engine_shim.adapters.hooks import is_hooked
from engine_shim.adapters.vllm import plugin
from engine_shim.control.messages import CompactRequest, MovingRequest, PlanRequest, RelocationRequest, TurnOffRequest
from engine_shim.control.peer import socket_address, socket_path

COMPACTION = "KVATLAS_VLLM_COMPACTION"
REQUESTS = conversation(36, seed=21, longest_answer=60)
SIZES: dict[str, dict[str, Any]] = {
    "full": {"blocks": 130, "max_num_batched_tokens": 192},
    "hybrid": {"blocks": 260, "max_num_batched_tokens": 192, "hybrid": True},
    "tiny": {"blocks": 36, "max_num_batched_tokens": 64},  # one request at a time, all but for the shortest
}
NONSENSE = (
    b"\x00\xff\xfe\n",
    b"{" * 70_000 + b"\n",
    b"[]\n",
    b'{"schema":"kvatlas.control/v1","op":"compact","target":-1}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","target":NaN}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","target":1e400}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","max_moves":-5}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","max_moves":99999999999999999999}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","max_chunk_moves":0}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","max_step_seconds":-0.5}\n',
    b'{"schema":"kvatlas.control/v1","op":"compact","max_seconds":0}\n',
    b'{"schema":"kvatlas.control/v1","op":"relocation","on":"yes"}\n',
    b'{"schema":"kvatlas.control/v9","op":"turn_off"}\n',
    b'{"schema":"kvatlas.control/v1","op":"turn_off","force":true}\n',
)


def served(size: str, *, storm: bool, turn_off_at: int = 0, sleeps: bool = True) -> dict[str, Any]:
    """Requests are aborted, the prefix cache is reset and the engine sleeps at the same steps each time. With `storm`
    somebody also asks for runs, switches everything on and off and says nonsense as fast as the answers come."""
    os.environ |= {SETTING: "auto" if storm else "stock", COMPACTION: "1" if storm else "0"}
    watch = Watch(Engine(**SIZES[size]))
    engine, over = watch.engine, threading.Event()
    replies: dict[str, int] = {}
    callers = [threading.Thread(target=_call, args=(engine, over, replies, number)) for number in range(4 * storm)]
    for caller in callers:
        caller.start()
    dice = random.Random(7)
    waiting = [one for one in REQUESTS if size != "tiny" or len(one[1]) + one[2] < 34 * 32][::-1]
    steps = 0
    deadline = time.monotonic() + 900
    try:
        while waiting or engine.engine.has_unfinished_requests():
            for _ in range(min(len(waiting), dice.randrange(2))):
                engine.add(*waiting.pop())
            for output in engine.engine.step():
                engine.tokens[output.request_id] = list(output.outputs[0].token_ids)
                watch.cached_tokens[output.request_id] = output.num_cached_tokens
            steps += 1
            running = [request.request_id for request in engine.scheduler.running]
            if running and steps % 29 == 0:
                engine.engine.abort_request([dice.choice(running)], internal=True)
            if steps % 83 == 0:
                engine.core.reset_prefix_cache(reset_running_requests=True)
            if sleeps and steps == 40:
                nap(watch)
            if storm and steps == turn_off_at:
                request = TurnOffRequest(reason="in the middle of it")
                callers.append(threading.Thread(target=ask, args=(engine, request)))
                callers[-1].start()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(engine.scheduler.requests)} requests are left after {steps} steps")
    finally:
        over.set()
        attachment = engine.attachment
        assert attachment is not None
        # An engine in this process answers when it takes a step, and leaves at the one after.
        while any(caller.is_alive() for caller in callers) or (turn_off_at and not attachment.reason):
            if not engine.engine.has_unfinished_requests():
                engine.add(f"more{time.monotonic_ns()}", list(range(3, 40)), 2)
            engine.engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError("somebody is not answered")
    mover = attachment.steering.mover
    pool = engine.scheduler.kv_cache_manager.block_pool
    return {
        "tokens": digest(sorted((name, made) for name, made in engine.tokens.items() if not name.startswith("more"))),
        "cached_tokens": digest(sorted(watch.cached_tokens.items())),
        "served": len(engine.tokens),
        "steps": steps,
        "replies": replies,
        "moved": mover.moved if mover is not None else 0,
        "copies": watch.copies,
        "faults": watch.faults[:5],
        "differences": watch.truth.differences[:3] if not turn_off_at else [],
        "reason": attachment.reason,
        "hooked": [name for name in ("get_new_blocks", "free_blocks", "touch") if is_hooked(pool, name)],
        "preemptions": None if attachment.reason else engine.snapshot().counters["preemptions"],
        "repairs": None if attachment.reason else engine.snapshot().counters["repairs"],
        "log": LOG.take(),
    }


def _call(engine: Engine, over: threading.Event, replies: dict[str, int], number: int) -> None:
    """One who never stops asking."""
    dice = random.Random(number)
    while not over.is_set():
        request: CompactRequest | RelocationRequest | MovingRequest | PlanRequest | bytes = dice.choice(
            (
                CompactRequest(target=0.0, verify=dice.random() < 0.5, max_chunk_moves=dice.choice((1, 7, None))),
                CompactRequest(target=0.0, max_seconds=0.001),
                RelocationRequest(on=dice.random() < 0.8),
                MovingRequest(on=dice.random() < 0.9),
                dice.choice(NONSENSE),
            )
        )
        if number == 3:  # who only asks what would be moved, and so holds no run up
            request = PlanRequest(target=dice.random())
        try:
            answer = _say(engine, request) if isinstance(request, bytes) else ask(engine, request)
            name = str(answer.get("error") or answer.get("decision") or answer.get("reply"))
        except (OSError, LookupError, ValueError, AssertionError) as error:  # the map is gone, or not there yet
            name = type(error).__name__
            time.sleep(0.05)
        replies[name] = replies.get(name, 0) + 1


def _say(engine: Engine, line: bytes) -> dict[str, Any]:
    """Bytes as they are, and what comes back; some hang up before it does."""
    assert engine.attachment is not None
    path = engine.attachment.pools[0].observer.path
    assert path is not None
    with socket.socket(socket.AF_UNIX) as connection, socket_address(socket_path(path)) as address:
        connection.settimeout(120)
        connection.connect(address)
        connection.sendall(line)
        if line == NONSENSE[0]:
            return {"reply": "hung up"}
        reply: dict[str, Any] = json.loads(connection.makefile("rb").readline() or b"{}")
    return reply


def nap(watch: Watch) -> None:
    """All that runs is aborted, the engine sleeps and wakes, and has another map."""
    engine = watch.engine
    engine.engine.abort_request(list(engine.scheduler.requests), internal=True)
    engine.core.sleep(1)
    engine.core.wake_up()
    assert engine.attachment is not None
    if not engine.attachment.reason:
        path = engine.attachment.pools[0].observer.path
        assert path is not None
        engine.reader = watch.truth.reader = MapReader(path)


def storms() -> dict[str, Any]:
    return {
        size: {
            "stock": served(size, storm=False),
            "storm": served(size, storm=True),
            **({"left": served(size, storm=True, turn_off_at=70)} if size == "full" else {}),
        }
        for size in SIZES
    }


def two_in_flight() -> dict[str, Any]:
    with ahead_of_output():
        return {name: served("full", storm=name == "storm", sleeps=False) for name in ("stock", "storm")}


class Without:
    """An object that lacks one attribute, of its own or further down, and passes for vLLM's."""

    __module__ = "vllm.v1.core.sched.scheduler"

    def __init__(self, inside: Any, path: tuple[str, ...]) -> None:
        self.__dict__["_inside"], self.__dict__["_path"] = inside, path

    def __getattr__(self, name: str) -> Any:
        first, *rest = self._path
        if name != first:
            return getattr(self._inside, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._inside, name), tuple(rest))


def missing() -> dict[str, Any]:
    """Each attribute that is relied upon is missing in turn, as in some later vLLM: nothing raises, one line says so,
    and the engine serves on, watched in part or not at all."""
    os.environ |= {SETTING: "relocating", COMPACTION: "1"}
    engine = Engine(blocks=80)
    scheduler = engine.scheduler
    if engine.attachment is not None:
        engine.attachment.stop("others come")
    pool = ("kv_cache_manager", "block_pool")
    paths = [
        *[(name,) for name in ("running", "waiting", "requests", "vllm_config", "kv_cache_config", "kv_cache_manager",
          "schedule", "update_from_output", "finish_requests", "_free_blocks", "shutdown", "connector",
          "deferred_frees", "_free_request", "_preempt_request", "get_grammar_bitmask", "reset_prefix_cache")],
        *[("kv_cache_manager", name) for name in ("coordinator", "allocate_slots", "record_prefix_cache_stats",
          "take_kv_cache_block_copies", "new_step_starts", "watermark_blocks")],
        ("kv_cache_manager", "coordinator", "single_type_managers"),
        *[(*pool, name) for name in ("blocks", "num_gpu_blocks", "null_block", "enable_caching", "touch",
          "cached_block_hash_to_block", "free_block_queue", "get_new_blocks", "free_blocks", "reset_prefix_cache",
          "evict_blocks", "unpin_blocks", "metrics_collector", "_reuse_watchers", "_maybe_evict_cached_block")],
        *[(*pool, "free_block_queue", name) for name in ("num_free_blocks", "fake_free_list_head",
          "fake_free_list_tail", "iter_blocks_after")],
        (*pool, "cached_block_hash_to_block", "pop"),
    ]  # fmt: skip
    found: dict[str, Any] = {}
    for path in paths:
        LOG.take()
        try:
            one = plugin.attach(Without(scheduler, path))
            found[".".join(path)] = {
                "watched": one is not None,
                "said": [line for line in LOG.take() if "not in memory" not in line],
            }
            if one is not None:
                one.stop("the next one comes")
        except Exception as error:  # noqa: BLE001 - that is what must not be
            found[".".join(path)] = {"raised": repr(error)}
    engine.add("after", list(range(3, 90)), 4)
    engine.drain()
    return {"found": found, "served": len(engine.tokens)}


if __name__ == "__main__":
    run_variants(missing, storms, two_in_flight)
