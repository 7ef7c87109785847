"""Whether live blocks of this vLLM may be moved: the setting, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine_shim.adapters.vllm import worker_moves
from engine_shim.adapters.vllm.allocation import unknown_shape
from engine_shim.adapters.vllm.identity import runner_class
from engine_shim.switches import switch

NOT_ASKED = "vLLM was started without KVATLAS_VLLM_COMPACTION=1"

# Whose tables name every block that a request reads, and nothing else does.
_MANAGERS = ("FullAttentionManager", "SlidingWindowManager")
_EXECUTORS = ("UniProcExecutor", "MultiprocExecutor")


def compaction_asked(environment: Mapping[str, str]) -> bool:
    """KVATLAS_VLLM_COMPACTION."""
    return switch(environment, "KVATLAS_VLLM_COMPACTION")


def action_for(refusal: str) -> str:
    """What whoever asked for moves can do about one of these reasons."""
    if refusal == NOT_ASKED:
        return "set it and start vLLM again; docs/vllm.md says what it allows"
    return "docs/vllm.md lists what moves of live blocks are refused for; relocating allocation may still be possible"


def compaction_refusal(scheduler: Any) -> str:
    """Why live blocks of this engine cannot be moved; "" where they can. Touches nothing."""
    config, cache = scheduler.vllm_config, scheduler.kv_cache_manager
    parallel = config.parallel_config
    managers = cache.coordinator.single_type_managers
    others = sorted({type(one).__name__ for one in managers} - set(_MANAGERS))
    runner = runner_class(config)
    checks = (
        (scheduler.connector is not None, "a KV connector is configured, and may keep block numbers of its own"),
        (getattr(scheduler, "ec_connector", None) is not None, "an encoder cache connector is configured"),
        (bool(others), f"there are groups that are not proven: {', '.join(others)}"),
        (config.speculative_config is not None, "speculative decoding is on"),
        (
            int(parallel.decode_context_parallel_size) > 1 or int(parallel.prefill_context_parallel_size) > 1,
            "context parallel spreads a block over ranks",
        ),
        (int(parallel.pipeline_parallel_size) > 1, "it is not proven with pipeline parallel"),
        (f"vllm.v1.worker.{runner}" not in worker_moves.RUNNERS, f"it is not proven for the runner {runner}"),
        (
            getattr(config.attention_config, "hisparse_config", None) is not None,
            "HiSparse reads blocks that nobody references",
        ),
        (
            type(cache.block_pool).__name__ != "BlockPool"
            or any(m.block_pool is not cache.block_pool for m in managers),
            "several pools serve one request",
        ),
        (
            not type(scheduler).__module__.startswith("vllm.v1.core.sched."),
            f"{type(scheduler).__module__} is not vLLM's own scheduler",
        ),
    )
    return next((reason for found, reason in checks if found), "") or unknown_shape(cache)


class Readiness:
    """What may change while the engine runs: asked before each chunk, and cheap."""

    def __init__(self, scheduler: Any, core: Callable[[], Any]) -> None:
        """`core` gives vLLM's engine core, None before it was seen."""
        self._scheduler, self._core = scheduler, core
        self._probed: str | None = None
        self.asleep = False

    def refusal(self) -> str:
        """Why nothing may move now, "" where it may."""
        executor = getattr(self._core(), "model_executor", None)
        if executor is None:
            return "the engine core has not begun to step yet; ask again"
        if self.asleep:
            return "the engine sleeps, and its KV memory is given back"
        if getattr(self._scheduler, "num_waiting_for_streaming_input", 0):
            return "a streaming session waits for input, and holds blocks meanwhile"
        if self._probed is None:
            self._probed = _probe(executor)
        return self._probed


def _probe(executor: Any) -> str:
    names = {one.__name__ for one in type(executor).__mro__}
    if names.isdisjoint(_EXECUTORS):
        return f"it is not proven with {type(executor).__name__}"
    return next((answer for answer in worker_moves.ask(executor, "probe") if answer), "")
