"""Where the next block comes from: the allocation policies of a block pool, as strategies.

A policy owns the allocatable blocks, free and cached, and their order; the pool owns references and hashes. The
pool calls `take` only for as many blocks as there are, so no policy method can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine_shim.errors import SettingsError
from engine_shim.pool.address_map import AddressMap
from engine_shim.pool.allocation_policy import AllocationPolicy, Taken
from engine_shim.pool.eviction_order import EvictionOrder
from engine_shim.pool.relocation import RelocatingPolicy

__all__ = ["POLICIES", "AllocationPolicy", "Taken", "make_policy"]


class StockPolicy(AllocationPolicy):
    """vLLM's free queue: uncached blocks come back to its front, cached ones to its end, and its front is taken.

    Nothing cached is ever in front of anything free, so the queue is kept as two parts: a stack of the free blocks
    (its last is the queue's first) and the cached ones by age. Blocks that were removed from the middle of the stack
    stay in it, known to be `_gone`, until they come up, or come back and are free where they stand.
    """

    name = "vllm"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._stack = list(reversed(blocks))
        self._gone: set[int] = set()
        self._cached = EvictionOrder()

    @property
    def num_free(self) -> int:
        return len(self._stack) - len(self._gone)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take_free(self, count: int, beside: int) -> list[int] | None:
        return None if len(self._stack) - len(self._gone) < count + beside else self._pop(count)

    def take(self, count: int) -> Taken:
        blocks = self._pop(min(count, self.num_free))
        evicted = self._cached.pop_oldest(count - len(blocks))
        return Taken(blocks + evicted, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._stack.extend(reversed(blocks if self._gone.isdisjoint(blocks) else self._without_revived(blocks)))

    def give_vacated(self, blocks: Sequence[int]) -> None:
        self._stack[:0] = reversed(self._without_revived(blocks))

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._cached.add(blocks)

    def remove_cached(self, blocks: Sequence[int]) -> None:
        self._cached.remove(blocks)

    def remove_free(self, blocks: Sequence[int]) -> None:
        self._gone.update(blocks)

    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        for block, other in moves:
            self._cached.replace(block, other)

    def forget_cached(self) -> list[int]:
        forgotten = list(self._cached)
        self._cached.clear()
        self.give_vacated(forgotten)
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached

    def free_blocks(self) -> list[int]:
        gone = self._gone
        return [block for block in reversed(self._stack) if block not in gone] if gone else self._stack[::-1]

    def _pop(self, count: int) -> list[int]:
        """The first `count` free blocks, of at least as many. Any number of gone ones may lie above them."""
        stack, gone = self._stack, self._gone
        blocks = stack[: -count - 1 : -1]
        place = len(stack) - len(blocks)
        if not gone.isdisjoint(blocks):
            passed = gone.intersection(blocks)
            blocks = [block for block in blocks if block not in passed]
            while len(blocks) < count:
                place -= 1
                if (block := stack[place]) in gone:
                    passed.add(block)
                else:
                    blocks.append(block)
            gone -= passed
        del stack[place:]
        return blocks

    def _without_revived(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not in the stack; the others are free again where they stand."""
        revived = self._gone.intersection(blocks)
        self._gone -= revived
        return [block for block in blocks if block not in revived]


class FifoPolicy(AllocationPolicy):
    """One queue: whatever is released goes to its end, cached or not; its front is taken."""

    name = "fifo"

    def __init__(self, blocks: Sequence[int]) -> None:
        self._queue = EvictionOrder(blocks)
        self._cached: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._queue) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take(self, count: int) -> Taken:
        taken = self._queue.pop_oldest(count)
        evicted = [block for block in taken if block in self._cached]
        self._cached.difference_update(evicted)
        return Taken(taken, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._queue.add(blocks)

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._queue.add(blocks)
        self._cached.update(blocks)

    def remove_cached(self, blocks: Sequence[int]) -> None:
        self._queue.remove(blocks)
        self._cached.difference_update(blocks)

    def remove_free(self, blocks: Sequence[int]) -> None:
        self._queue.remove(blocks)

    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        for block, other in moves:
            self._queue.replace(block, other)
            self._cached.remove(block)
            self._cached.add(other)

    def forget_cached(self) -> list[int]:
        forgotten = [block for block in self._queue if block in self._cached]
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
        self._cached = EvictionOrder()

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
        evicted = self._cached.pop_oldest(count - len(blocks))
        return Taken(blocks + evicted, evicted, [])

    def give_free(self, blocks: Sequence[int]) -> None:
        self._free.add(blocks)

    def give_cached(self, blocks: Sequence[int]) -> None:
        self._cached.add(blocks)

    def remove_cached(self, blocks: Sequence[int]) -> None:
        self._cached.remove(blocks)

    def remove_free(self, blocks: Sequence[int]) -> None:
        self._free.remove(blocks)

    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        for block, other in moves:
            self._cached.replace(block, other)

    def forget_cached(self) -> list[int]:
        forgotten = list(self._cached)
        self._cached.clear()
        self._free.add(forgotten)
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached


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

    def remove_free(self, blocks: Sequence[int]) -> None:
        self._allocatable.remove(blocks)

    def move_cached(self, moves: Sequence[tuple[int, int]]) -> None:
        self.remove_cached([block for block, _ in moves])
        self.give_cached([other for _, other in moves])

    def forget_cached(self) -> list[int]:
        forgotten = sorted(self._cached)
        self._cached.clear()
        return forgotten

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> Collection[int]:
        return self._cached.keys()


POLICIES: dict[str, Callable[[Sequence[int]], AllocationPolicy]] = {
    StockPolicy.name: StockPolicy,
    FifoPolicy.name: FifoPolicy,
    LowestFreePolicy.name: LowestFreePolicy,
    LowestAnyPolicy.name: LowestAnyPolicy,
    RelocatingPolicy.name: RelocatingPolicy,
}


def make_policy(name: str, blocks: Sequence[int]) -> AllocationPolicy:
    """Build the named policy over `blocks`, the ascending ids of a fresh pool that may be allocated."""
    try:
        policy = POLICIES[name]
    except KeyError:
        raise SettingsError(f"no allocation policy is named {name!r}; choose one of {', '.join(POLICIES)}") from None
    return policy(blocks)


SWITCHABLE = (StockPolicy.name, RelocatingPolicy.name)  # the policies of one order of eviction


def switch_policy(policy: AllocationPolicy, name: str, size: int) -> AllocationPolicy:
    """The named policy with all that `policy` has, in the same order of eviction; ids stay below `size`.

    SettingsError for policies of other orders: a switch between those would evict what neither would.
    """
    if name not in SWITCHABLE or policy.name not in SWITCHABLE:
        raise SettingsError(f"a pool cannot go from policy {policy.name} to {name}; only {' and '.join(SWITCHABLE)}")
    if name == policy.name:
        return policy
    free, cached = policy.free_blocks(), list(policy.cached_blocks())
    fresh = RelocatingPolicy(free, size=size) if name == RelocatingPolicy.name else StockPolicy(free)
    fresh.give_cached(cached)
    return fresh
