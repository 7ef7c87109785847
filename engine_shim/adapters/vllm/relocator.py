"""Relocating allocation in vLLM: evicts exactly what vLLM would, and keeps what is in use together at low addresses.

Everything is done *before* vLLM's own methods run, and then they run as they are. The blocks that `get_new_blocks` is
about to take stand at the front of the free queue; their prefixes are evicted, as vLLM would, and then blocks at low
addresses take their places in the queue, each giving its own prefix, and its own place in the order of eviction, to the
block whose place it takes. A prefix hit changes places with a lower block before vLLM touches it. Only blocks that
nobody references change places, so no block table changes, and no worker is told but of the copies, which ride with the
step that is being scheduled, as vLLM's own copies on write do.

The hooks stand inside those of observation and do not go with them: a copy that was promised is delivered, whatever
befalls the rest of us within the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method
from engine_shim.adapters.vllm.block_copies import Copy, StepCopies
from engine_shim.adapters.vllm.contents import exchange, forget, unreferenced
from engine_shim.adapters.vllm.placement import EMPTY, PREFIX, TAKEN, Placement

log = logging.getLogger("kvatlas.shim")

BYTES_A_STEP = 256 << 20  # copied with one step at most; the gather needs as much memory beside the pool

Evicted = Callable[[Sequence[int]], None]
Moved = Callable[[Sequence[int], Sequence[int], int], None]


class Relocator:
    """Relocating allocation for one scheduler's pool, switched on and off at any step boundary.

    `on_evicted` is called when prefixes were evicted, with those that vLLM's own methods did not evict;
    `on_moved(sources, destinations, more)` when prefixes changed their blocks, with `more` copies beyond one each (of
    two prefixes that changed places); `on_failed` when it has gone off for good, and `reason` then says why.

    Beside a KV connector hits stay where they are. One that is moved leaves its old block to be handed out in the same
    step, maybe for the connector to fill, which may happen before the step's copies have read it.
    """

    def __init__(
        self,
        scheduler: Any,
        block_bytes: int,
        *,
        bytes_a_step: int = BYTES_A_STEP,
        on_evicted: Evicted = lambda blocks: None,
        on_moved: Moved = lambda sources, destinations, more: None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self._queue = self._pool.free_block_queue
        self.on_evicted, self.on_moved, self._on_failed = on_evicted, on_moved, on_failed
        self.reason = ""
        self.copied = 0  # blocks, since the start
        self._pulls = scheduler.connector is None
        self._limit = bytes_a_step // max(1, block_bytes)
        self._left = self._limit
        self._on = False
        self._wanted = False
        self._in_step = False
        self._stopping = False
        self._loading = False  # blocks are being handed out for a connector to fill
        self._placement = Placement(len(self._pool.blocks))
        self._copies = StepCopies()
        self._hooks = Hooks()

    @property
    def on(self) -> bool:
        """Does it relocate, or will from the next step on?"""
        return self._wanted and not self.reason

    def install(self) -> None:
        """Put the hooks on, before those of observation. Until it is switched on they pass everything through."""
        pool, cache, coordinator, wrap = self._pool, self._cache, self._cache.coordinator, self._hooks.wrap
        wrap(cache, "take_kv_cache_block_copies", self._around_take)
        wrap(pool, "get_new_blocks", self._around_get_new_blocks)
        wrap(pool, "free_blocks", self._around_free_blocks)
        wrap(pool, "touch", self._around_touch)
        wrap(coordinator, "allocate_new_computed_blocks", self._around_hits)
        for manager in coordinator.single_type_managers:
            wrap(manager, "allocate_external_computed_blocks", self._around_loading)
        wrap(cache, "new_step_starts", self._around_step)

    def switch(self, on: bool) -> None:
        """Relocate, or do not, from the next step on."""
        self._wanted = on

    def stop(self, reason: str) -> None:
        """Relocate no more, and take the hooks off once what was promised is delivered."""
        self.reason = self.reason or reason
        self._on = False
        self._stopping = True
        if not self._in_step:
            self._hooks.remove_all()

    def _failed(self, what: str, error: BaseException) -> None:
        self._on = False
        if self.reason:
            return
        self.reason = f"{what}: {error!r}"
        log.error("%s; relocating allocation is off, vLLM allocates by itself: %r", what, error)
        try:
            self._on_failed()
        except Exception as second:  # noqa: BLE001 - it is off already, and the log has said so
            log.error("that relocating allocation is off could not be shown: %r", second)

    # The hooks. What is done for vLLM's sake stands outside of any guard and cannot fail; what is ours is guarded.

    def _around_step(self, hook: Hook) -> Method:
        def new_step_starts() -> Any:
            result = hook.inner()
            self._in_step = True
            try:
                if self.on != self._on:
                    self._begin() if self.on else self._end()
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                self._failed("it could not be switched", error)
            return result

        return new_step_starts

    def _around_take(self, hook: Hook) -> Method:
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

        copies = self._copies

        def take_kv_cache_block_copies() -> Any:
            taken = hook.inner()
            self._in_step = False
            if len(copies):
                others, retained = taken
                others = [KVCacheBlockCopy(source, destination) for source, destination in copies.drain(others)]
                taken = others, retained
            self._left = self._limit
            if self._stopping:
                self._hooks.remove_all()
            return taken

        return take_kv_cache_block_copies

    def _around_get_new_blocks(self, hook: Hook) -> Method:
        copies, placement = self._copies, self._placement

        def get_new_blocks(num_blocks: int) -> Any:
            ours = self._on and self._in_step
            if ours:
                try:
                    self._make_room(num_blocks)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self._failed("blocks could not be chosen", error)
            blocks = hook.inner(num_blocks)
            if self._on or copies:
                ids = [block.block_id for block in blocks]
                copies.forget(ids)
                placement.taken(ids)
                if ours and num_blocks > 1:
                    blocks.sort(key=_number)
            return blocks

        return get_new_blocks

    def _around_free_blocks(self, hook: Hook) -> Method:
        pool, mark = self._pool, self._placement.mark

        def free_blocks(ordered_blocks: Any) -> Any:
            if not self._on:
                return hook.inner(ordered_blocks)
            blocks = list(ordered_blocks)
            result = hook.inner(blocks)
            for block in blocks:
                if not block.ref_cnt and block.pool is pool:
                    mark(block.block_id, _mark_of(block))
            return result

        return free_blocks

    def _around_touch(self, hook: Hook) -> Method:
        def touch(blocks: Any) -> Any:
            result = hook.inner(blocks)
            if self._on:
                self._placement.taken(map(_number, blocks))
            return result

        return touch

    def _around_loading(self, hook: Hook) -> Method:
        """A connector may fill these blocks before the step's copies have read what they held: they are taken from
        those that hold nothing, or else where vLLM would take them."""

        def allocate_external_computed_blocks(*args: Any, **kwargs: Any) -> Any:
            self._loading = True
            try:
                return hook.inner(*args, **kwargs)
            finally:
                self._loading = False

        return allocate_external_computed_blocks

    def _around_hits(self, hook: Hook) -> Method:
        def allocate_new_computed_blocks(request_id: str, new_computed_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            if self._on and self._in_step and self._pulls and any(new_computed_blocks):
                try:
                    new_computed_blocks = self._pull(new_computed_blocks)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self._failed("hits could not be moved", error)
            return hook.inner(request_id, new_computed_blocks, *args, **kwargs)

        return allocate_new_computed_blocks

    # What is relocated

    def _begin(self) -> None:
        self._placement.mark_all(bytes(map(_mark_of, self._pool.blocks)))
        self._on = True

    def _end(self) -> None:
        self._on = False

    def _make_room(self, count: int) -> None:
        """Bring the blocks that are to be handed out to the front of the queue."""
        pool, queue, blocks = self._pool, self._queue, self._pool.blocks
        if not 0 < count <= queue.num_free_blocks or pool._reuse_watchers:
            return
        victims = list(islice(queue.iter_blocks_after(None), count))
        numbers = [block.block_id for block in victims]
        chosen = self._placement.choose(numbers, queue.num_free_blocks, 0 if self._loading else self._left)
        stay = set(chosen).intersection(numbers)
        incoming = [block for block in chosen if block not in stay]
        homes = sorted(block for block in numbers if block not in stay)
        if not all(unreferenced(blocks[number]) for number in incoming) or (
            self._loading and not self._hold_nothing(incoming)
        ):
            self.look_again([*chosen, *numbers])
            return
        pairs = list(zip(incoming, homes, strict=True))
        copies = [pair for pair in pairs if blocks[pair[0]].block_hash is not None]
        for victim in victims:
            pool._maybe_evict_cached_block(victim)
        if pairs:
            self.on_evicted(())
            self._exchange(pairs, copies, 0)

    def _hold_nothing(self, numbers: Sequence[int]) -> bool:
        """May these be written to before the copies of this step are made?"""
        blocks, read = self._pool.blocks, self._copies.sources()
        return all(blocks[number].block_hash is None and number not in read for number in numbers)

    def _pull(self, groups: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The hits of one request, in all groups, where they lie after those that lay too high have been moved down."""
        pool, blocks = self._pool, self._pool.blocks
        every = dict.fromkeys(block.block_id for group in groups for block in group if not block.is_null)
        hits = [number for number in every if unreferenced(blocks[number])]
        if not hits or pool._reuse_watchers:
            return groups
        pairs = self._placement.choose_lower(hits, self._queue.num_free_blocks, self._left, every)
        if not all(unreferenced(blocks[place]) for _, place in pairs):
            self.look_again([place for _, place in pairs])
            return groups
        if not pairs:
            return groups
        moved = dict(pairs)
        lower = tuple([blocks[moved.get(block.block_id, block.block_id)] for block in group] for group in groups)
        both = [(place, hit) for hit, place in pairs if blocks[place].block_hash is not None]
        self._exchange(pairs, [*pairs, *both], len(both))
        return lower

    def _exchange(self, pairs: Sequence[Copy], copies: Sequence[Copy], more: int) -> None:
        """Let the blocks of each pair change places, and have the copies made with this step; the last `more` of them
        are the ways back. Where that breaks off, and it raises, nothing is copied: each block then holds what it held,
        and vLLM knows no prefix by any of them. Otherwise it does not raise."""
        pool, blocks = self._pool, self._pool.blocks
        change = self._copies.composed(copies)
        known = [number for pair in pairs for number in pair if blocks[number].block_hash is not None]
        try:
            for one, other in pairs:
                exchange(pool, blocks[one], blocks[other])
        except BaseException:
            forget(pool, [blocks[number] for pair in pairs for number in pair])
            self.on_evicted(known)
            raise
        self._copies.apply(change)
        try:
            self._left -= len(copies)
            self.copied += len(copies)
            self.look_again([number for pair in pairs for number in pair])
            if told := copies[: len(copies) - more]:
                self.on_moved([source for source, _ in told], [place for _, place in told], more)
        except Exception as error:  # noqa: BLE001 - the contents have moved, and whoever asked must hear where they are
            self._failed("what was relocated could not be noted", error)

    def look_again(self, numbers: Collection[int]) -> None:
        """These blocks are not what they were: the hooks have not seen why."""
        for number in numbers:
            self._placement.mark(number, _mark_of(self._pool.blocks[number]))


def _number(block: Any) -> int:
    return int(block.block_id)


def _mark_of(block: Any) -> int:
    if not unreferenced(block):
        return TAKEN
    return EMPTY if block.block_hash is None else PREFIX
