"""What a block pool asks of an allocation policy: which block comes next, what is evicted, what is copied first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNLIMITED = 1 << 62


class Taken(NamedTuple):
    """What a policy hands out.

    `blocks` are in table order. `evicted` lost their cached contents. `copies` are (source, destination) pairs of
    cached contents that keep their place in the order of eviction; no block is both, and all are to be copied
    before `blocks` are written.
    """

    blocks: list[int]
    evicted: list[int]
    copies: list[tuple[int, int]]


class AllocationPolicy(ABC):
    """Order among the allocatable blocks of one pool.

    Free blocks hold nothing; cached ones hold an evictable prefix. Every allocatable block is in exactly one of the
    two sets. Lists given are not kept; lists returned are the caller's.
    """

    name: str
    copies_left: int = UNLIMITED  # that `take` and `pull` may still ask for; what would need more stays where it is

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Free blocks."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Cached blocks."""

    def take_free(self, count: int, beside: int) -> list[int] | None:
        """What `take` would hand out, where that is only free blocks and at least `beside` others stay free; else None
        and nothing done. The short way for what happens most; a policy need not have one."""
        return None

    @abstractmethod
    def take(self, count: int) -> Taken:
        """Remove `count` blocks, at most num_free + num_cached, and hand them out."""

    def pull(self, hits: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Move cached blocks among `hits`, which a sequence is about to take into use, to where the policy wants them.

        Returns the hits in their order, each where it lies now, and the copies, all to be read before any is written:
        first those of hits, then, of hits that changed places with another cached block, the ways back. A policy need
        not move any.
        """
        return list(hits), []

    @abstractmethod
    def give_free(self, blocks: Sequence[int]) -> None:
        """Take blocks back that hold nothing, in the order in which they were released."""

    @abstractmethod
    def give_cached(self, blocks: Sequence[int]) -> None:
        """Take blocks back that hold a prefix, the one to be evicted first in front."""

    @abstractmethod
    def remove_cached(self, blocks: Sequence[int]) -> None:
        """Remove cached blocks that a prefix hit, or a pin, takes into use."""

    @abstractmethod
    def forget_cached(self) -> list[int]:
        """Turn every cached block into a free one in its place; returns them, the next to be evicted first."""

    @abstractmethod
    def is_cached(self, block: int) -> bool:
        """Whether the block is allocatable and holds a prefix."""

    @abstractmethod
    def cached_blocks(self) -> Collection[int]:
        """The cached blocks, for reading only, valid until the next change."""

    def mark(self, column: NDArray[np.uint8]) -> bool:
        """Write FREE and CACHED of all allocatable blocks into a column of BlockState values, where that takes no step
        a block: True. False, and nothing done, for a policy that has to list them."""
        return False

    def free_blocks(self) -> list[int]:
        """The free blocks, the next to be taken first. For a policy that takes over from this one."""
        raise NotImplementedError(f"the policy {self.name} hands nothing over")

    def set_end(self, end: int) -> None:
        """Blocks from `end` on are out of service now. For a policy that reckons from the pool's end."""
        return

    # Moving: what compaction and a shrinking pool need.

    @abstractmethod
    def remove_free(self, blocks: Sequence[int]) -> None:
        """Remove free blocks, into which something is moved or which are withdrawn."""

    def give_vacated(self, blocks: Sequence[int]) -> None:
        """Take free blocks back that were emptied on purpose: they are handed out after all other free ones, where
        the policy has an order of its own."""
        self.give_free(blocks)

    @abstractmethod
    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        """Let the contents of cached blocks (first) be in blocks that are not allocatable (second), which are cached
        from now on and evicted when the first would have been; the first leave the policy."""
