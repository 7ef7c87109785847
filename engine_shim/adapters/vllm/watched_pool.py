"""One of vLLM's pools with its map, and the hooks on the managers that say for whom blocks come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine_shim.adapters.hooks import Hook, Hooks, Method
from engine_shim.adapters.opening import open_map, whole_number
from engine_shim.adapters.vllm.audit import Audit
from engine_shim.adapters.vllm.compiled import compile_store
from engine_shim.adapters.vllm.pins import CONNECTOR, PinBook
from engine_shim.adapters.vllm.pool_tap import Place, PoolTap
from engine_shim.adapters.vllm.requests import RequestBook
from engine_shim.adapters.vllm.shape import Findings
from engine_shim.allocation_map.writer import MapSpec
from engine_shim.switches import hash_request_ids

AUDIT_BLOCKS = 1024  # blocks that one audit compares, some 0.2 ms
_MOST_HANDED = 256  # blocks a step that are given another holder's name, and looks into tables for one
_MOST_LOOKS = 8192
_ALLOCATIONS = ("allocate_new_blocks", "add_local_computed_blocks", "allocate_external_computed_blocks")


class WatchedPool:
    """One pool under observation: its map (`observer`), the hooks, and the books of requests and connector holds."""

    def __init__(
        self,
        scheduler: Any,
        pool: Any,
        spec: MapSpec,
        findings: Findings,
        fault: Callable[[BaseException], None],
        environment: Mapping[str, str],
    ) -> None:
        self.pool = pool
        self.spec = spec
        self.managers: list[Any] = []
        self.on_moved: Callable[[Collection[int]], None] = lambda blocks: None
        if findings.requests:
            everyone = scheduler.kv_cache_manager.coordinator.single_type_managers
            self.managers = [manager for manager in everyone if manager.block_pool is pool]
        self._findings = findings
        self._fault = fault
        self.observer = open_map(spec)
        compile_store(self.observer, environment)
        self.pins = PinBook(pool, self.observer)
        self.place = Place()
        plain = len(self.managers) == 1 and _keeps_whole_tables(self.managers[0])
        self.tap = PoolTap(
            pool,
            self.observer,
            self.place,
            fault,
            nulls_in_tables=not plain,
            sees_evictions=findings.evictions,
        )
        if findings.connector and scheduler.connector is not None:
            self.tap.on_touch = lambda blocks: self.pins.hold(CONNECTOR, blocks)
            self.tap.on_release = lambda blocks: self.pins.release(CONNECTOR, blocks)
        turn = whole_number(environment, "KVATLAS_AUDIT_BLOCKS", AUDIT_BLOCKS)
        self.audit = Audit(pool, self.observer, self.pins, blocks_a_turn=max(1, turn))
        self.book: RequestBook | None = None
        if findings.requests:
            self.book = RequestBook(
                scheduler,
                self.managers,
                self.observer,
                null=int(pool.null_block.block_id),
                hash_ids=hash_request_ids(environment),
            )
        self.audit.adopt()
        self.observer.publish()

    def install(self, hooks: Hooks) -> None:
        """Hook the pool, and each manager that allocates from it."""
        self.tap.install(hooks)
        for manager in self.managers:
            for name in _ALLOCATIONS:
                hooks.wrap(manager, name, self._around_allocation(manager))
            hooks.wrap(manager, "free", self._around_release)
            hooks.wrap(manager, "pop_blocks_for_free", self._around_pop)
            if not _keeps_whole_tables(manager):
                hooks.wrap(manager, "remove_skipped_blocks", self._around_release)

    def show(self, running: int, waiting: int, *, step: bool) -> None:
        """Publish everything so far; with `step` an engine step has begun."""
        self._settle_names()
        if self.book is not None:
            self.book.close_ended()
        if step:
            self.observer.step_ended(running, waiting)
        else:
            self.observer.queues_changed(running, waiting)

    def _settle_names(self) -> None:
        self.tap.settle()
        if self.book is not None and self.tap.left:
            self._name_other_holders(self.book)

    def publish(self) -> None:
        """Make everything so far visible, between two steps: before blocks are moved, and after."""
        self._settle_names()
        self.observer.publish()

    def moved(self, moves: Mapping[int, int]) -> None:
        """Blocks in use have changed places with unreferenced ones: source to destination."""
        self.observer.moved(list(moves), list(moves.values()), live=True)
        self.tap.left = [([moves.get(block, block) for block in held], owner) for held, owner in self.tap.left]
        if self.book is not None:
            self.book.renamed(moves)
        self.on_moved([*moves, *moves.values()])

    def resync(self, blocks: Sequence[int]) -> None:
        """These were changed in some way that no hook has seen: the map is told what the pool has."""
        self.tap.lost(())
        for block in blocks:
            self.audit.tell(block)
        self.on_moved(blocks)

    def keep(self, request_id: str) -> None:
        """A connector reads or fills the request's blocks: they are PINNED, and name it as their holder."""
        owner = 0 if self.book is None else self.book.known_owner(request_id)
        null = self.pool.null_block
        for manager in self.managers:
            table = manager.req_to_blocks.get(request_id) or ()
            held = [(place, block.block_id) for place, block in enumerate(table) if block is not null]
            for place, run in _runs(held):
                if owner:
                    self.observer.held_by(run, owner, place, manager.kv_cache_group_id)
                self.pins.hold(request_id, run)

    def _name_other_holders(self, book: RequestBook) -> None:
        """A shared block names its first holder; when that one has left, another of its holders. Bounded by step."""
        left, self.tap.left = self.tap.left, []
        columns = self.observer.columns
        if "owner" not in columns or "position" not in columns or "group" not in columns:
            return
        named, position, group = columns["owner"], columns["position"], columns["group"]
        blocks = self.pool.blocks
        # Blocks whose first holder is still named, and is one of those that left.
        stale = [
            (block, owner)
            for held, owner in left
            for block in held
            if int(named[block]) == owner and blocks[block].ref_cnt > 0
        ]
        later, stale = stale[_MOST_HANDED:], stale[:_MOST_HANDED]
        self.tap.left += [([block], owner) for block, owner in later]
        places = {block: int(position[block]) for block, _ in stale}
        groups = {block: int(group[block]) for block, _ in stale}
        for holding in book.holders(places, groups, _MOST_LOOKS):
            self.observer.held_by([holding.block], holding.owner, holding.position, holding.group)

    def _around_allocation(self, manager: Any) -> Callable[[Hook], Method]:
        group, place, fault = int(manager.kv_cache_group_id), self.place, self._fault

        def around(hook: Hook) -> Method:
            def allocate(request_id: str, *args: Any, **kwargs: Any) -> Any:
                place.manager = manager
                try:
                    result = hook.inner(request_id, *args, **kwargs)
                finally:
                    place.manager = None
                if place.fresh or place.hits:
                    try:
                        self._settle(manager, group, request_id)
                    except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                        fault(error)
                return result

            return allocate

        return around

    def _around_release(self, hook: Hook) -> Method:
        """What is freed within belongs to the request that is named."""
        place, book, fault = self.place, self.book, self._fault

        def release(request_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                place.owner = 0 if book is None else book.known_owner(request_id)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                fault(error)
            try:
                return hook.inner(request_id, *args, **kwargs)
            finally:
                place.owner = 0

        return release

    def _around_pop(self, hook: Hook) -> Method:
        book = self.book

        def pop_blocks_for_free(request_id: str) -> Any:
            blocks = hook.inner(request_id)
            if book is not None:
                try:
                    book.emptied(request_id)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                    self._fault(error)
            return blocks

        return pop_blocks_for_free

    def _settle(self, manager: Any, group: int, request_id: str) -> None:
        """The manager has put the blocks into the request's table: only now are their positions known."""
        place, observer, book = self.place, self.observer, self.book
        owner = 0 if book is None else book.owner_of(request_id)
        table = manager.req_to_blocks.get(request_id) or []
        hits, place.hits = place.hits, []
        position = len(table) - sum(len(ids) for _, ids in hits)
        for was_cached, ids in hits:
            if was_cached:
                observer.reused(ids, owner, max(0, position), group)
            else:
                observer.shared(ids, owner)
            position += len(ids)
        fresh, place.fresh = place.fresh, []
        for ids in fresh:
            found = _position(table, ids)
            observer.allocated(ids, owner if found is not None else 0, found or 0, group)
        if pending := getattr(manager, "_pending_cow_copies", None):
            self._note_copies(pending, {block for ids in fresh for block in ids}, table, owner)

    def _note_copies(self, pending: list[tuple[Any, Any]], fresh: set[int], table: list[Any], owner: int) -> None:
        """Both ends of a copy keep a reference until it was made, besides that of the table they stand in."""
        for source, copy in pending:
            if copy.block_id not in fresh:
                continue
            if any(block is copy for block in table):  # the request goes on in the copy, and has left the source
                self.observer.unshared([source.block_id], owner)
                self.observer.shared([source.block_id])
                self.observer.shared([copy.block_id])
            else:  # the request stays where it is, and the prefix cache gets the copy
                self.observer.shared([source.block_id])
            self.observer.counted("copy_on_write")


def _runs(held: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """(position, block) pairs as runs of following positions."""
    runs: list[tuple[int, list[int]]] = []
    for place, block in held:
        if not runs or place != runs[-1][0] + len(runs[-1][1]):
            runs.append((place, []))
        runs[-1][1].append(block)
    return runs


def _position(table: list[Any], ids: list[int]) -> int | None:
    """Where in the table `ids` stand, one after the other; None where the first is not there."""
    start = len(table) - len(ids)
    if start >= 0 and table[start].block_id == ids[0]:
        return start
    return next((place for place, block in enumerate(table) if block.block_id == ids[0]), None)


def _keeps_whole_tables(manager: Any) -> bool:
    """Does this manager hold every block of a request until it ends? Others put padding in the place of blocks."""
    return type(manager).__name__ == "FullAttentionManager"
