"""SGLang's own event loops, and the methods of its scheduler that we wrap, over a radix cache that is watched.

    python drive_scheduler.py WORK_FOLDER

What needs a GPU or another process (the model, the tokenizer, metrics) is a stand-in that answers anything. Prints one
line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parent))

from real_sglang import make  # type: ignore[import-not-found]  # before SGLang: it declares what torchvision lacks
from sglang.srt.managers import scheduler as module
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from engine_shim import MapReader
from engine_shim.adapters import sglang as adapter

REQUESTS, TOKENS, ROUNDS = 3, 9, 20


class Request:
    """As much of SGLang's as its loops look at."""

    finished = Req.finished
    beam_group = None

    def __init__(self, allocator: Any) -> None:
        self.finished_reason: Any = None
        self._allocator = allocator
        self._slots = [allocator.alloc(5)]

    def decode(self) -> None:
        if self.finished():
            return
        self._slots.append(self._allocator.alloc(1))
        if len(self._slots) == TOKENS:
            for slots in self._slots:
                self._allocator.free(slots)
            self.finished_reason = FINISH_LENGTH(TOKENS)


class Scheduler(module.Scheduler):  # type: ignore[misc]
    """SGLang's, whose loops, results and rest are its own; it is asked for work so many times, and then ends."""

    def __init__(self, allocator: Any, *, overlap: bool, pause_at: int) -> None:
        self.enable_overlap = overlap
        self._pause_at = pause_at
        self.gracefully_exit = self._engine_paused = False
        self.running_batch = ScheduleBatch(reqs=[Request(allocator) for _ in range(REQUESTS)])
        self.running_batch.forward_mode = ForwardMode.DECODE
        self.last_batch = self.chunked_req = None
        self.waiting_queue: list[Any] = []
        self.steps = self.rounds = 0
        self.batch_result_processor = MagicMock(process_batch_result_decode=self._decode)
        self.is_fully_idle = lambda: False  # else on_idle holds a pool without a server's tables to be a leak

    def __getattr__(self, name: str) -> Any:
        stand_in = MagicMock()
        setattr(self, name, stand_in)
        return stand_in

    def ingest_requests(self) -> None:
        self.rounds += 1
        self.gracefully_exit = self.rounds >= ROUNDS
        self._engine_paused = self.rounds >= self._pause_at

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        running_batch.filter_batch()
        batch = None if running_batch.is_empty() else running_batch
        return module.NextBatchPlan(batch_to_run=batch, running_batch=running_batch)

    def is_disable_overlap_for_batch(self, *_: Any, **__: Any) -> bool:
        return False

    def _record_step_counters(self, *_: Any) -> None: ...

    def _maybe_clear_mm_inputs(self, *_: Any) -> None: ...

    def maybe_send_health_check_signal(self) -> None: ...

    def publish_load_snapshot(self, **_: Any) -> None: ...

    def run_batch(self, *_: Any) -> Any: ...

    def launch_batch_sample_if_needed(self, *_: Any) -> None: ...

    def _apply_war_barrier(self) -> None: ...

    def _decode(self, batch: Any, _: Any) -> None:
        self.steps += 1
        for request in batch.reqs:
            request.decode()


def served(*, overlap: bool, pause_at: int = ROUNDS + 1) -> dict[str, Any]:
    """What the map says when the loop has gone on without work; after the first step it is published at once or not."""
    os.environ["KVATLAS_SGLANG_PUBLISH_MS"] = "3600000"
    tree = make("token", 6_000)
    one = adapter.attach(tree)
    assert one is not None
    one._published -= 2 * 3600
    scheduler = Scheduler(tree.token_to_kv_pool_allocator, overlap=overlap, pause_at=pause_at)
    loop = scheduler.event_loop_overlap if overlap else scheduler.event_loop_normal
    loop()
    shown = MapReader(one.pools[0].map.path).read()
    report = {
        "running": shown.running_requests,
        "waiting": shown.waiting_requests,
        "used": int(shown.state_counts[2]),
        "steps": [shown.counters["steps"], scheduler.steps],
        "rounds": scheduler.rounds,
        "reason": one.reason,
    }
    one.stop("the next one begins")
    return report


if __name__ == "__main__":
    logging.getLogger("kvatlas.shim").setLevel(logging.ERROR)
    module.flush_trace_batch = lambda _: None
    wrapped = ("process_batch_result", "on_idle", "_record_scheduler_state_for_paused_engine")
    results = {
        "normal": served(overlap=False),
        "overlap": served(overlap=True),
        "paused": served(overlap=False, pause_at=5),
        "wrapped": [name for name in wrapped if hasattr(getattr(module.Scheduler, name), "__kvatlas__")],
    }
    print("RESULT " + json.dumps(results), flush=True)
