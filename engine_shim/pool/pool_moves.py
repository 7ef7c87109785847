"""The part of a block pool that lets contents change places: moves of live blocks, and blocks taken out of service.

It reaches into the pool's own structures: it is one of its parts, in a file of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_shim.errors import PoolError
from engine_shim.layout import BlockState
from engine_shim.pool.allocation_policy import AllocationPolicy, Taken
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.policies import make_policy
from engine_shim.pool.prefix import PrefixIndex

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[int, int]]  # source and destination


class PoolMoves:
    """Moves of one pool. Between `reserve` and `commit` or `abandon` the pool hands out and takes back nothing.

    A method that raises PoolError has changed nothing.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reserved: dict[int, int] = {}  # source to destination
        self._cached: set[int] = set()  # destinations that hold a prefix

    def reserve(self, moves: Pairs) -> list[int]:
        """Hold the destinations; returns those that hold a prefix, in order. Sources must be USED, destinations
        allocatable, and no block may be named twice."""
        pool = self._pool
        if self._reserved:
            raise PoolError("a batch of moves is under way already")
        named = [block for pair in moves for block in pair]
        if len(set(named)) != len(named):
            raise PoolError("a batch of moves names a block twice")
        for source, destination in moves:
            if (state := pool.state(source)) is not BlockState.USED:
                raise PoolError(f"block {source} cannot be moved: it is {state.name}")
            if (state := pool.state(destination)) > BlockState.CACHED:
                raise PoolError(f"nothing can be moved to block {destination}: it is {state.name}")
        reserved = dict(moves)
        cached = [destination for _, destination in moves if pool._policy.is_cached(destination)]
        held = set(cached)
        standstill = _Standstill(pool._policy, frozenset(reserved.values()))
        self._reserved, self._cached = reserved, held  # from here on nothing can fail
        if moves:
            pool._policy = standstill
        return cached

    def commit(self) -> None:
        """Let references, prefixes and states follow the contents. What was cached at a destination is now cached at
        its source, and evicted when it would have been; the other sources are free, and handed out last.

        All that is needed is worked out before anything changes. What raises nevertheless leaves references that are
        not those of the tables, which `Mover`'s checks find; `scrap` then puts the pool in order.
        """
        pool, moves, cached = self._pool, self._reserved, self._cached
        if not moves:
            return
        private, counts, hash_of = pool._private, pool._counts, pool._prefixes.hash_of
        sources, destinations = list(moves), list(moves.values())
        alone = [(source, destination) for source, destination in moves.items() if source in private]
        counted = [(s, d, counts[s]) for s, d in moves.items() if s not in private]
        swapped = [(destination, source) for source, destination in moves.items() if destination in cached]
        named = [*((s, d) for s, d in moves.items() if s in hash_of), *swapped]
        filled = [destination for destination in destinations if destination not in cached]
        vacated = [source for source, destination in moves.items() if destination not in cached]
        self._resume()
        policy = pool._policy
        for source, destination in alone:
            private.remove(source)
            private.add(destination)
        for source, destination, references in counted:
            del counts[source]
            counts[destination] = references
        pool._prefixes.relocate(named)
        if swapped:
            policy.move_cached(swapped)
        policy.remove_free(filled)
        policy.give_vacated(vacated)
        try:
            pool._observer.moved(sources, destinations, live=True)
        except Exception as error:  # noqa: BLE001 - the move is made, and whoever watches must not undo half of it
            log.error("an observer failed on a move of %d blocks: %r", len(sources), error)

    def abandon(self) -> None:
        """Let the destinations go, as they were."""
        if self._reserved:
            self._resume()

    def _resume(self) -> None:
        policy = self._pool._policy
        if isinstance(policy, _Standstill):
            self._pool._policy = policy.real
        self._reserved, self._cached = {}, set()

    def scrap(self, blocks: Collection[int]) -> None:
        """After a commit that broke off: these blocks are free, whatever they were, and hold no prefix. Whoever has
        them in a table is to forget them, not to release them.

        References of all other blocks, their prefixes and the order of eviction stay (under `fifo` the order is lost);
        the policy is made anew from them, so that nothing half done is left in it. O(blocks).
        """
        self._resume()
        pool, gone = self._pool, frozenset(blocks)
        pool._private -= gone
        for block in gone:
            pool._counts.pop(block, None)
        in_use = pool._private.union(pool._counts)
        hash_of = {block: name for block, name in pool._prefixes.hash_of.items() if block not in gone}
        cached = [block for block in pool._policy.cached_blocks() if block in hash_of and block not in in_use]
        kept = in_use.union(cached)
        prefixes = PrefixIndex()
        names = {block: name for block, name in hash_of.items() if block in kept}
        prefixes.add(list(names), list(names.values()))
        policy = make_policy(pool.policy, range(pool._end))
        policy.remove_free([block for block in range(pool._end) if block in kept or block in pool._reserved])
        policy.give_cached(cached)
        policy.copies_left = pool._policy.copies_left
        policy.set_end(pool._service_end)
        pool._policy, pool._prefixes = policy, prefixes
        try:
            pool._observer.freed(sorted(gone))
        except Exception as error:  # noqa: BLE001 - as in `commit`: the pool is in order, and stays so
            log.error("an observer failed on %d blocks that were given up: %r", len(gone), error)

    def references_of(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """The references of these blocks, as the pool counts them: 0 for those that are never allocated."""
        counts, private = self._pool._counts, self._pool._private
        return np.array([1 if block in private else counts.get(block, 0) for block in blocks], np.int64)

    # Prefixes and blocks out of service

    def evict(self, blocks: Sequence[int]) -> None:
        """Give up the prefixes in cached blocks, which are free then."""
        pool = self._pool
        for block in blocks:
            if not pool._policy.is_cached(block):
                raise PoolError(f"block {block} cannot be evicted: it is {pool.state(block).name}")
        if not blocks:
            return
        pool._policy.remove_cached(blocks)
        pool._prefixes.forget(blocks)
        pool._policy.give_vacated(blocks)
        pool._observer.evicted(list(blocks))

    def distrust(self, blocks: Collection[int]) -> None:
        """Let nobody find these blocks any more, whose contents are not what their names say: cached ones are free
        then, those in use keep their references, and are free when the last of those goes."""
        pool = self._pool
        self.evict([block for block in blocks if pool._policy.is_cached(block)])
        named = [block for block in blocks if block in pool._prefixes.hash_of]
        pool._prefixes.forget(named)
        for block in named:
            pool._settle(block)

    def relocate(self, copies: Pairs) -> None:
        """Let prefixes in cached blocks (first) be in free ones (second), once their contents are copied there."""
        pool = self._pool
        for source, home in copies:
            if not pool._policy.is_cached(source) or pool.state(home) is not BlockState.FREE:
                raise PoolError(
                    f"a prefix cannot go from block {source} to block {home}: not cached, or not free there"
                )
        if not copies:
            return
        sources, homes = [source for source, _ in copies], [home for _, home in copies]
        pool._prefixes.relocate(list(copies))
        pool._policy.remove_free(homes)
        pool._policy.move_cached(list(copies))
        pool._policy.give_vacated(sources)
        pool._observer.moved(sources, homes, live=False)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Take free blocks out of service: RESERVED from now on. The headroom stays as many blocks as it was."""
        pool = self._pool
        for block in blocks:
            if (state := pool.state(block)) is not BlockState.FREE:
                raise PoolError(f"block {block} cannot be withdrawn: it is {state.name}")
        if not blocks:
            return
        pool._policy.remove_free(blocks)
        pool._reserved.update(blocks)
        pool.usable_blocks = pool.num_blocks - len(pool._reserved)
        end = pool._service_end
        while end and end - 1 in pool._reserved:
            end -= 1
        self._set_end(end)
        pool._observer.reserved(list(blocks))

    def restore(self, blocks: Sequence[int]) -> None:
        """Put withdrawn blocks back into service: FREE, and handed out last."""
        pool = self._pool
        if missing := set(blocks) - pool._reserved:
            raise PoolError(f"block {min(missing)} cannot be put into service: it is not reserved")
        if not blocks:
            return
        pool._reserved.difference_update(blocks)
        pool.usable_blocks = pool.num_blocks - len(pool._reserved)
        self._set_end(max(pool._service_end, max(blocks) + 1))
        pool._policy.give_vacated(blocks)
        pool._observer.freed(list(blocks))

    def _set_end(self, end: int) -> None:
        self._pool._service_end = end
        self._pool._policy.set_end(end)


class _Standstill(AllocationPolicy):
    """Stands before a pool's policy while blocks are moved: whoever would take or give a block meanwhile is told."""

    def __init__(self, real: AllocationPolicy, held: frozenset[int]) -> None:
        self.real, self._held = real, held
        self.name = real.name

    @property
    def num_free(self) -> int:
        return self.real.num_free

    @property
    def num_cached(self) -> int:
        return self.real.num_cached

    def is_cached(self, block: int) -> bool:
        return block not in self._held and self.real.is_cached(block)

    def cached_blocks(self) -> Collection[int]:
        return [block for block in self.real.cached_blocks() if block not in self._held]

    def take_free(self, count: int, beside: int) -> list[int] | None:
        raise self._refusal()

    def take(self, count: int) -> Taken:
        raise self._refusal()

    def give_free(self, blocks: Sequence[int]) -> None:
        raise self._refusal()

    def give_cached(self, blocks: Sequence[int]) -> None:
        raise self._refusal()

    def remove_cached(self, blocks: Sequence[int]) -> None:
        raise self._refusal()

    def remove_free(self, blocks: Sequence[int]) -> None:
        raise self._refusal()

    def move_cached(self, moves: Pairs) -> None:
        raise self._refusal()

    def forget_cached(self) -> list[int]:
        raise self._refusal()

    def free_blocks(self) -> list[int]:
        raise self._refusal()

    @staticmethod
    def _refusal() -> PoolError:
        return PoolError("blocks are being moved; the pool takes part in nothing else until that is done")
