"""Compares the published map with the pool itself, a bounded part at a time, and mends what differs.

The hooks see every operation, so a difference is a fault: of ours, or a way around the pool's methods that vLLM has
gained. It is counted, logged once, and repaired, since a map that is wrong is worse than one that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

import numpy as np

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.layout import BlockState

log = logging.getLogger("kvatlas.shim")

_FREE, _CACHED, _USED, _PINNED, _RESERVED = (int(state) for state in BlockState)


class Audit:
    """Walks through one pool, `blocks_a_turn` blocks each time it is asked."""

    def __init__(self, pool: Any, observer: MapObserver, pinned: Container[int], *, blocks_a_turn: int) -> None:
        self._pool = pool
        self._observer = observer
        self._pinned = pinned
        self._turn = blocks_a_turn
        self._next = 0
        self._logged = False
        self._watched: Container[int] = getattr(pool, "_reuse_watchers", ())
        # Neither referenced nor in the free queue from the start: nobody ever gets these.
        self._reserved = frozenset(
            block.block_id
            for block in pool.blocks
            if block.is_null or (block.ref_cnt == 0 and block.next_free_block is None)
        )

    def adopt(self) -> None:
        """Tell the observer of a pool that is not wholly free: a fresh map says that it is."""
        reserved = sorted(self._reserved)
        self._observer.reserved(reserved)
        for block in self._pool.blocks:
            state, references = self.truth(block)
            if state not in (_FREE, _RESERVED):
                self._set(block.block_id, state, references)

    def tell(self, number: int) -> None:
        """Tell the observer of one block as the pool has it."""
        self._set(number, *self.truth(self._pool.blocks[number]))

    def truth(self, block: Any) -> tuple[int, int]:
        """State and references of one block, as the pool has them."""
        number = block.block_id
        if number in self._reserved:
            return _RESERVED, 0
        if block.ref_cnt > 0:
            return (_PINNED if number in self._pinned else _USED), block.ref_cnt
        if block.next_free_block is None:
            return _USED, 0  # taken out of the free queue and not given back: somebody holds it
        return (_FREE if block.block_hash is None and number not in self._watched else _CACHED), 0

    def take_turn(self) -> int:
        """Compare the next part with the map as published, which must be up to date; the number of repairs."""
        columns = self._observer.columns
        state, references = columns.get("state"), columns.get("references")
        if state is None:
            return 0
        blocks = self._pool.blocks[self._next : self._next + self._turn]
        first, self._next = self._next, self._next + self._turn
        if self._next >= len(self._pool.blocks):
            self._next = 0
        truth = np.array([self.truth(block) for block in blocks], np.int64).reshape(-1, 2)
        wrong = state[first : first + len(blocks)] != truth[:, 0]
        if references is not None:
            wrong |= references[first : first + len(blocks)] != np.minimum(truth[:, 1], 0xFFFF)
        places = np.flatnonzero(wrong).tolist()
        for place in places:
            number = first + place
            if not self._logged:
                self._logged = True
                log.error(
                    "block %d is %s in the map and %s in the pool; repaired, and counted as a repair from now on",
                    number, _say(int(state[number])), _say(int(truth[place, 0])),
                )  # fmt: skip
            self._set(number, int(truth[place, 0]), int(truth[place, 1]))
        if places:
            self._observer.counted("repairs", len(places))
        return len(places)

    def _set(self, number: int, state: int, references: int) -> None:
        observer, block = self._observer, [number]
        if state == _FREE:
            observer.freed(block)
        elif state == _CACHED:
            observer.cached(block)
        elif state == _RESERVED:
            observer.reserved(block)
        else:
            observer.allocated(block)
            if not references:
                observer.unshared(block)
            for _ in range(references - 1):
                observer.shared(block)
            if state == _PINNED:
                observer.pinned(block)


def _say(state: int) -> str:
    return BlockState(state).name if state in BlockState._value2member_map_ else f"state {state}"
