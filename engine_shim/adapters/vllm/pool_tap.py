"""Tells an observer what one of vLLM's block pools does, from the pool's own operations.

Each wrapper runs vLLM's method first. What it then reads of a block (`ref_cnt`, hash) is what vLLM has just decided, so
states are never guessed: reference count 0 and a hash is CACHED, without one FREE, anything above 0 USED. One thing
cannot be seen afterwards, which cached blocks an allocation evicted; the pool's table of hashes tells that, entry by
entry, and blocks without a hash cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method
from engine_shim.allocation_map.map_observer import MAX_FIELDS, MapObserver
from engine_shim.layout import EventKind

_ALLOCATE, _FREE, _CACHE = int(EventKind.ALLOCATE), int(EventKind.FREE), int(EventKind.CACHE)

Fault = Callable[[BaseException], None]


class Place:
    """For whom vLLM allocates or frees at the moment; `fresh` and `hits` wait until the place in the table is known."""

    __slots__ = ("fresh", "hits", "manager", "owner")

    def __init__(self) -> None:
        self.manager: Any = None  # the single-type manager that is allocating, None outside of one
        self.owner = 0  # whose blocks are being freed
        self.fresh: list[list[int]] = []  # ids that get_new_blocks handed out, one list a call
        self.hits: list[tuple[bool, list[int]]] = []  # runs of a touch: were they cached until now?, ids


class PoolTap:
    """The hooks on one pool. `on_touch` and `on_release` hear of blocks taken and given back outside of any request."""

    def __init__(
        self,
        pool: Any,
        observer: MapObserver,
        place: Place,
        fault: Fault,
        *,
        nulls_in_tables: bool = True,
        sees_evictions: bool = True,
    ) -> None:
        self.pool = pool
        self.observer = observer
        self.place = place
        self.on_touch: Callable[[Sequence[int]], None] | None = None
        self.on_release: Callable[[Sequence[int]], None] | None = None
        self._fault = fault
        self._null = int(pool.null_block.block_id)
        self._nulls_in_tables = nulls_in_tables
        self._sees_evictions = sees_evictions
        self.left: list[tuple[list[int], int]] = []  # blocks still in use, and the owner that gave them back
        self._dropped: list[int] = []  # blocks whose hashes went since somebody looked
        self._hooks: Hooks | None = None
        self._hashes: Hook | None = None  # the one on the pool's table of hashes

    def install(self, hooks: Hooks) -> None:
        """Put the hooks on. The pool must hold nothing but what `resync` of the audit tells of."""
        self._hooks = hooks
        pool = self.pool
        hooks.wrap(pool, "get_new_blocks", self._around_get_new_blocks)
        hooks.wrap(pool, "free_blocks", self._around_free_blocks)
        hooks.wrap(pool, "touch", self._around_touch)
        hooks.wrap(pool, "reset_prefix_cache", self._around_reset)
        for name, around in (("evict_blocks", self._around_evict), ("unpin_blocks", self._around_unpin)):
            if hasattr(pool, name):
                hooks.wrap(pool, name, around)
        self._watch_hashes()

    def settle(self) -> None:
        """Look at blocks that lost their hashes outside of a hooked operation: those that nobody holds are FREE."""
        if self._dropped:
            self._tell_evicted()

    def lost(self, blocks: Sequence[int]) -> None:
        """As `settle`, and these lost their hashes on some other way than the pool's table of hashes."""
        self._dropped.extend(blocks)
        self.settle()

    def _watch_hashes(self) -> None:
        table, before = self.pool.cached_block_hash_to_block, self._hashes
        if not self._sees_evictions or self._hooks is None or (before is not None and before.owner is table):
            return
        if before is not None:  # reset_prefix_cache makes a new one, and the old one is to go with all its entries
            self._hooks.drop(before)
        self._hashes = self._hooks.wrap(table, "pop", self._around_pop)

    def _tell_evicted(self) -> None:
        blocks = self.pool.blocks
        gone = [block for block in dict.fromkeys(self._dropped) if not blocks[block].ref_cnt]
        gone = [block for block in gone if blocks[block].block_hash is None]
        self._dropped.clear()
        if gone:
            self.observer.evicted(gone)

    def _around_pop(self, hook: Hook) -> Method:
        inner, dropped = hook.inner, self._dropped

        def pop(key: Any, block_id: int) -> Any:
            found = inner(key, block_id)
            dropped.append(block_id)
            return found

        return pop

    # The next two are called several times a step: they write to the journal themselves, from their own locals.

    def _around_get_new_blocks(self, hook: Hook) -> Method:
        inner, place, dropped, fault = hook.inner, self.place, self._dropped, self._fault
        evicted = self.observer.evicted
        heads, unnamed, now, make_room = self.observer.open_journal()
        note, name, most, kind = heads.extend, unnamed.extend, MAX_FIELDS, _ALLOCATE

        def get_new_blocks(num_blocks: int) -> Any:
            blocks = inner(num_blocks)
            try:
                if dropped:
                    evicted(list(dict.fromkeys(dropped)))
                    dropped.clear()
                if place.manager is None:
                    note((now(), len(blocks), 0, kind))
                    name(blocks)
                    if len(heads) > most:
                        make_room()
                elif blocks:
                    place.fresh.append([block.block_id for block in blocks])
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                fault(error)
            return blocks

        return get_new_blocks

    def _around_free_blocks(self, hook: Hook) -> Method:
        """Where the free queue has grown by as many blocks as were given back, and at one end alone, they had one fate:
        vLLM puts blocks without a hash at its front, and others at its end."""
        inner, place, fault, given_back = hook.inner, self.place, self._fault, self._given_back
        heads, unnamed, now, make_room = self.observer.open_journal()
        note, name, most, without_hash, with_hash = heads.extend, unnamed.extend, MAX_FIELDS, _FREE, _CACHE
        queue = self.pool.free_block_queue
        head, tail = queue.fake_free_list_head, queue.fake_free_list_tail

        def free_blocks(ordered_blocks: Iterable[Any]) -> Any:
            blocks = list(ordered_blocks)  # vLLM gives iterators, which can be read once
            count, first, last = queue.num_free_blocks, head.next_free_block, tail.prev_free_block
            result = inner(blocks)
            try:
                number = len(blocks)
                one_fate = queue.num_free_blocks - count == number
                if one_fate and tail.prev_free_block is last:
                    note((now(), number, place.owner, without_hash))
                elif one_fate and head.next_free_block is first:
                    note((now(), number, place.owner, with_hash))
                else:
                    given_back(blocks)
                    return result
                name(blocks)
                if len(heads) > most:
                    make_room()
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return result

        return free_blocks

    def _given_back(self, blocks: list[Any]) -> None:
        """Blocks of which some are cached, or still in use, or padding, or of the pool that vLLM passed them on to."""
        observer, owner = self.observer, self.place.owner
        if self._nulls_in_tables:
            pool, null = self.pool, self._null
            blocks = [block for block in blocks if block.pool is pool and block.block_id != null]
        idle = [block for block in blocks if not block.ref_cnt]
        freed = [block.block_id for block in idle if block._block_hash is None]
        cached = [block.block_id for block in idle if block._block_hash is not None]
        if freed:
            observer.freed(freed, owner)
        if cached:
            observer.cached(cached, owner)
        if len(idle) == len(blocks):
            return
        held = [block.block_id for block in blocks if block.ref_cnt]
        observer.unshared(held, owner)
        if owner:
            self.left.append((held, owner))
        elif self.on_release is not None:
            self.on_release(held)

    def _around_touch(self, hook: Hook) -> Method:
        observer, place, null, fault = self.observer, self.place, self._null, self._fault

        def touch(blocks: Sequence[Any]) -> Any:
            result = hook.inner(blocks)
            try:
                runs: list[tuple[bool, list[int]]] = []
                for block in blocks:
                    if block.block_id == null:
                        continue
                    was_cached = block.ref_cnt == 1
                    if not runs or runs[-1][0] != was_cached:
                        runs.append((was_cached, []))
                    runs[-1][1].append(block.block_id)
                if place.manager is not None:
                    place.hits += runs
                else:
                    for was_cached, ids in runs:
                        (observer.reused if was_cached else observer.shared)(ids)
                        if self.on_touch is not None:
                            self.on_touch(ids)
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return result

        return touch

    def _around_reset(self, hook: Hook) -> Method:
        fault = self._fault

        def reset_prefix_cache() -> Any:
            done = hook.inner()
            try:
                if done:
                    self._forget_cached()
                    self._watch_hashes()
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return done

        return reset_prefix_cache

    def _forget_cached(self) -> None:
        """No block is cached any more. Which ones were, the map itself knows, once it is up to date."""
        self._dropped.clear()
        self.observer.publish()
        state = self.observer.columns.get("state")
        if state is not None:
            cached = (state == 1).nonzero()[0].tolist()
            if cached:
                self.observer.evicted(cached)
                self.observer.publish()

    def _around_evict(self, hook: Hook) -> Method:
        fault = self._fault

        def evict_blocks(block_ids: set[int]) -> Any:
            result = hook.inner(block_ids)
            try:
                self.settle()
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return result

        return evict_blocks

    def _around_unpin(self, hook: Hook) -> Method:
        observer, fault = self.observer, self._fault

        def unpin_blocks(blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> Any:
            blocks = list(blocks)
            result = hook.inner(blocks, on_reuse)
            try:
                for block in blocks:
                    # Released, yet readable until somebody else gets the block: CACHED in all but name.
                    (observer.unshared if block.ref_cnt else observer.cached)([block.block_id])
            except Exception as error:  # noqa: BLE001 - see above
                fault(error)
            return result

        return unpin_blocks
