"""The entry point that vLLM calls in each of its processes, possibly more than once.

It must not raise, whatever happens: vLLM stops where a plugin does. All it does is to leave a note on vLLM's settings
class, which is loaded in every process: when an engine core asks for its scheduler's class, that class gets a hook on
its construction. Processes that never make a scheduler (API servers, workers) thus pay nothing and publish nothing, and
a forked engine core inherits the note.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from engine_shim.adapters.opening import disabled, name_the_speaker
from engine_shim.adapters.vllm.attachment import Attachment
from engine_shim.adapters.vllm.shape import SUPPORTED, examine

log = logging.getLogger("kvatlas.shim")

_MARK = "__kvatlas__"
_attachments: list[Attachment] = []


def register() -> None:
    """vLLM's entry point. Idempotent; never raises. With KVATLAS_DISABLE=1 it leaves no trace."""
    try:
        if disabled(os.environ):
            return
        name_the_speaker()
        from vllm.config.scheduler import SchedulerConfig

        stock = SchedulerConfig.get_scheduler_cls
        if not hasattr(stock, _MARK):
            SchedulerConfig.get_scheduler_cls = _watching(stock)
            atexit.register(_close_maps)
    except Exception as error:  # noqa: BLE001 - a plugin that raises stops vLLM
        _give_up(repr(error))


def attachments() -> tuple[Attachment, ...]:
    """The engine cores of this process that are watched now."""
    return tuple(one for one in _attachments if not one.reason)


def turn_off(reason: str = "turned off") -> int:
    """Stop watching every engine core of this process, at its next step or at once where it idles; how many those are.
    From any thread."""
    watched = attachments()
    for one in watched:
        one.turn_off(reason)
    return len(watched)


def attach(scheduler: Any, environment: Mapping[str, str] = os.environ) -> Attachment | None:
    """Watch a scheduler that was just made; None, and one log line, where that cannot be. Never raises."""
    one: Attachment | None = None
    try:
        if disabled(environment):
            return None
        import vllm

        findings = examine(scheduler)
        if findings.problems:
            what = "left out" if findings.pool else "nothing is watched"
            _give_up(f"{what}: {'; '.join(findings.problems)}", version=str(vllm.__version__))
        if not findings.pool:
            return None
        one = Attachment(scheduler, findings, str(vllm.__version__), environment, on_stopped=_forget)
        one.attach()
        if one.reason:  # no map: MapObserver has said why
            return None
        _watch_sleep()
        _watch_cores()
        _attachments.append(one)
    except Exception as error:  # noqa: BLE001 - vLLM must start whatever befalls us
        _give_up(repr(error))
        if one is not None:
            one.stop(repr(error))
        return None
    paths = ", ".join(str(watched.observer.path) for watched in one.pools)
    log.info("publishing vLLM's block pool to %s", paths)
    return one


def _forget(one: Attachment) -> None:
    """It holds its engine, which must be freed as it would be without us."""
    if one in _attachments:
        _attachments.remove(one)


def _close_maps() -> None:
    """An in-process engine may end with its process, without a shutdown of its own."""
    for one in attachments():
        one.stop("the process ended")


def _watching(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_scheduler_cls(self: Any) -> Any:
        found = stock(self)
        try:
            _watch_construction(found)
        except Exception as error:  # noqa: BLE001 - see `register`
            _give_up(repr(error))
        return found

    setattr(get_scheduler_cls, _MARK, True)
    return get_scheduler_cls


def _watch_construction(scheduler_class: Any) -> None:
    stock = vars(scheduler_class).get("__init__")
    if stock is None:  # it has its parent's, which may be another scheduler's
        stock = scheduler_class.__init__
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if type(self) is scheduler_class:
            attach(self)

    setattr(construct, _MARK, True)
    scheduler_class.__init__ = construct


def _watch_sleep() -> None:
    """Hear of sleep and wake, which only executors know. Their class is loaded wherever a scheduler is made."""
    module = sys.modules.get("vllm.v1.executor.abstract")
    executor_class = getattr(module, "Executor", None)
    for name in ("sleep", "wake_up", "discard"):
        stock = getattr(executor_class, name, None)
        if stock is None or not hasattr(executor_class, "is_sleeping"):
            _give_up("sleep is left out: Executor.sleep, wake_up, discard or is_sleeping is missing")
            return
        if not hasattr(stock, _MARK):
            setattr(executor_class, name, _telling_of_sleep(stock))


def _telling_of_sleep(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _kv_asleep(self)
        result = stock(self, *args, **kwargs)
        after = _kv_asleep(self)
        if after != before:
            for one in attachments():
                if one.scheduler.vllm_config is getattr(self, "vllm_config", None):
                    try:
                        one.set_sleeping(after)
                    except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                        one.fault(error)
        return result

    setattr(change, _MARK, True)
    return change


def _watch_cores() -> None:
    """Get to know the engine core of each scheduler: its constructor is under way when the scheduler is made, so what
    is hooked is what it calls afterwards. It has the workers, and the queue that an idle one waits at."""
    module = sys.modules.get("vllm.v1.engine.core")
    for owner, name in (
        ("EngineCore", "step"),
        ("EngineCore", "step_with_batch_queue"),
        ("EngineCoreProc", "run_busy_loop"),
        ("DPEngineCoreProc", "run_busy_loop"),
    ):
        core_class = getattr(module, owner, None)
        stock = vars(core_class).get(name) if core_class is not None else None
        if callable(stock) and not hasattr(stock, _MARK):
            setattr(core_class, name, _naming_core(stock))


def _naming_core(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in tuple(_attachments):
            if one.steering.core is None and one.scheduler is getattr(self, "scheduler", None):
                one.steering.core = self
        return stock(self, *args, **kwargs)

    setattr(call, _MARK, True)
    return call


def _kv_asleep(executor: Any) -> bool:
    tags = getattr(executor, "sleeping_tags", None)
    return bool(executor.is_sleeping) if tags is None else "kv_cache" in tags


def _give_up(reason: str, *, version: str = "") -> None:
    log.warning(
        "vLLM%s is not watched, or only in part, and goes on: %s (tested with vLLM %s)",
        f" {version}" if version else "", reason, SUPPORTED,
    )  # fmt: skip
