"""The part of a block pool that lets contents change places: moves of live blocks, and blocks taken out of service.

It reaches into the pool's own structures: it is one of its parts, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_shim.allocation_policy import AllocationPolicy, Taken
from engine_shim.block_pool import BlockPool
from engine_shim.errors import PoolError
from engine_shim.layout import BlockState

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
        self._reserved = dict(moves)
        cached = [destination for _, destination in moves if pool._policy.is_cached(destination)]
        self._cached = set(cached)
        if moves:
            pool._policy = _Standstill(pool._policy, frozenset(self._reserved.values()))
        return cached

    def commit(self) -> None:
        """Let references, prefixes and states follow the contents. What was cached at a destination is now cached at
        its source, and evicted when it would have been; the other sources are free, and handed out last."""
        pool, moves, cached = self._pool, self._reserved, self._cached
        if not moves:
            return
        self._resume()
        policy = pool._policy
        private, counts, hash_of = pool._private, pool._counts, pool._prefixes.hash_of
        for source, destination in moves.items():
            if source in private:
                private.remove(source)
                private.add(destination)
            else:
                counts[destination] = counts.pop(source)
        swapped = [(destination, source) for source, destination in moves.items() if destination in cached]
        pool._prefixes.relocate([*((s, d) for s, d in moves.items() if s in hash_of), *swapped])
        if swapped:
            policy.move_cached(swapped)
        policy.remove_free([destination for destination in moves.values() if destination not in cached])
        policy.give_vacated([source for source, destination in moves.items() if destination not in cached])
        pool._observer.moved(list(moves), list(moves.values()), live=True)

    def abandon(self) -> None:
        """Let the destinations go, as they were."""
        if self._reserved:
            self._resume()

    def _resume(self) -> None:
        policy = self._pool._policy
        if isinstance(policy, _Standstill):
            self._pool._policy = policy.real
        self._reserved, self._cached = {}, set()

    def references(self) -> NDArray[np.int64]:
        """The references of every block, as the pool counts them."""
        column = np.zeros(self._pool.num_blocks, np.int64)
        counts, private = self._pool._counts, self._pool._private
        column[np.fromiter(private, np.int64, len(private))] = 1
        column[np.fromiter(counts, np.int64, len(counts))] = np.fromiter(counts.values(), np.int64, len(counts))
        return column

    def references_of(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """The references of these blocks, 0 for those that are never allocated."""
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
        pool._reserved = pool._reserved.union(blocks)
        pool.usable_blocks = pool.num_blocks - len(pool._reserved)
        pool._observer.reserved(list(blocks))

    def restore(self, blocks: Sequence[int]) -> None:
        """Put withdrawn blocks back into service: FREE, and handed out last."""
        pool = self._pool
        if missing := set(blocks) - pool._reserved:
            raise PoolError(f"block {min(missing)} cannot be put into service: it is not reserved")
        if not blocks:
            return
        pool._reserved = pool._reserved.difference(blocks)
        pool.usable_blocks = pool.num_blocks - len(pool._reserved)
        pool._policy.give_vacated(blocks)
        pool._observer.freed(list(blocks))


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
