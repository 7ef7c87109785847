"""What a block pool tells about itself, and the null observer for pools that nobody watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PoolObserver(Protocol):
    """Receives every change of a block pool, on the engine's own thread, and never raises.

    Each call names blocks that share one outcome. A sequence that is handed over must not be changed afterwards.
    `owner` is what `open_owner` returned; 0 stands for nobody. `position` is the logical index, in the owner's
    sequence, of the first of the blocks; the others follow it.
    """

    def open_owner(self, request_id: str, lora: str = "", cache_salt: str = "") -> int:
        """Announce a sequence; the result marks its blocks. 0 when the owner table is full."""
        ...

    def close_owner(self, owner: int) -> None:
        """The sequence has ended; its blocks are released apart from this."""
        ...

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        """FREE to USED: one reference, no tokens yet."""
        ...

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None:
        """CACHED to USED by a prefix hit: one reference, contents kept."""
        ...

    def shared(self, blocks: Sequence[int], owner: int = 0) -> None:
        """One more reference to blocks in use: a prefix hit on a live block, or a fork."""
        ...

    def unshared(self, blocks: Sequence[int], owner: int = 0) -> None:
        """One reference fewer; the blocks stay in use."""
        ...

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None:
        """USED to FREE: the last reference is gone and the contents with it."""
        ...

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None:
        """USED to CACHED: the last reference is gone, the contents stay as an evictable prefix."""
        ...

    def evicted(self, blocks: Sequence[int]) -> None:
        """CACHED to FREE: the contents are given up."""
        ...

    def pinned(self, blocks: Sequence[int]) -> None:
        """USED or CACHED to PINNED: must not move now (in transfer, in flight)."""
        ...

    def unpinned(self, blocks: Sequence[int], *, cached: bool) -> None:
        """PINNED back to CACHED, or to USED where `cached` is false."""
        ...

    def reserved(self, blocks: Sequence[int]) -> None:
        """FREE to RESERVED: never allocatable."""
        ...

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None:
        """Contents, references, owner and state went from sources[i] to destinations[i], and those of destinations[i]
        the other way: the sources are FREE, or CACHED where a prefix had to change places. No block is named twice.

        `live` tells a move of referenced blocks (compaction) from a relocation of cached ones.
        """
        ...

    def wrote(self, blocks: Sequence[int], block_tokens: Sequence[int], new_tokens: int) -> None:
        """Blocks now hold block_tokens[i] tokens each; `new_tokens` were written to the pool in all."""
        ...

    def progressed(self, owners: Sequence[int], tokens: Sequence[int]) -> None:
        """Sequences now have tokens[i] tokens each."""
        ...

    def counted(self, name: str, amount: int = 1) -> None:
        """Add to one of layout.COUNTERS that no other call implies (preemptions, prefix_query_tokens, ...)."""
        ...

    def step_ended(self, running: int, waiting: int) -> None:
        """The end of an engine step: everything since the last one becomes visible at once."""
        ...


class NullObserver:
    """Watches nothing and costs a call."""

    def open_owner(self, request_id: str, lora: str = "", cache_salt: str = "") -> int:
        return 0

    def close_owner(self, owner: int) -> None: ...

    def allocated(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None: ...

    def reused(self, blocks: Sequence[int], owner: int = 0, position: int = 0, group: int = 0) -> None: ...

    def shared(self, blocks: Sequence[int], owner: int = 0) -> None: ...

    def unshared(self, blocks: Sequence[int], owner: int = 0) -> None: ...

    def freed(self, blocks: Sequence[int], owner: int = 0) -> None: ...

    def cached(self, blocks: Sequence[int], owner: int = 0) -> None: ...

    def evicted(self, blocks: Sequence[int]) -> None: ...

    def pinned(self, blocks: Sequence[int]) -> None: ...

    def unpinned(self, blocks: Sequence[int], *, cached: bool) -> None: ...

    def reserved(self, blocks: Sequence[int]) -> None: ...

    def moved(self, sources: Sequence[int], destinations: Sequence[int], *, live: bool) -> None: ...

    def wrote(self, blocks: Sequence[int], block_tokens: Sequence[int], new_tokens: int) -> None: ...

    def progressed(self, owners: Sequence[int], tokens: Sequence[int]) -> None: ...

    def counted(self, name: str, amount: int = 1) -> None: ...

    def step_ended(self, running: int, waiting: int) -> None: ...


NO_OBSERVER: PoolObserver = NullObserver()
