"""The block copies of one engine step, made in one go before its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from engine_shim.pool.block_pool import Allocation


class CopyBatch:
    """Collects copies as they are asked for, and traces each destination back to the block that holds its contents
    now: nothing has been copied yet, so a chain of copies is one copy from where the chain began."""

    def __init__(self) -> None:
        self._origins: dict[int, int] = {}  # destination to source, both as they are before the batch

    def allocated(self, allocation: Allocation) -> None:
        """Add an allocation's copies. What was to be copied to its new blocks before is not wanted any more."""
        origins = self._origins
        if origins:
            copies = [(origins.get(source, source), home) for source, home in allocation.copies]
            for block in allocation.blocks:
                origins.pop(block, None)
            self._put(copies)
        else:
            self._put(allocation.copies)

    def pulled(self, hits: Allocation) -> None:
        """Add the copies of hits that were moved before they are acquired."""
        origins = self._origins
        self._put([(origins.get(source, source), home) for source, home in hits.copies] if origins else hits.copies)

    def take(self) -> list[tuple[int, int]]:
        """All copies so far, (source, destination), ascending by source and each destination once: all are to be read
        before any is written. The batch is empty then."""
        copies = sorted((source, home) for home, source in self._origins.items())
        self._origins.clear()
        return copies

    def _put(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, home in copies:
            if source == home:  # there and back
                self._origins.pop(home, None)
            else:
                self._origins[home] = source
