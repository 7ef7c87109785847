"""The reference engine's hands: moves live blocks of one pool and one KV cache, and keeps what is cached in the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_shim.compaction.mover import BlockFacts, Moves
from engine_shim.pool.block_pool import BlockPool
from engine_shim.pool.pool_moves import PoolMoves
from engine_shim.reference.block_copy import Saved
from engine_shim.reference.block_tables import BlockTables, Hits
from engine_shim.reference.content import Runner
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.sequence import Sequence as LiveSequence

log = logging.getLogger(__name__)


class ReferenceMover:
    """The Mover of `engine_shim.compaction.mover`. Owners are sequence numbers: of a shared block, its first table's.

    Whatever is cached in a destination changes places with the block that moves there, and keeps its turn in the
    order of eviction. Blocks in transfer are PINNED, and everything else that reads a block reads it through a table,
    between two step boundaries: nothing else can hold one in its place.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: KVCache,
        runner: Runner,
        sequences: Callable[[], Iterable[LiveSequence]],
        *,
        refusal: Callable[[], str] = lambda: "",
        before_write: Callable[[Iterable[int]], None] = lambda blocks: None,
        recompute: Callable[[Collection[int]], None],
    ) -> None:
        """`sequences` are those with tables now. `refusal` is what stands against moving now, "" where nothing does.
        `before_write` is told which blocks are about to be written. `recompute` takes sequences that name these
        blocks, which are free already, out of the batch, to be computed anew."""
        self._pool, self._cache, self._runner = pool, cache, runner
        self.moves = PoolMoves(pool)
        self._tables = BlockTables(sequences, pool.num_blocks)
        self._refusal, self._before_write, self._recompute = refusal, before_write, recompute
        self._swapped = np.zeros((0, 2), np.int64)  # moves whose destination holds a prefix
        self._aside: Saved = None  # the contents of their destinations, once copied out

    keeps_cached = True

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    def refusal(self) -> str:
        return self._refusal()

    def columns(self) -> BlockFacts:
        count = self._pool.num_blocks
        hits = self._tables.find()
        owners, positions = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        _scatter(hits, hits.blocks, owners, positions)
        # What the pool counts is compared with this before a move; here it would take a step for each block in use.
        references = np.bincount(hits.blocks, minlength=count)
        return BlockFacts(self._pool.states(np.flatnonzero(references)), owners, positions, references)

    def facts(self, blocks: NDArray[np.int64]) -> BlockFacts:
        ids = blocks.tolist()
        states = np.fromiter(map(self._pool.state, ids), np.uint8, len(ids))
        references = self.moves.references_of(ids)
        owners, positions = np.zeros(blocks.size, np.uint32), np.zeros(blocks.size, np.uint32)
        if references.any():  # what nobody references is nobody's; whether a table names it, `found` tells
            hits = self._tables.find(blocks)
            order = np.argsort(blocks)
            places = order[np.searchsorted(blocks, hits.blocks, sorter=order)]
            _scatter(hits, places, owners, positions)
        return BlockFacts(states, owners, positions, references)

    def found(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        hits = self._tables.find(blocks).blocks
        order = np.argsort(blocks)
        return np.bincount(order[np.searchsorted(blocks, hits, sorter=order)], minlength=blocks.size).astype(np.int64)

    def revalidate(self, moves: Moves) -> Moves:
        return moves

    def reserve(self, moves: Moves) -> int:
        self._aside, self._swapped = None, self._swapped[:0]
        try:
            cached = self.moves.reserve([(source, destination) for source, destination in moves.tolist()])
            self._swapped = moves[np.isin(moves[:, 1], np.array(cached, np.int64))]
        except Exception:
            self.moves.abandon()  # a pool that stands still for moves that nobody makes would stop the engine
            raise
        return 0

    def copy(self, moves: Moves) -> None:
        copier = self._cache.copier
        self._before_write(moves[:, 1].tolist())
        self._aside = copier.save(self._swapped[:, 1])
        copier.copy(moves[:, 0], moves[:, 1])
        copier.settle()

    def digests(self, blocks: NDArray[np.int64]) -> Sequence[bytes]:
        return self._cache.copier.digests(blocks.tolist())

    def commit(self, moves: Moves) -> None:
        swapped = self._swapped
        pairs = np.concatenate((moves, swapped[:, ::-1])).tolist()
        copied = [(source, destination) for source, destination in pairs]
        self.moves.commit()
        # Destinations are live from here on: whatever fails now, `abandon` must find nothing to write to them.
        aside, self._aside, self._swapped = self._aside, None, swapped[:0]
        self._tables.rename(moves)
        self._put_back(aside, swapped[:, 0])
        self._cache.copied_blocks += len(copied)
        self._runner.copied(copied)

    def abandon(self, moves: Moves) -> None:
        self.moves.abandon()
        aside, swapped = self._aside, self._swapped
        self._aside, self._swapped = None, swapped[:0]
        self._put_back(aside, swapped[:, 1])

    def give_up(self, moves: Moves) -> None:
        self._aside, self._swapped = None, self._swapped[:0]
        blocks = frozenset(moves.ravel().tolist())
        self.moves.scrap(blocks)
        self._recompute(blocks)

    def _put_back(self, aside: Saved, blocks: NDArray[np.int64]) -> None:
        """Write what was set aside to `blocks`, which are cached."""
        if aside is None:
            return
        try:
            self._cache.copier.restore(aside, blocks)
        except Exception as error:  # noqa: BLE001 - whatever it was, wrong bytes must not stay under their names
            log.warning("%d prefixes were lost when blocks changed places: %r", len(blocks), error)
            self.moves.evict(blocks.tolist())


def _scatter(hits: Hits, places: NDArray[np.int64], owners: NDArray[np.uint32], positions: NDArray[np.uint32]) -> None:
    """Enter each block's first table last, so that it is what stands there."""
    owners[places[::-1]] = hits.numbers[::-1]
    positions[places[::-1]] = hits.positions[::-1]
