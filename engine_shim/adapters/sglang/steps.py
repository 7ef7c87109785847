"""Hears of the steps of SGLang's scheduler, and of its loop going round without one.

Its non-overlapping loop (`--disable-overlap-schedule`) takes a request that has finished out of the running batch only
when it looks for the next batch, and where there is none it ends no further step. So those that have finished are not
counted, and what the last step left is published when the loop finds nothing to run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from engine_shim.adapters.sglang.attachment import Attachment

MARK = "__kvatlas__"
STEP = "process_batch_result"
IDLE = "on_idle"
PAUSED = "_record_scheduler_state_for_paused_engine"  # all that the loop calls between pause and continue

Attachments = Callable[[], Iterable[Attachment]]
Tell = Callable[[Attachment], None]


def watch_steps(attachments: Attachments) -> None:
    """Tell of each step, where there is a scheduler: its module is loaded wherever one is made. Idempotent."""
    scheduler_class = getattr(sys.modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    for name, telling in ((STEP, _telling_of_steps), (IDLE, _telling_of_rest), (PAUSED, _telling_of_pauses)):
        stock = getattr(scheduler_class, name, None)
        if callable(stock) and not hasattr(stock, MARK):
            wrapper = functools.wraps(stock)(telling(stock, attachments))
            setattr(wrapper, MARK, True)
            setattr(scheduler_class, name, wrapper)


def anybody_runs(*batches: Any) -> bool:
    """Has a request of these batches not finished? Asked at every step; the first one tells, as a rule."""
    for batch in batches:
        for request in batch.reqs:
            if not request.finished():
                return True
    return False


def count_running(*batches: Any) -> int:
    """Requests of these batches that have not finished, each once."""
    return sum(not request.finished() for request in {*chain.from_iterable(batch.reqs for batch in batches)})


def _telling_of_steps(stock: Callable[..., Any], attachments: Attachments) -> Callable[..., Any]:
    def process_batch_result(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, batch, *args, **kwargs)

        # A batch whose prompts have just been read joins the running one with the next step.
        def tell(one: Attachment) -> None:
            running = self.running_batch
            one.step(anybody_runs(batch, running), len(self.waiting_queue), lambda: count_running(batch, running))

        _tell(attachments, tell)
        return result

    return process_batch_result


def _telling_of_rest(stock: Callable[..., Any], attachments: Attachments) -> Callable[..., Any]:
    def on_idle(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In front of SGLang's method, which may sleep for a second.
        _tell(attachments, lambda one: one.rest(count_running(self.running_batch), len(self.waiting_queue)))
        return stock(self, *args, **kwargs)

    return on_idle


def _telling_of_pauses(stock: Callable[..., Any], attachments: Attachments) -> Callable[..., Any]:
    def record_pause(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Nobody runs until the operator goes on: who is in the batch waits for that.
        _tell(attachments, lambda one: one.rest(0, len(self.waiting_queue) + count_running(self.running_batch)))
        return stock(self, *args, **kwargs)

    return record_pause


def _tell(attachments: Attachments, tell: Tell) -> None:
    for one in attachments():
        try:
            tell(one)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
            one.fault(error)
