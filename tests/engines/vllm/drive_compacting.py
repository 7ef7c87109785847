"""Runs real vLLM engines whose live blocks are moved every few steps, beside engines where none is ever moved.

    python drive_compacting.py WORK_FOLDER [VARIANT...]

Prints one line, `RESULT {...}`, with a report for each variant.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from drive_in_process import LOG, Engine, ahead_of_output  # type: ignore[import-not-found]
from engine_watch import (  # type: ignore[import-not-found]
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

from engine_shim.adapters.vllm import contents, mover, worker_moves
from engine_shim.adapters.vllm.compaction import compaction_refusal
from engine_shim.compaction.planning import MovePlan, plan_moves
from engine_shim.compaction.run import RunSettings
from engine_shim.control.messages import CompactRequest, MovingRequest, PlanRequest, StatusRequest, TurnOffRequest

COMPACTION = "KVATLAS_VLLM_COMPACTION"
EVERY = 3  # steps from the end of one run to the begin of the next
TIGHT: dict[str, Any] = {"blocks": 110, "max_num_batched_tokens": 192}
HYBRID: dict[str, Any] = {"blocks": 300, "max_num_batched_tokens": 192, "hybrid": True}
ANSWERS = conversation(60, longest_answer=200, prefixes=2)
SHORT = conversation(30, seed=11, longest_answer=60)


def scattered(states: Any, *, target: float, **given: Any) -> MovePlan:
    """A plan that makes nothing better: blocks in use, shared ones and others, go anywhere. Every other one is asked
    for once more, and then does nothing."""
    plan = plan_moves(states, target=target, **given)
    used, allocatable = np.flatnonzero(states == 2), np.flatnonzero(states < 2)
    count = min(6, len(used), len(allocatable)) if PLANNED[0] % 2 == 0 else 0
    PLANNED[0] += 1
    moves = np.stack((DICE.permutation(used)[:count], DICE.permutation(allocatable)[:count]), axis=1)
    return replace(plan, moves=moves.astype(np.int64))


DICE = np.random.default_rng(5)
PLANNED = [0]


class Moves:
    """Starts a run every few steps, in turn one that compacts and one that scatters, and counts what is moved."""

    def __init__(self, watch: Watch, *, verify: bool = False) -> None:
        self.watch = watch
        self.moved = self.shared = self.prefilling = self.runs = self.onto_cached = 0
        self.outcomes: dict[str, int] = {}
        self.faults: list[str] = []
        self.reasons: set[str] = set()
        self._settings = RunSettings(target=0.0, verify=verify, max_step_seconds=5.0)
        self._since = 0
        assert watch.engine.attachment is not None
        self.steering = watch.engine.attachment.steering
        self.compactor = self.steering.compactor
        assert self.compactor is not None
        self._watch_commits()
        stock = watch.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            self._start()
            return stock(*args, **kwargs)

        watch.scheduler.schedule = schedule

    def _start(self) -> None:
        assert self.compactor is not None
        self._since += 1
        if self.compactor.active or self._since < EVERY or self.compactor.switch.reason:
            return
        self._since = 0
        planner = scattered if self.runs % 2 else plan_moves
        self.compactor.start(self._settings, done=self._done, planner=planner)
        self.runs += 1

    def _done(self, report: Any) -> None:
        self.outcomes[report.outcome.value] = self.outcomes.get(report.outcome.value, 0) + 1
        if report.outcome.value in ("failed", "refused"):
            self.reasons.add(report.reason)

    def _watch_commits(self) -> None:
        one = self.steering.mover
        assert one is not None
        stock = one.commit

        def commit(moves: Any) -> None:
            blocks = self.watch.pool.blocks
            sources = moves[:, 0].tolist()
            shared = sum(blocks[block].ref_cnt > 1 for block in sources)
            onto_cached = sum(blocks[block].block_hash is not None for block in moves[:, 1].tolist())
            early = set()
            for request in self.watch.scheduler.running:
                if request.num_computed_tokens < request.num_prompt_tokens:
                    early |= one._ids_of(request.request_id)
            prefilling = len(early.intersection(sources))
            stock(moves)
            self.moved += len(sources)
            self.shared += shared
            self.prefilling += prefilling
            self.onto_cached += onto_cached
            self.faults += faults_of_the_pool(self.watch.scheduler)

        one.commit = commit

    def report(self) -> dict[str, Any]:
        """For the test that runs this driver."""
        assert self.compactor is not None
        return {
            "moved": self.moved,
            "shared": self.shared,
            "prefilling": self.prefilling,
            "onto_cached": self.onto_cached,
            "runs": self.runs,
            "outcomes": self.outcomes,
            "faults_after_a_move": self.faults[:5],
            "reasons": sorted(self.reasons)[:5],
            "off": self.compactor.switch.reason,
            "failed": self.compactor.switch.failed,
            "counted_moves": self.watch.engine.snapshot().counters["live_moves"],
        }


def served(requests: Requests, *, move: bool, verify: bool = False, allocation: str = "stock",
           prepare: Callable[[Watch], None] | None = None, **engine: Any) -> dict[str, Any]:  # fmt: skip
    """The report of one engine that has served these requests, with moves of live blocks or without."""
    os.environ[SETTING] = allocation
    os.environ[COMPACTION] = "1" if move else "0"
    watch = Watch(Engine(**engine))
    if prepare is not None:
        prepare(watch)
    moves = Moves(watch, verify=verify) if move else None
    watch.serve(requests)
    return {**watch.report(), **(moves.report() if moves else {})}


def moved() -> dict[str, Any]:
    reports: dict[str, Any] = {
        "tight": {"never": served(ANSWERS, move=False, **TIGHT), "often": served(ANSWERS, move=True, **TIGHT)},
        "hybrid": {"never": served(SHORT, move=False, **HYBRID), "often": served(SHORT, move=True, **HYBRID)},
    }
    reports["tight"]["relocating too"] = served(ANSWERS, move=True, allocation="relocating", **TIGHT)
    reports["hybrid"]["verified"] = served(SHORT, move=True, verify=True, **HYBRID)
    with ahead_of_output():
        reports["two in flight"] = {
            "never": served(SHORT, move=False, **TIGHT),
            "often": served(SHORT, move=True, **TIGHT),
        }
    return reports


def failing(owner: Any, name: str, after: int, then: Callable[..., Any] | None = None) -> Any:
    """The function, which at one call raises, or does something else instead."""
    stock = getattr(owner, name)
    calls = [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != after:
            return stock(*args, **kwargs)
        if then is None:
            raise RuntimeError("a fault of ours")
        return then(*args, **kwargs)

    return replaced(owner, name, fail)


def controls() -> dict[str, Any]:
    """Without a part that it cannot do without, the tokens must differ."""
    stock_copy, stock_settle = worker_moves.copy_blocks, worker_moves.settle_blocks

    def not_copied(worker: Any, moves: Any, aside: Any) -> int:
        stock_copy(worker, (), aside)
        return len(moves)

    def not_put_back(worker: Any, renamed: Any, put_back: Any) -> int:
        return stock_settle(worker, renamed, ())

    def not_renamed(worker: Any, renamed: Any, put_back: Any) -> int:
        return stock_settle(worker, {}, put_back)

    reports: dict[str, Any] = {"never": served(SHORT, move=False, **TIGHT)}
    for name, function in (
        ("copy_blocks", not_copied),
        ("settle_blocks", not_put_back),
        ("settle_blocks", not_renamed),
    ):
        with replaced(worker_moves, name, function):
            reports[function.__name__] = served(SHORT, move=True, **TIGHT)
    return reports


def broken() -> dict[str, Any]:
    """Ours fails in the worst places: the tokens are the same, vLLM's pool is whole, and where a chunk was half done
    nothing is moved any more."""
    stock_settle, stock_copy, stock_rename = (
        worker_moves.settle_blocks,
        worker_moves.copy_blocks,
        mover.VllmMover._rename,
    )

    def half_settled(worker: Any, renamed: Any, put_back: Any) -> int:
        stock_settle(worker, dict(list(renamed.items())[: len(renamed) // 2]), ())
        raise RuntimeError("a rank fails")

    def spoiled(worker: Any, moves: Any, aside: Any) -> int:
        stock_copy(
            worker,
            [(source, destination) for (source, _), (_, destination) in pairwise(moves)],
            aside,
        )
        return len(moves)

    def half_renamed(self: Any, renamed: Any) -> int:
        return stock_rename(self, dict(list(renamed.items())[: len(renamed) // 2]))

    def short(worker: Any, moves: Any, aside: Any) -> int:
        return stock_copy(worker, moves, aside) - 1

    stock_exchange = contents._exchange_hashes

    def half_exchanged(*blocks: Any) -> None:
        stock_exchange(*blocks)
        raise RuntimeError("a fault of ours")

    reports: dict[str, Any] = {"never": served(SHORT, move=False, **TIGHT)}
    for name, fault in (
        ("a rank does not copy", failing(worker_moves, "copy_blocks", 5)),
        ("a rank copies less", failing(worker_moves, "copy_blocks", 5, short)),
        ("before the first block", failing(mover, "trade", 30)),
        ("between two blocks", failing(mover, "trade", 33)),
        ("within a block", failing(contents, "_exchange_hashes", 34, half_exchanged)),
        ("between tables", failing(mover.VllmMover, "_rename", 9, half_renamed)),
        ("a rank settles in part", failing(worker_moves, "settle_blocks", 9, half_settled)),
    ):
        with fault:
            reports[name] = served(SHORT, move=True, **TIGHT)
    with failing(worker_moves, "copy_blocks", 5, spoiled):
        reports["contents differ"] = served(SHORT, move=True, verify=True, **TIGHT)
    with (
        failing(worker_moves, "settle_blocks", 9, half_settled),
        replaced(mover.VllmMover, "give_up", lambda self, moves: None),
    ):
        reports["not given up"] = served(SHORT, move=True, **TIGHT)
    return reports


def asked_for() -> dict[str, Any]:
    """Over the control socket, while requests run."""
    replies: dict[str, Any] = {}
    watches: list[Watch] = []

    def ask_meanwhile(watch: Watch) -> None:
        watches.append(watch)
        plan: dict[int, Any] = {
            70: PlanRequest(target=0.0), 75: CompactRequest(target=0.0, verify=True), 90: MovingRequest(on=False),
            95: CompactRequest(target=0.0), 100: MovingRequest(on=True), 110: StatusRequest(),
            130: TurnOffRequest(reason="the operator said so"),
        }  # fmt: skip
        steps = [0]
        stock = watch.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            steps[0] += 1
            if (request := plan.get(steps[0])) is not None:
                label = f"{steps[0]} {request.op}"
                threading.Thread(target=lambda: replies.update({label: ask(watch.engine, request)})).start()
            return stock(*args, **kwargs)

        watch.scheduler.schedule = schedule

    os.environ[SETTING], os.environ[COMPACTION] = "stock", "1"
    watch = Watch(Engine(**TIGHT))
    ask_meanwhile(watch)
    watch.truth.check = lambda: None  # its map goes in the middle
    watch.serve(SHORT)
    attachment = watch.engine.attachment
    assert attachment is not None
    return {
        "replies": dict(sorted(replies.items(), key=lambda item: int(item[0].split()[0]))),
        "tokens": served(SHORT, move=False, **TIGHT)["tokens"],
        "tokens_served": digest(sorted(watch.engine.tokens.items())),
        "reason": attachment.reason,
        "hooked": [name for name in ("get_new_blocks", "free_blocks", "touch") if name in vars(watch.pool)],
        "log": LOG.take(),
    }


def refused() -> dict[str, Any]:
    """What stands against moves, found in the real objects of an engine, of which one thing at a time is another."""
    os.environ[SETTING], os.environ[COMPACTION] = "stock", "1"
    engine = Engine()
    scheduler = engine.scheduler
    config = scheduler.vllm_config
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    others = type("MambaManager", (type(manager),), {})
    reports = {"plain": compaction_refusal(scheduler)}
    for name, owner, attribute, value in (
        ("a connector", scheduler, "connector", object()),
        ("state groups", manager, "__class__", others),
        ("speculative decoding", config, "speculative_config", object()),
        ("decode context parallel", config.parallel_config, "decode_context_parallel_size", 2),
        ("prefill context parallel", config.parallel_config, "prefill_context_parallel_size", 2),
        ("pipeline parallel", config.parallel_config, "pipeline_parallel_size", 2),
        ("the second runner", type(config), "use_v2_model_runner", property(lambda self: True)),
        ("HiSparse", config.attention_config, "hisparse_config", object()),
    ):
        with replaced(owner, attribute, value):
            reports[name] = compaction_refusal(scheduler)
    worker = engine.core.model_executor.driver_worker
    reports["worker"] = worker_moves.probe(worker)
    runner = worker.model_runner
    with replaced(runner, "kv_caches", [runner.kv_caches[0][:7]]):
        reports["unknown layout"] = worker_moves.probe(worker)
    unknown = type("GPUModelRunner", (type(runner),), {"__module__": "somewhere.else"})
    with replaced(runner, "__class__", unknown):
        reports["unknown runner"] = worker_moves.probe(worker)
    os.environ[COMPACTION] = "0"
    return reports


if __name__ == "__main__":
    run_variants(moved, controls, broken, asked_for, refused)
