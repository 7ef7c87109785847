"""Where the next block comes from: the allocation policies of a block pool, as strategies.

A policy owns the allocatable blocks, free and cached, and their order; the pool owns references and hashes. The
pool calls `take` only for as many blocks as there are, so no policy method can fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine_shim.address_map import AddressMap
from engine_shim.errors import SettingsError


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


class StockPolicy(AllocationPolicy):
    """vLLM's free queue: uncached blocks come back to its front, cached ones to its end, and its front is taken.

    Nothing cached is ever in front of anything free, so the queue is kept as two parts: a stack of the free blocks
    (its last is the queue's first) and the cached ones by age.
    """

    name = "vllm"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._stack = list(reversed(blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._stack)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take_free(self, count: int, beside: int) -> list[int] | None:
        stack = self._stack
        if len(stack) < count + beside:
            return None
        blocks = stack[: -count - 1 : -1]
        del stack[-count:]
        return blocks

    def take(self, count: int) -> Taken:
        stack = self._stack
        blocks = stack[: -count - 1 : -1]
        del stack[-count:]
        if len(blocks) == count:
            return Taken(blocks, [], [])
        pop = self._cached.popitem
        evicted = [pop(last=False)[0] for _ in range(count - len(blocks))]
        return Taken(blocks + evicted, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._stack.extend(reversed(blocks))

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._cached.update(dict.fromkeys(blocks))

    def remove_cached(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._cached[block]

    def forget_cached(self) -> list[int]:
        forgotten = list(self._cached)
        self._cached.clear()
        self._stack[:0] = reversed(forgotten)
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached.keys()


class FifoPolicy(AllocationPolicy):
    """One queue: whatever is released goes to its end, cached or not; its front is taken."""

    name = "fifo"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._queue: OrderedDict[int, bool] = OrderedDict.fromkeys(blocks, False)  # value: holds a prefix
        self._cached: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._queue) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take(self, count: int) -> Taken:
        pop = self._queue.popitem
        taken = [pop(last=False) for _ in range(count)]
        evicted = [block for block, cached in taken if cached]
        self._cached.difference_update(evicted)
        return Taken([block for block, _ in taken], evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._queue.update(dict.fromkeys(blocks, False))

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._queue.update(dict.fromkeys(blocks, True))
        self._cached.update(blocks)

    def remove_cached(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._queue[block]
        self._cached.difference_update(blocks)

    def forget_cached(self) -> list[int]:
        forgotten = [block for block, cached in self._queue.items() if cached]
        self._queue.update(dict.fromkeys(forgotten, False))  # a key that is there keeps its place
        self._cached.clear()
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached


class LowestFreePolicy(AllocationPolicy):
    """The free blocks of the lowest addresses; when none is left, the least recently used cached ones."""

    name = "lowest-free"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._free = AddressMap(blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take_free(self, count: int, beside: int) -> list[int] | None:
        return None if self._free.count < count + beside else self._free.take_lowest(count)

    def take(self, count: int) -> Taken:
        blocks = self._free.take_lowest(min(count, self._free.count))
        pop = self._cached.popitem
        evicted = [pop(last=False)[0] for _ in range(count - len(blocks))]
        return Taken(blocks + evicted, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._free.add(blocks)

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._cached.update(dict.fromkeys(blocks))

    def remove_cached(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._cached[block]

    def forget_cached(self) -> list[int]:
        forgotten = list(self._cached)
        self._cached.clear()
        self._free.add(forgotten)
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached.keys()


class LowestAnyPolicy(AllocationPolicy):
    """The allocatable blocks of the lowest addresses, cached or not: compact, and careless of what is cached."""

    name = "lowest-any"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._allocatable = AddressMap(blocks)
        self._cached: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return self._allocatable.count - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take(self, count: int) -> Taken:
        blocks = self._allocatable.take_lowest(count)
        cached = self._cached
        evicted = [block for block in blocks if block in cached]
        for block in evicted:
            del cached[block]
        return Taken(blocks, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._allocatable.add(blocks)

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._allocatable.add(blocks)
        self._cached.update(dict.fromkeys(blocks))

    def remove_cached(self, blocks: Sequence[int]) -> None:
        self._allocatable.remove(blocks)
        for block in blocks:
            del self._cached[block]

    def forget_cached(self) -> list[int]:
        forgotten = sorted(self._cached)
        self._cached.clear()
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached.keys()


POLICIES: dict[str, type[StockPolicy | FifoPolicy | LowestFreePolicy | LowestAnyPolicy]] = {
    policy.name: policy for policy in (StockPolicy, FifoPolicy, LowestFreePolicy, LowestAnyPolicy)
}


def make_policy(name: str, blocks: Sequence[int]) -> AllocationPolicy:
    """Build the named policy over `blocks`, the ascending ids of a fresh pool that may be allocated."""
    try:
        policy = POLICIES[name]
    except KeyError:
        raise SettingsError(f"no allocation policy is named {name!r}; choose one of {', '.join(POLICIES)}") from None
    return policy(blocks)
