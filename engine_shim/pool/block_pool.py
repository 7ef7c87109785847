"""Our paged block pool: references, prefix cache, pins and headroom; where a block comes from is its policy's part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim.errors import DoubleFree, PoolError, PoolExhausted, SettingsError, UnknownBlock
from engine_shim.layout import BlockState
from engine_shim.observer import NO_OBSERVER, PoolObserver
from engine_shim.pool.policies import StockPolicy, make_policy, switch_policy
from engine_shim.pool.prefix import PrefixIndex

MAX_POOL_BLOCKS = 1 << 24
"""A pool keeps some 200 bytes a block in Python objects: 3 GB for so many, which is a terabyte of KV and more."""


class Allocation(NamedTuple):
    """`blocks` in table order, one reference each; `copies`, (source, destination) block pairs, all of them to be
    read before any is written, and before the new blocks are."""

    blocks: list[int]
    copies: list[tuple[int, int]]


def check_shape(block_tokens: int, headroom: float) -> None:
    """Raises SettingsError for what no pool has, however many blocks."""
    if block_tokens < 1:
        raise SettingsError(f"block_tokens={block_tokens}: a block holds at least one token")
    if not 0.0 <= headroom < 1.0:
        raise SettingsError(f"headroom={headroom} is a share of the usable blocks: 0 or more, below 1")


class BlockPool:
    """Blocks 0 .. num_blocks-1, each FREE, CACHED, USED, PINNED or RESERVED. Not thread-safe: the engine's thread.

    Block ids are Python ints. A method that raises has changed nothing. Blocks are kept in two classes, so that the
    common life of a block costs a few set operations in bulk: *private* ones (one reference, no hash, no pin) are in
    a set; the others in use have a count in a dict. Allocatable ones belong to the policy.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: str = "vllm",
        block_tokens: int = 16,
        headroom: float = 0.10,
        prefix_cache: bool = True,
        reserved: Sequence[int] = (),
        observer: PoolObserver = NO_OBSERVER,
        block_bytes: int = 0,
    ) -> None:
        """`headroom` is the share of usable blocks (rounded down) that new sequences may not take; `reserved` blocks
        are never allocated; `block_bytes`, where they are known, are for the observer's counters. SettingsError on
        values that make no pool; a pool of 0 usable blocks is one, and full."""
        if not 0 <= num_blocks <= MAX_POOL_BLOCKS:
            raise SettingsError(f"num_blocks={num_blocks}: a pool has 0 to {MAX_POOL_BLOCKS:,} blocks")
        check_shape(block_tokens, headroom)
        self._reserved = set(reserved)
        if outside := sorted(block for block in self._reserved if not 0 <= block < num_blocks):
            raise SettingsError(f"reserved block {outside[0]} is outside the pool of {num_blocks} blocks")
        usable = [block for block in range(num_blocks) if block not in self._reserved]
        self._policy = make_policy(policy, usable)
        self._end = self._service_end = max(usable, default=-1) + 1  # the latter without what is withdrawn
        self.num_blocks = num_blocks
        self.usable_blocks = num_blocks - len(self._reserved)
        self.block_tokens = block_tokens
        self.headroom_blocks = int(self.usable_blocks * headroom)
        self.prefix_cache = prefix_cache
        self.relocation_copies = 0  # asked for since the pool was made
        self._observer = observer
        self._block_bytes = block_bytes
        self._private: set[int] = set()
        self._counts: dict[int, int] = {}  # references of the other blocks in use; 0 only while pinned
        self._pinned: set[int] = set()
        self._prefixes = PrefixIndex()
        if self._reserved:
            observer.reserved(sorted(self._reserved))

    # Counts, all O(1)

    @property
    def policy(self) -> str:
        return self._policy.name

    def set_policy(self, name: str) -> None:
        """Go on under another policy, `vllm` or `relocating` both: references, prefixes and their order of eviction
        stay. SettingsError where the pool's policy, or the named one, is none of the two. O(blocks)."""
        policy = switch_policy(self._policy, name, self._end)
        policy.set_end(self._service_end)
        self._policy = policy

    def limit_copies(self, count: int) -> None:
        """Let the policy ask for at most so many copies from now on, till the next call: a step's budget. What would
        need more stays where it is, and new blocks are then handed out where stock would."""
        self._policy.copies_left = count

    @property
    def num_free(self) -> int:
        return self._policy.num_free

    @property
    def num_cached(self) -> int:
        return self._policy.num_cached

    @property
    def num_allocatable(self) -> int:
        return self._policy.num_free + self._policy.num_cached

    @property
    def num_used(self) -> int:
        """Referenced blocks that are not pinned."""
        return len(self._private) + len(self._counts) - len(self._pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    # Allocation

    def can_allocate(self, count: int, *, new_sequence: bool) -> bool:
        """Whether `allocate` would succeed. Count cached blocks about to be acquired in: they are allocatable too."""
        return count <= 0 or count <= self.num_allocatable - (self.headroom_blocks if new_sequence else 0)

    def allocate(self, count: int, *, owner: int = 0, position: int = 0, new_sequence: bool = False) -> Allocation:
        """Take `count` blocks with one reference each, evicting cached ones where the policy says so.

        PoolExhausted where there are too few, for a new sequence beside the headroom.
        """
        if count <= 0:
            if count < 0:
                raise PoolError(f"cannot allocate {count} blocks")
            return Allocation([], [])
        copies: list[tuple[int, int]] = []
        blocks = self._policy.take_free(count, self.headroom_blocks if new_sequence else 0)
        if blocks is None:
            blocks, copies = self._evict_for(count, new_sequence)
        self._private.update(blocks)
        self._observer.allocated(blocks[:], owner, position)
        return Allocation(blocks, copies)

    def _evict_for(self, count: int, new_sequence: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not self.can_allocate(count, new_sequence=new_sequence):
            self._observer.counted("allocation_failures")
            raise PoolExhausted(self._shortage(count, new_sequence))
        blocks, evicted, copies = self._policy.take(count)
        if evicted:
            self._prefixes.forget(evicted)
            self._observer.evicted(evicted)
        if copies:
            self._relocated(copies)
        return blocks, copies

    def _relocated(self, copies: list[tuple[int, int]], exchanged: int = 0) -> None:
        """Let prefixes follow their contents. The last `exchanged` copies are the ways back of blocks that changed
        places, which one `moved` tells both ways."""
        self.relocation_copies += len(copies)
        self._prefixes.relocate(copies)
        told = copies[: len(copies) - exchanged]
        self._observer.moved([source for source, _ in told], [home for _, home in told], live=False)
        if exchanged:
            self._observer.counted("relocation_copies", exchanged)
            self._observer.counted("relocation_bytes", exchanged * self._block_bytes)

    def release(self, blocks: Iterable[int], *, owner: int = 0) -> None:
        """Give up one reference each, in the order in which the blocks are to be reused or evicted (engines pass a
        table from its end). The last reference frees a block, or leaves it cached where it has a hash.

        UnknownBlock or DoubleFree name the first bad block.
        """
        given = list(blocks)
        private = self._private
        if private.issuperset(given):
            left = len(private) - len(given)
            private.difference_update(given)
            if len(private) == left:
                if not given:
                    return
                self._policy.give_free(given)
                self._observer.freed(given, owner)
                return
            private.update(given)  # a block was named twice
        self._release_any(given, owner)

    def _release_any(self, blocks: list[int], owner: int) -> None:
        self._require_references(blocks)
        counts, hash_of, pinned = self._counts, self._prefixes.hash_of, self._pinned
        freed: list[int] = []
        cached: list[int] = []
        unshared: list[int] = []
        for block in blocks:
            left = counts.get(block, 1) - 1
            if left or block in pinned:
                counts[block] = left
                unshared.append(block)
                self._settle(block)
            elif block in hash_of:
                del counts[block]
                cached.append(block)
            else:
                self._private.remove(block)
                freed.append(block)
        if unshared:
            self._observer.unshared(unshared, owner)
        if freed:
            self._policy.give_free(freed)
            self._observer.freed(freed, owner)
        if cached:
            self._policy.give_cached(cached)
            self._observer.cached(cached, owner)

    def _require_references(self, blocks: list[int]) -> None:
        counts, private = self._counts, self._private
        once = len(set(blocks)) == len(blocks)
        if once and all(counts.get(block) or block in private for block in blocks):
            return
        for block, times in Counter(blocks).items():
            held = self.references(block)
            if held < times:
                raise DoubleFree(f"block {block} is released {times} times but has {held} references")

    # Sharing

    def find_prefix(self, hashes: Sequence[int]) -> list[int]:
        """The blocks that hold the longest run of `hashes` from its start; no reference is taken."""
        return self._prefixes.find(hashes)

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these are cached with no reference: acquiring them takes as many from the allocatable ones."""
        return sum(map(self._policy.is_cached, blocks))

    def pull(self, hits: Sequence[int]) -> Allocation:
        """Let the policy move the cached ones of `hits` before a sequence acquires them: where they lie then, in order,
        and the copies to make first. Once per sequence, with all of its hits, before any of them is acquired.

        A copy's source may be another's destination here: two blocks changed places.
        """
        blocks, copies = self._policy.pull(hits)
        if copies:
            moved = {hit for hit, block in zip(hits, blocks, strict=True) if hit != block}
            self._relocated(copies, exchanged=len(copies) - len(moved))
        return Allocation(blocks, copies)

    def acquire(self, blocks: Sequence[int], *, owner: int = 0, position: int = 0) -> None:
        """Take one reference each to blocks that hold contents: cached ones come into use (a prefix hit)."""
        self._require_contents(blocks, "acquire")
        index = position
        for was_cached, group in groupby(list(blocks), self._policy.is_cached):
            # Lazy on purpose: a block named twice is cached the first time and shared the second.
            run: list[int] = []
            for block in group:
                run.append(block)
                if was_cached:
                    self._policy.remove_cached((block,))
                    self._counts[block] = 1
                else:
                    self._add_reference(block)
            if was_cached:
                self._observer.reused(run, owner, index)
            else:
                self._observer.shared(run, owner)
            index += len(run)

    def fork(self, blocks: Sequence[int], *, owner: int = 0) -> None:
        """Take one more reference each to blocks in use, for a sequence that goes on from another's."""
        for block in blocks:
            if not self.references(block):
                raise PoolError(f"block {block} cannot be forked: nobody references it")
        for block in blocks:
            self._add_reference(block)
        if blocks:
            self._observer.shared(list(blocks), owner)

    def copy_on_write(self, block: int, *, owner: int = 0, position: int = 0) -> Allocation | None:
        """Give the writer of a shared block one of its own: None where it is not shared, else a new block and the
        copies to make first; the writer's reference to the old block is given up. PoolExhausted where none is left."""
        if self.references(block) < 2:
            if not self.references(block):
                raise PoolError(f"block {block} cannot be written: nobody references it")
            return None
        allocation = self.allocate(1, owner=owner, position=position)
        self._release_any([block], owner)
        self._observer.counted("copy_on_write")
        return Allocation(allocation.blocks, [*allocation.copies, (block, allocation.blocks[0])])

    # Prefix cache

    def register(self, block: int, block_hash: int) -> None:
        """Make a full block in use findable under its hash. Of blocks with one hash the first registered is found."""
        self.register_blocks((block,), (block_hash,))

    def register_blocks(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """`register` for several distinct blocks at once."""
        if not self.prefix_cache:
            return
        if len(blocks) != len(hashes):
            raise PoolError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        self._require_distinct(blocks, "register")
        hash_of = self._prefixes.hash_of
        if not self._private.issuperset(blocks):
            for block, block_hash in zip(blocks, hashes, strict=True):
                if not self.references(block):
                    raise PoolError(f"block {block} cannot be registered: nobody references it")
                if hash_of.get(block, block_hash) != block_hash:
                    raise PoolError(f"block {block} holds another prefix already")
        private, counts = self._private, self._counts
        for block in blocks:
            if block in private:
                private.remove(block)
                counts[block] = 1
        self._prefixes.add(blocks, hashes)

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; False, and nothing done, while any block is in use or pinned."""
        if self._private or self._counts:
            return False
        forgotten = self._policy.forget_cached()
        self._prefixes.clear()
        if forgotten:
            self._observer.evicted(forgotten)
        return True

    # Pins

    def pin(self, blocks: Sequence[int]) -> None:
        """Hold blocks in use or cached in their place; they stay so when their last reference goes, until unpinned."""
        self._require_contents(blocks, "pin")
        self._require_distinct(blocks, "pin")
        for block in blocks:
            if block in self._pinned:
                raise PoolError(f"block {block} is pinned already")
        for block in blocks:
            if self._policy.is_cached(block):
                self._policy.remove_cached((block,))
                self._counts[block] = 0
            elif block in self._private:
                self._private.remove(block)
                self._counts[block] = 1
            self._pinned.add(block)
        if blocks:
            self._observer.pinned(list(blocks))

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let pinned blocks go: USED where referenced, else CACHED where they hold a prefix, else FREE."""
        self._require_distinct(blocks, "unpin")
        for block in blocks:
            self._check_id(block)
            if block not in self._pinned:
                raise PoolError(f"block {block} is not pinned")
        used: list[int] = []
        cached: list[int] = []
        freed: list[int] = []
        for block in blocks:
            self._pinned.remove(block)
            if self._counts[block]:
                used.append(block)
                self._settle(block)
            else:
                del self._counts[block]
                (cached if block in self._prefixes.hash_of else freed).append(block)
        if used or freed:
            self._observer.unpinned(used + freed, cached=False)
        if cached:
            self._policy.give_cached(cached)
            self._observer.unpinned(cached, cached=True)
        if freed:
            self._policy.give_free(freed)
            self._observer.freed(freed)

    # Looking

    def references(self, block: int) -> int:
        """References to a block; UnknownBlock where the pool does not have it or never allocates it."""
        self._check_id(block)
        return 1 if block in self._private else self._counts.get(block, 0)

    def state(self, block: int) -> BlockState:
        """What a block is now; UnknownBlock where the pool does not have it."""
        if block in self._reserved:
            return BlockState.RESERVED
        self._check_id(block)
        if block in self._pinned:
            return BlockState.PINNED
        if block in self._private or block in self._counts:
            return BlockState.USED
        return BlockState.CACHED if self._policy.is_cached(block) else BlockState.FREE

    def states(self, used: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        """A fresh column of BlockState values, one a block. Where it can, it is made without a step for each block, or
        but for those that are not what most are: whoever asks for it holds the engine up.

        `used` are blocks in use, each once, by somebody's tables: they spare the steps over those where they are as
        many as the pool counts, and are not looked at otherwise."""
        policy = self._policy
        column = np.full(self.num_blocks, BlockState.USED, dtype=np.uint8)
        if not policy.mark(column):
            if isinstance(policy, StockPolicy) and policy.num_cached > policy.num_free:
                column.fill(BlockState.CACHED)
                column[_ids(policy.free_blocks())] = BlockState.FREE
            else:
                column.fill(BlockState.FREE)
                column[_ids(policy.cached_blocks())] = BlockState.CACHED
            if used is None or used.size != len(self._private) + len(self._counts):
                column[_ids(self._private)] = BlockState.USED
                used = _ids(self._counts)
            column[used] = BlockState.USED
        column[_ids(self._pinned)] = BlockState.PINNED
        column[_ids(self._reserved)] = BlockState.RESERVED
        return column

    # Parts

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise UnknownBlock(f"block {block} is outside the pool of {self.num_blocks} blocks")
        if block in self._reserved:
            raise UnknownBlock(f"block {block} is reserved and never allocated")

    def _require_contents(self, blocks: Sequence[int], verb: str) -> None:
        has_contents: Callable[[int], bool] = self._policy.is_cached
        for block in blocks:
            if block not in self._private and block not in self._counts and not has_contents(block):
                self._check_id(block)
                raise PoolError(f"cannot {verb} block {block}: it is free")

    def _require_distinct(self, blocks: Sequence[int], verb: str) -> None:
        if len(set(blocks)) != len(blocks):
            raise PoolError(f"cannot {verb} block {Counter(blocks).most_common(1)[0][0]} twice in one call")

    def _add_reference(self, block: int) -> None:
        if block in self._private:
            self._private.remove(block)
            self._counts[block] = 2
        else:
            self._counts[block] += 1

    def _settle(self, block: int) -> None:
        """Make a counted block private again where it can be."""
        if self._counts[block] == 1 and block not in self._prefixes.hash_of and block not in self._pinned:
            del self._counts[block]
            self._private.add(block)

    def _shortage(self, count: int, new_sequence: bool) -> str:
        text = f"{count} blocks asked for, {self.num_allocatable} of {self.usable_blocks} allocatable"
        return f"{text}, {self.headroom_blocks} of them held back from new sequences" if new_sequence else text


def _ids(blocks: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(blocks, dtype=np.int64, count=len(blocks))
