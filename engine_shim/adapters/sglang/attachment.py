"""Ties one radix cache and its allocators to their maps. Everything here runs on the scheduler's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim.adapters.hooks import Hook, Hooks, Method, after
from engine_shim.adapters.opening import engine_id, open_writer, whole_number
from engine_shim.adapters.sglang.indices import Copier, as_numbers
from engine_shim.adapters.sglang.shape import pools_of, release_method
from engine_shim.adapters.sglang.slot_pool import Note, SlotPool, Told
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.allocation_map.writer import MapSpec

log = logging.getLogger("kvatlas.shim")

PUBLISH_MS = 100
REST_SECONDS = 0.1  # between two publishes while nothing runs and no step has ended


class Attachment:
    """One radix cache under observation. `reason`: why nothing is watched any more, "" while it is."""

    def __init__(
        self,
        tree: Any,
        version: str,
        environment: Mapping[str, str],
        copier: Copier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hooks = Hooks()
        self.reason = ""
        self._tree = tree
        self._asked_off = ""
        self._clock = clock
        self._publish_seconds = whole_number(environment, "KVATLAS_SGLANG_PUBLISH_MS", PUBLISH_MS) / 1000
        self._published = clock()
        self._steps = 0  # since then
        self._told = (0, 0)  # running and waiting, at that time
        allocator = tree.token_to_kv_pool_allocator
        self._allocators = pools_of(allocator)
        self._mapping_of = allocator if len(self._allocators) > 1 else None
        names = ("kv",) if len(self._allocators) == 1 else ("kv-full", "kv-sliding")
        model = environment.get("KVATLAS_MODEL", "") or "sglang"
        self.pools: list[SlotPool] = []
        for one, name in zip(self._allocators, names, strict=True):
            pages, tokens = int(one.size) // int(one.page_size), int(one.page_size)
            spec = MapSpec(
                engine_id=engine_id(model, environment),
                kind="sglang",
                version=version,
                runner=type(one).__name__,
                model=model,
                pool=name,
                total_blocks=pages + 1,
                block_tokens=tokens,
                block_bytes=_page_bytes(one, tokens),
                dtype=str(getattr(one, "dtype", "")).removeprefix("torch."),
                medium=str(getattr(one, "device", "cpu")).partition(":")[0],
                policy="sglang",
                columns=("state",),
                owner_slots=1,
                events_per_second=1,
            )
            writer, self.reason = open_writer(spec)
            if writer is None:
                self._close_maps()
                return
            self.pools.append(SlotPool(tokens, StateMap(writer), copier))

    def attach(self) -> None:
        """Put the hooks on. What raises half-way is for the caller to undo with `stop`."""
        if self.reason:
            return
        self._adopt()
        wrap = self.hooks.wrap
        for allocator, pool in zip(self._allocators, self.pools, strict=True):
            for name in ("alloc", "alloc_extend", "alloc_decode"):
                if callable(getattr(allocator, name, None)):
                    wrap(allocator, name, self._taking(pool))
            wrap(allocator, "clear", self._after(lambda *_, pool=pool, **__: pool.note(Note.CLEAR)))
            wrap(allocator, release_method(allocator) or "free", self._giving_back(allocator, pool))
        wrap(self._tree, "inc_lock_ref", self._locking(0, Note.LOCK))
        wrap(self._tree, "dec_lock_ref", self._locking(1, Note.LET_GO))
        wrap(self._tree, "_insert_helper", self._inserting)

    def step(self, running: int, waiting: int, count: Callable[[], int] | None = None) -> None:
        """The end of one of the scheduler's steps. Published at once where nothing runs, else not too often.

        With `count`, which is asked when it is published, `running` need only tell whether anybody runs.
        """
        try:
            if self._ended():
                return
            self._steps += 1
            now = self._clock()
            if running and now - self._published < self._publish_seconds:
                return
            self._publish(now, count() if count is not None else running, waiting)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
            self.fault(error)

    def rest(self, running: int, waiting: int) -> None:
        """The scheduler goes round and has nothing to run. What its last step left is published at once, since no other
        step would; what it does without a step, such as emptying its cache, not too often, since it goes round fast."""
        try:
            if self._ended():
                return
            now = self._clock()
            left = self._steps or (running, waiting) != self._told or any(pool.arrived for pool in self.pools)
            if left or now - self._published >= max(self._publish_seconds, REST_SECONDS):
                self._publish(now, running, waiting)
        except Exception as error:  # noqa: BLE001 - see above
            self.fault(error)

    def _publish(self, now: float, running: int, waiting: int) -> None:
        for pool in self.pools:
            pool.publish(running, waiting, self._steps)
        self._steps, self._published, self._told = 0, now, (running, waiting)

    def _ended(self) -> bool:
        """Is nothing watched any more? Where somebody has asked for that, it ends here."""
        if self._asked_off and not self.reason:
            log.warning("turned off: %s", self._asked_off)
            self.stop(self._asked_off)
        return bool(self.reason)

    def turn_off(self, reason: str) -> None:
        """Stop watching at the next step, or round without one. From any thread."""
        self._asked_off = reason or "turned off"

    def stop(self, reason: str, *, keep_maps: bool = False) -> None:
        """Take every hook off now, on the scheduler's thread. Idempotent. Kept maps are marked as degraded."""
        self.hooks.remove_all()
        if self.reason:
            return
        self.reason = reason
        if not keep_maps:
            self._close_maps()
            return
        for pool in self.pools:
            pool.map.degrade()

    def _close_maps(self) -> None:
        for pool in self.pools:
            pool.map.close()

    def fault(self, error: BaseException) -> None:
        """Something of ours failed: the maps stay, marked as degraded, and SGLang goes on without us."""
        if not self.reason:
            log.error("observation stopped, SGLang goes on: %r", error)
        self.stop(repr(error), keep_maps=True)

    def _after(self, then: Callable[..., None]) -> Callable[[Hook], Method]:
        return after(then, self.fault)

    # As `after` would make the next two, without another call in each of the engine's own.

    def _taking(self, pool: SlotPool) -> Callable[[Hook], Method]:
        def around(hook: Hook) -> Method:
            def take(*args: Any, **kwargs: Any) -> Any:
                slots = hook.inner(*args, **kwargs)
                try:
                    if slots is None:
                        pool.map.counted("allocation_failures")
                    else:
                        pool.note(Note.TAKE, slots, Told.NEW)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self.fault(error)
                return slots

            return take

        return around

    def _giving_back(self, allocator: Any, pool: SlotPool) -> Callable[[Hook], Method]:
        by_page = release_method(allocator) == "_release_page_ids"
        told = Told.PAGES if by_page else Told.SLOTS

        def around(hook: Hook) -> Method:
            def give_back(*parts: Any, **keywords: Any) -> Any:
                result = hook.inner(*parts, **keywords)
                try:
                    if by_page or allocator.free_group is None:  # else held back until this method ends the group
                        for part in (*parts, *keywords.values()):
                            pool.note(Note.GIVE_BACK, part, told)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self.fault(error)
                return result

            return give_back

        return around

    def _locking(self, count: int, note: Note) -> Callable[[Hook], Method]:
        """Nodes up to the root whose lock is taken first, or is the last to go."""

        def around(hook: Hook) -> Method:
            def wrapper(node: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    turning = self._turning(node, count)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    turning = []
                    self.fault(error)
                result = hook.inner(node, *args, **kwargs)
                try:
                    for value in turning:
                        self._in_tree(note, value)
                except Exception as error:  # noqa: BLE001 - see above
                    self.fault(error)
                return result

            return wrapper

        return around

    def _inserting(self, hook: Hook) -> Method:
        def insert(node: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            result = hook.inner(node, key, *args, **kwargs)
            try:
                matched, last = result
                if matched < len(key) and last.lock_ref == 0:
                    self._in_tree(Note.LET_GO, last.value)
            except Exception as error:  # noqa: BLE001 - see above
                self.fault(error)
            return result

        return insert

    def _in_tree(self, note: Note, value: Any) -> None:
        if value is None:
            return
        self.pools[0].note(note, value, Told.WHOLE)
        if self._mapping_of is not None:
            self.pools[1].note(note, self._sliding(value))

    def _sliding(self, value: Any) -> Any:
        """The slots of the sliding pool that go with these of the full one; 0 where they were given back already."""
        return None if self._mapping_of is None else self._mapping_of.full_to_swa_index_mapping[value]

    def _turning(self, node: Any, count: int) -> list[Any]:
        """The slots of those from `node` up to the root that are locked `count` times. A lock of a node is one of each
        above it, so that nobody above one that is locked more often is locked less."""
        root, found = self._tree.root_node, []
        while node is not None and node is not root:
            locked = node.lock_ref
            if locked == count:
                found.append(node.value)
            elif locked > count:
                break
            node = node.parent
        return found

    def _adopt(self) -> None:
        evictable = [node.value for node in self._nodes() if node.lock_ref == 0 and node.value is not None]
        for number, (allocator, pool) in enumerate(zip(self._allocators, self.pools, strict=True)):
            values = evictable if number == 0 else [self._sliding(value) for value in evictable]
            cached = [pool.pages_of(as_numbers(value.cpu())) for value in values]
            pool.adopt(as_numbers(allocator.get_all_free_pages().cpu()), _joined(cached))
            pool.publish(0, 0, 0)

    def _nodes(self) -> Iterator[Any]:
        stack = list(self._tree.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _page_bytes(allocator: Any, tokens: int) -> int:
    """Bytes of a page over all layers of this rank, where the KV pool tells; else 1, since a map needs a size."""
    pool = getattr(allocator, "_kvcache", None)
    size = getattr(pool, "get_kv_size_bytes", None)
    if not callable(size):
        return 1
    found = size()
    whole = sum(found) if isinstance(found, tuple) else found
    return max(1, int(whole) * tokens // (int(allocator.size) + tokens))
