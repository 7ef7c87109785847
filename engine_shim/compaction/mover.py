"""What an engine implements so that its live blocks can be moved, and the checks that stand before and after a move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_shim.layout import BlockState

Moves = NDArray[np.int64]
"""(n, 2): rows of source and destination block; no block appears twice."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockFacts:
    """What a pool and its tables say of some blocks at one step boundary; entry i is of the i-th block asked for.

    Copied out: it does not change when the pool does. `owners` and `positions` are as in the map, 0 where the engine
    does not keep them.
    """

    states: NDArray[np.uint8]
    owners: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    references: NDArray[np.int64]  # as the pool counts them; in `columns` as the tables name them, if that is cheaper

    def of(self, blocks: NDArray[np.int64]) -> BlockFacts:
        """The facts at these indices."""
        return BlockFacts(self.states[blocks], self.owners[blocks], self.positions[blocks], self.references[blocks])


class Mover(Protocol):
    """One engine's hands. Everything is called on the engine's own thread, at a step boundary, in order with its
    forward passes; between the calls of one chunk nothing else touches the pool.

    A chunk goes `facts` and `found` on its blocks, `revalidate`, `reserve`, `copy`, then `commit`, or `abandon` where
    anything failed; where the pool is not whole after that, `give_up`. Where an engine has several ranks, `copy`
    returns when all of them have copied and acknowledged, and `commit` applies to all. A method that raises has left
    the pool as it was before the call, if it can: what `commit` could not keep to is found, and given up.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    @property
    def keeps_cached(self) -> bool:
        """Is what is cached in a destination set aside and kept? Else it is evicted there, and a plan loses it."""
        ...

    def refusal(self) -> str:
        """Why nothing may move now (a KV connector is configured, state groups, a step in flight), "" where it may."""
        ...

    def columns(self) -> BlockFacts:
        """The facts of every block, in order: what a plan is made from."""
        ...

    def facts(self, blocks: NDArray[np.int64]) -> BlockFacts:
        """The facts of these blocks now."""
        ...

    def found(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each of these blocks stands in the tables of live sequences; counted, not remembered.

        Called twice a chunk, before and after it.
        """
        ...

    def revalidate(self, moves: Moves) -> Moves:
        """Those of the moves that the engine still allows, in order: its veto for what `facts` cannot show."""
        ...

    def reserve(self, moves: Moves) -> int:
        """Take the destinations out of the pool, so that nobody finds or references them while they are overwritten.

        Cached contents in them are evicted, or set aside to be kept; returns how many are lost.
        """
        ...

    def copy(self, moves: Moves) -> None:
        """Copy the contents of all sources to their destinations, and wait until that is done."""
        ...

    def digests(self, blocks: NDArray[np.int64]) -> Sequence[bytes]:
        """A digest of each block's contents over all layers, for verify mode."""
        ...

    def commit(self, moves: Moves) -> None:
        """Let tables, hashes, owners and counts name the destinations, all together; then free the sources (or cache
        in them what `reserve` set aside)."""
        ...

    def abandon(self, moves: Moves) -> None:
        """Undo `reserve`: the destinations are allocatable again. Their contents may have been overwritten. Does
        nothing once the pool has taken the moves over, whatever failed after that."""
        ...

    def give_up(self, moves: Moves) -> None:
        """Rely on nothing in these blocks, sources and destinations, after a chunk that left them in disorder: evict
        their prefixes, and have every sequence that names one of them computed anew. Whatever state they are in, the
        pool is whole afterwards."""
        ...


class Drop(Enum):
    """Why a planned move is not made. The values are for people and for labels: a closed set."""

    SOURCE_RELEASED = "the source is not in use any more"
    SOURCE_PINNED = "the source is pinned now"
    SOURCE_CHANGED = "the source holds another block of a sequence now"
    SOURCE_SHARED = "the source has more or fewer references than when it was planned"
    REFERENCES_UNACCOUNTED = "the source has references that stand in no table"
    DESTINATION_TAKEN = "the destination is not allocatable any more"
    ENGINE_REFUSED = "the engine does not allow it"


def still_valid(
    planned: BlockFacts, sources: BlockFacts, found: NDArray[np.int64], destinations: BlockFacts
) -> tuple[NDArray[np.bool_], Counter[Drop]]:
    """Which planned moves may still be made, and how many are dropped for which reason (the first that applies).

    `planned` are the facts of the sources when the plan was made; the others are of now. A sequence that has finished,
    forked or been preempted since drops its moves, and so does a block whose references are not all in tables: whoever
    holds such a reference would go on reading the old place.
    """
    checks = (
        (Drop.SOURCE_PINNED, sources.states == BlockState.PINNED),
        (Drop.SOURCE_RELEASED, sources.states != BlockState.USED),
        (Drop.SOURCE_CHANGED, (sources.owners != planned.owners) | (sources.positions != planned.positions)),
        (Drop.REFERENCES_UNACCOUNTED, (sources.references != found) | (found < 1)),
        (Drop.SOURCE_SHARED, sources.references != planned.references),
        (Drop.DESTINATION_TAKEN, (destinations.states > BlockState.CACHED) | (destinations.references != 0)),
    )
    valid = np.ones(found.size, np.bool_)
    dropped: Counter[Drop] = Counter()
    for reason, failed in checks:
        if count := int(np.count_nonzero(valid & failed)):
            dropped[reason] = count
            valid &= ~failed
    return valid, dropped


def audit(before: BlockFacts, after: BlockFacts, found: NDArray[np.int64]) -> str:
    """What is wrong after a commit, "" where nothing is.

    `before` are the facts of the n sources before it; `after` and `found` are of the sources and then the destinations
    after it, 2 n in all.
    """
    moved = before.states.size
    old, new = after.of(np.arange(moved)), after.of(np.arange(moved, 2 * moved))
    checks = (
        ("still named by a table at its old place", found[:moved] != 0),
        ("not free at its old place", (old.states > BlockState.CACHED) | (old.references != 0)),
        ("not in use at its new place", new.states != BlockState.USED),
        ("of other references than before", new.references != before.references),
        ("not named by as many tables as before", found[moved:] != before.references),
        ("of another owner or position", (new.owners != before.owners) | (new.positions != before.positions)),
    )
    for what, failed in checks:
        if count := int(np.count_nonzero(failed)):
            return f"after the commit {count} of {moved} moved blocks are {what}"
    return ""


class OffBy(StrEnum):
    """How moving came to be off. An agent respects all but the first in everything else that it might change too."""

    START = "start"  # the engine was started so, and may relocate all the same
    SWITCH = "switch"  # somebody used the kill switch
    CHECK = "check"  # a check failed


class MoveSwitch:
    """Whether blocks may be moved in this process: one for all runs, for people and for a run that proved unsafe.

    Any thread may use it. Turned off by a failure it stays off until the process ends: what moved wrongly once would
    again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        self._by: OffBy | None = None

    @property
    def reason(self) -> str:
        """Why moving is off, "" where it is on."""
        return self._reason

    @property
    def failed(self) -> bool:
        """Was it a failed check that turned moving off? That deserves an alert."""
        return self._by is OffBy.CHECK

    @property
    def off_by(self) -> OffBy | None:
        """How it came to be off; None where it is on."""
        return self._by

    def off(self, reason: str, *, failed: bool = False, at_start: bool = False) -> None:
        """Stop all moving before the next chunk. The first failure's reason is kept."""
        with self._lock:
            if self._by is not OffBy.CHECK:
                self._reason = reason or "moving is switched off"
                self._by = OffBy.CHECK if failed else OffBy.START if at_start else OffBy.SWITCH

    def on(self) -> bool:
        """Allow moving again; False, and nothing done, after a failure."""
        with self._lock:
            if self._by is not OffBy.CHECK:
                self._reason, self._by = "", None
            return self._by is None
