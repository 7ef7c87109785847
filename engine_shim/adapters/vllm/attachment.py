"""Ties one vLLM scheduler to its maps: steps, requests, connector holds, sleep, and the ways to stop watching.

Everything here runs on the engine core's own thread, apart from `turn_off`, which any thread may call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method, after
from engine_shim.adapters.opening import whole_number
from engine_shim.adapters.vllm import identity
from engine_shim.adapters.vllm.shape import Findings
from engine_shim.adapters.vllm.steering import Steering
from engine_shim.adapters.vllm.watched_pool import WatchedPool

log = logging.getLogger("kvatlas.shim")

AUDIT_STEPS = 32  # steps from one part of the audit to the next


class Attachment:
    """One scheduler under observation, from `attach` to `stop`. `reason`: why nothing is watched, "" while it is."""

    def __init__(
        self,
        scheduler: Any,
        findings: Findings,
        version: str,
        environment: Mapping[str, str],
        *,
        on_stopped: Callable[[Attachment], None] = lambda one: None,
    ) -> None:
        """`on_stopped` hears, once, that this scheduler is watched no more."""
        self.scheduler = scheduler
        self.findings = findings
        self.hooks = Hooks()
        self.pools: list[WatchedPool] = []
        self.reason = ""
        self.steering = Steering(scheduler, environment, turn_off=self._ask_off, stop_if_asked=self.stop_if_asked)
        self._on_stopped = on_stopped
        self._version = version
        self._environment = environment
        self._audit_steps = whole_number(environment, "KVATLAS_AUDIT_STEPS", AUDIT_STEPS)
        self._steps = 0
        self._devices_named = False
        self._counts: Mapping[str, int] | None = None  # tokens by request of a step that is not shown yet
        self._running_shown = 0
        # vLLM asks for this in each step, right after it has started the forward pass.
        self._sees_dispatch = callable(getattr(scheduler, "get_grammar_bitmask", None))
        self._asked_off = ""
        self._loading: dict[str, Any] = {}  # requests whose blocks a connector is filling

    def attach(self) -> None:
        """Make the maps and put the hooks on. What raises half-way is for the caller to undo with `stop`."""
        self._open_maps()
        if all(watched.observer.path is None for watched in self.pools):
            self.stop(self.pools[0].observer.reason or "no map could be made")
            return
        self.steering.prepare(self.pools[0])  # its hooks stand inside of those of observation
        self._install()

    def turn_off(self, reason: str) -> None:
        """Stop watching at the next step, or at once where the engine core idles: take every hook off and remove the
        maps. From any thread."""
        self._ask_off(reason)
        self.steering.wake()

    def _ask_off(self, reason: str) -> None:
        self._asked_off = reason or "turned off"

    def stop_if_asked(self) -> None:
        """Stop now where `turn_off` was called, on the engine's thread."""
        if self._asked_off and not self.reason:
            log.warning("turned off: %s", self._asked_off)
            self.stop(self._asked_off)

    def stop(self, reason: str, *, keep_maps: bool = False) -> None:
        """Take every hook off now, on the engine's thread. Idempotent. Kept maps are marked as degraded."""
        self.hooks.remove_all()
        self.steering.stop(reason)
        if self.reason:
            return
        self.reason = reason
        for watched in self.pools:
            if keep_maps:
                watched.observer.turn_off(reason)
            else:
                watched.observer.close()
        self._on_stopped(self)

    def fault(self, error: BaseException) -> None:
        """Something of ours failed: the maps stay, marked as degraded, and vLLM goes on without us."""
        if not self.reason:
            log.error("observation stopped, vLLM goes on: %r", error)
        self.stop(repr(error), keep_maps=True)

    def set_sleeping(self, sleeping: bool) -> None:
        """The KV memory was given back, or is there again: then the map is a new one, of the pool as it is now."""
        if sleeping:
            self.steering.sleeps()
            for watched in self.pools:
                watched.observer.set_flag(sleeping=True)
            return
        self.hooks.remove_all()
        self.steering.close()
        for watched in self.pools:
            watched.observer.close()
        self.pools.clear()
        self._loading.clear()
        self.attach()

    def _open_maps(self) -> None:
        self._devices_named = False
        scheduler = self.scheduler
        pools = [scheduler.kv_cache_manager.block_pool]
        if self.findings.requests:
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            pools += [manager.block_pool for manager in managers if manager.block_pool is not pools[0]]
        for number, pool in enumerate({id(pool): pool for pool in pools}.values()):
            name = f"kv-{number}" if number else "kv"
            spec = identity.describe(scheduler, pool, name, self._version, self._environment)
            watched = WatchedPool(scheduler, pool, spec, self.findings, self.fault, self._environment)
            self.pools.append(watched)

    def _install(self) -> None:
        scheduler, findings, wrap = self.scheduler, self.findings, self.hooks.wrap
        for watched in self.pools:
            watched.install(self.hooks)
        wrap(scheduler, "schedule", self._around_schedule)
        wrap(scheduler, "update_from_output", self._after(lambda *_, **__: self._output_processed()))
        if self._sees_dispatch:
            wrap(scheduler, "get_grammar_bitmask", self._after(lambda *_, **__: self._show_step()))
        wrap(scheduler, "finish_requests", self._after(lambda *_, **__: self._show_if_idle()))
        wrap(scheduler, "shutdown", self._after(lambda *_, **__: self.stop("the engine shut down")))
        wrap(scheduler, "_free_blocks", self._after(self._request_gone))
        if hasattr(scheduler, "reset_prefix_cache"):
            wrap(scheduler, "reset_prefix_cache", self._after(lambda *_, **__: self._show(step=False)))
        if findings.counters:
            cache = scheduler.kv_cache_manager
            wrap(cache, "allocate_slots", self._around_allocate_slots)
            wrap(cache, "record_prefix_cache_stats", self._after(self._prefix_looked_up))
            wrap(scheduler, "_preempt_request", self._after(lambda *_, **__: self._count("preemptions")))
        if findings.connector and scheduler.connector is not None:
            wrap(scheduler, "_free_request", self._after(self._maybe_kept))

    def _after(self, then: Callable[..., None]) -> Callable[[Hook], Method]:
        return after(then, self.fault)

    def _around_schedule(self, hook: Hook) -> Method:
        scheduled = self._after(lambda output, *_, **__: self._scheduled(output.num_scheduled_tokens))(hook)

        def schedule(*args: Any, **kwargs: Any) -> Any:
            try:
                self.steering.boundary()
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                self.fault(error)
            return scheduled(*args, **kwargs)

        return schedule

    def _scheduled(self, counts: Mapping[str, int]) -> None:
        """A step was scheduled. It is shown once its forward pass has been started, so that a GPU need not wait for it;
        at once, where the map says that nothing runs: an engine that then hangs must not look idle."""
        self.stop_if_asked()
        self._show_step()  # one that was never dispatched
        self._counts = counts
        if not self._running_shown or not self._sees_dispatch:
            self._show_step()

    def _show_step(self) -> None:
        counts, self._counts = self._counts, None
        if counts is None or self.reason:
            return
        if self._loading:
            self._release_loaded()
        for watched in self.pools:
            if watched.book is not None:
                watched.book.scheduled(counts)
        self._show(step=bool(counts))
        self._steps += 1
        if not self._devices_named:
            self._name_devices()
        if self._audit_steps and self._steps % self._audit_steps == 0:
            self._audit()

    def _output_processed(self) -> None:
        self._show_step()
        self._show_if_idle()

    def _audit(self) -> None:
        for watched in self.pools:
            repairs = watched.audit.take_turn()
            lost = 0 if watched.book is None else watched.book.sweep()
            if repairs or lost:
                watched.observer.publish()

    def _show_if_idle(self) -> None:
        """With nothing left to run, no step will come that would show the last blocks going back."""
        if not self.scheduler.running:
            self._show(step=False)

    def _show(self, *, step: bool) -> None:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(getattr(scheduler, "kv_holding_waiting", ()))
        self._running_shown = len(scheduler.running)
        for watched in self.pools:
            watched.show(len(scheduler.running), waiting, step=step)
            if watched.observer.failed:  # it has said why; hooks that tell nobody are only in vLLM's way
                self.stop(watched.observer.reason, keep_maps=True)
                return

    def _name_devices(self) -> None:
        """Once a map, and not before its first step: a driver may take its time, and the engine has started by then."""
        self._devices_named = True
        try:
            uuids = identity.gpu_uuids(self.scheduler.vllm_config)
        except Exception as error:  # noqa: BLE001 - whatever a driver says, the map is whole without
            log.info("the devices of this engine are not named in its map: %r", error)
            return
        if uuids:
            for watched in self.pools:
                watched.observer.set_gpu_uuids(uuids)

    def _count(self, name: str, amount: int = 1) -> None:
        self.pools[0].observer.counted(name, amount)

    def _around_allocate_slots(self, hook: Hook) -> Method:
        """Called for every running request in every step, and of interest in few: hence a wrapper of its own."""

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = hook.inner(request, *args, **kwargs)
            if result is None or kwargs.get("delay_cache_blocks"):
                try:
                    self._slots_asked_for(result, request)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self.fault(error)
            return result

        return allocate_slots

    def _slots_asked_for(self, result: Any, request: Any) -> None:
        if result is None:
            self._count("allocation_failures")
        else:  # a connector fills them in later steps
            name = request.request_id
            self._loading[name] = request
            for watched in self.pools:
                watched.keep(name)

    def _release_loaded(self) -> None:
        for name, request in list(self._loading.items()):
            if request.status.name != "WAITING_FOR_REMOTE_KVS" or name not in self.scheduler.requests:
                del self._loading[name]
                if name in self.scheduler.requests:
                    for watched in self.pools:
                        watched.pins.release(name)

    def _prefix_looked_up(self, _: Any, request: Any, num_hits: int, *__: Any, **___: Any) -> None:
        cache = self.scheduler.kv_cache_manager
        if getattr(cache, "prefix_cache_lookup_enabled", lambda _: True)(request):
            self._count("prefix_query_tokens", int(request.num_tokens))
            self._count("prefix_hit_tokens", int(num_hits))

    def _maybe_kept(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """The request is over; where vLLM still knows it, a connector is reading its blocks."""
        name = request.request_id
        if name in self.scheduler.requests:
            for watched in self.pools:
                watched.keep(name)

    def _request_gone(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        name = request.request_id
        for watched in self.pools:
            watched.pins.release(name)
            if watched.book is not None:
                watched.book.ended(name)
