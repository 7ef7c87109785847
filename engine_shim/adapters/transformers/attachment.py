"""Ties one batch processor to its maps: steps, requests, counters, and the ways to stop watching.

Everything here runs on the thread that generates, apart from `turn_off`, which any thread may call. A watched processor
is held by nothing outside of itself, so that it is freed as it would be without us; its maps go with it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method, after
from engine_shim.adapters.opening import open_map, whole_number
from engine_shim.adapters.transformers import identity
from engine_shim.adapters.transformers.audit import Audit
from engine_shim.adapters.transformers.blocks import BlockSpace
from engine_shim.adapters.transformers.requests import RequestBook
from engine_shim.adapters.transformers.sectors import SectorBook
from engine_shim.adapters.transformers.tap import AllocatorTap
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.switches import hash_request_ids

log = logging.getLogger("kvatlas.shim")

AUDIT_STEPS = 32  # steps from one look of the audit to the next
AUDIT_BLOCKS = 1024  # blocks of a table that it compares


class Attachment:
    """One batch processor under observation. `reason`: why nothing is watched any more, "" while it is."""

    def __init__(self, processor: Any, version: str, environment: Mapping[str, str]) -> None:
        self.hooks = Hooks()
        self.reason = ""
        self._processor = processor
        self._scheduler = processor.scheduler
        self._batch: Sequence[Any] = ()
        self._queues = (0, 0)  # as shown
        self._changes = -1  # likewise: the maps' first state is shown at once
        self._idle = True
        self._steps = 0
        self._asked_off = ""
        self._audit_steps = whole_number(environment, "KVATLAS_AUDIT_STEPS", AUDIT_STEPS)
        cache = processor.cache
        geometry = identity.measure(cache)
        spec = identity.describe(processor, geometry, version, environment)
        self.observer = open_map(spec)
        self.observers: tuple[MapObserver, ...] = (self.observer,)
        self._sectors: SectorBook | None = None
        if self.observer.path is None:
            self.reason = self.observer.reason
            return
        if geometry.has_tiers:
            tier = open_map(identity.describe_sectors(spec, geometry, int(cache.bytes_per_sector)))
            self.observers = (self.observer, tier)
            self._sectors = SectorBook(geometry.sectors, geometry.reserved_sectors, tier)
        self.book = RequestBook(self.observer, hash_ids=hash_request_ids(environment))
        self.book.spaces = tuple(
            BlockSpace(allocator, width, geometry.total_units // width, self.observer, self._sectors)
            for allocator, width in zip(cache.cache_allocators.values(), geometry.widths, strict=True)
        )
        self._audit = Audit(
            cache,
            geometry,
            self.observer,
            self.book.spaces,
            self._sectors,
            self.book,
            blocks_a_turn=max(1, whole_number(environment, "KVATLAS_AUDIT_BLOCKS", AUDIT_BLOCKS)),
        )
        # What is left of a processor that nobody stopped: its maps must not outlive it.
        self._last = weakref.finalize(processor, _close, self.observers)

    def attach(self) -> None:
        """Put the hooks on. What raises half-way is for the caller to undo with `stop`."""
        if self.reason:
            return
        self._audit.adopt()
        self._show(step=False)
        cache, wrap = self._processor.cache, self.hooks.wrap
        for space in self.book.spaces:
            AllocatorTap(space, self.book, self.observer, self.fault).install(self.hooks)
        wrap(cache, "can_store_request_tokens", self._around_can_store)
        wrap(cache, "free_blocks", self._after(self._blocks_freed))
        wrap(cache, "search_prefix_match", self._after(self._prefix_looked_up))
        wrap(self._scheduler, "schedule_batch", self._after(self._batch_scheduled))
        wrap(self._processor, "prepare_next_batch", self._after(self._prepared))
        wrap(self._processor, "update_batch", self._after(self._updated))
        wrap(self._processor, "fail_all_requests", self._after(lambda *_, **__: self._show(step=False)))
        if callable(getattr(self._processor, "reset", None)):
            wrap(self._processor, "reset", self._after(lambda *_, **__: self._show(step=False)))

    def watches(self, processor: Any) -> bool:
        """Is it this one?"""
        return processor is not None and self._processor is processor

    def turn_off(self, reason: str) -> None:
        """Stop watching at the next step, take every hook off and remove the maps. From any thread."""
        self._asked_off = reason or "turned off"

    def stop(self, reason: str, *, keep_maps: bool = False) -> None:
        """Take every hook off now, on the engine's thread. Idempotent. Kept maps are marked as degraded."""
        self.hooks.remove_all()
        if self.reason:
            return
        self.reason = reason
        for observer in self.observers:
            if keep_maps:
                observer.turn_off(reason)
            else:
                observer.close()

    def fault(self, error: BaseException) -> None:
        """Something of ours failed: the maps stay, marked as degraded, and Transformers goes on without us."""
        if not self.reason:
            log.error("observation stopped, Transformers goes on: %r", error)
        self.stop(repr(error), keep_maps=True)

    def _after(self, then: Callable[..., None]) -> Callable[[Hook], Method]:
        return after(then, self.fault)

    def _batch_scheduled(self, result: Any, *_: Any, **__: Any) -> None:
        self._batch = result[0] or ()

    def _prepared(self, found_work: bool, *_: Any, **__: Any) -> None:
        """The forward pass comes next, or nothing does. After an idle time the requests are shown before the pass, so
        that one that hangs is seen: they run, and no step ends."""
        if self._stopped():
            return
        batch, self._batch = self._batch, ()
        if not found_work:
            self._show(step=False)
            return
        if self._processor.cache.use_prefix_sharing:
            self._count_lookups(batch)
        self.book.scheduled(batch)
        if self._idle:
            self._show(step=False)
        self._idle = False

    def _updated(self, *_: Any, **__: Any) -> None:
        """A step is over: its tokens are known, what has ended is freed. A GPU is at work on the next one by now."""
        if self._stopped():
            return
        self._show(step=True)
        self._steps += 1
        if self._audit_steps and self._steps % self._audit_steps == 0 and self._audit.take_turn():
            self._show(step=False)

    def _show(self, *, step: bool) -> None:
        """Publish everything so far; a step counts as one. Between steps only where something changed."""
        running, waiting = len(self._scheduler.active_requests), len(self._scheduler.waiting_requests)
        self._idle = not running
        if self._sectors is not None:
            self._sectors.settle()
        changes = sum(space.changes for space in self.book.spaces)
        changed = changes != self._changes or self._queues != (running, waiting)
        for observer in self.observers:
            if step:
                observer.step_ended(running, waiting)
            elif changed:
                observer.queues_changed(running, waiting)
        self._queues, self._changes = (running, waiting), changes

    def _stopped(self) -> bool:
        if self._asked_off and not self.reason:
            log.warning("turned off: %s", self._asked_off)
            self.stop(self._asked_off)
        return bool(self.reason)

    def _around_can_store(self, hook: Hook) -> Method:
        """Called for every candidate in every step, and of interest where it says no: hence a wrapper of its own."""

        def can_store_request_tokens(*args: Any, **kwargs: Any) -> Any:
            stored = hook.inner(*args, **kwargs)
            if not stored:
                try:
                    self._not_stored(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self.fault(error)
            return stored

        return can_store_request_tokens

    def _not_stored(self, state: Any, request_len: int, dry_run: bool = False, *_: Any, **__: Any) -> None:
        if not dry_run:
            self.observer.counted("allocation_failures")

    def _blocks_freed(self, _: Any, request_id: str, no_cache: bool = False, *__: Any, **___: Any) -> None:
        if no_cache:  # only for a request that makes room for others
            self.observer.counted("preemptions")

    def _prefix_looked_up(self, found: int, request_id: str, prompt_ids: Sequence[int], *_: Any, **__: Any) -> None:
        if found:
            self.observer.counted("prefix_query_tokens", len(prompt_ids))
            self.observer.counted("prefix_hit_tokens", int(found))

    def _count_lookups(self, batch: Sequence[Any]) -> None:
        """A request that starts at its first token has asked in vain; it may have done so in several steps."""
        for future in batch:
            if int(future.state.position_offset) == int(future.query_length):
                self.observer.counted("prefix_query_tokens", len(future.state.initial_tokens))


def _close(observers: Sequence[MapObserver]) -> None:
    for observer in observers:
        observer.close()
