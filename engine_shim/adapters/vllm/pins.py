"""Blocks that must not move now because a KV connector reads or fills them, and who holds them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine_shim.allocation_map.map_observer import MapObserver

CONNECTOR = "\x00connector"  # holds that a connector took itself; no request id is like this


class PinBook:
    """Counts the holds on each block; the map shows PINNED from the first to the last."""

    def __init__(self, pool: Any, observer: MapObserver) -> None:
        self._pool = pool
        self._observer = observer
        self._holds: Counter[int] = Counter()
        self._held: dict[str, Counter[int]] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._holds

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, holder: str, blocks: Sequence[int]) -> None:
        """`holder` keeps these blocks where they are."""
        if not blocks:
            return
        fresh = [block for block in blocks if not self._holds[block]]
        self._held.setdefault(holder, Counter()).update(blocks)
        self._holds.update(blocks)
        if fresh:
            self._observer.pinned(fresh)

    def release(self, holder: str, blocks: Sequence[int] | None = None) -> None:
        """`holder` gives up these holds, or all it has. Blocks that others use are USED again; vLLM has freed the
        rest, and the map knows."""
        held = self._held.get(holder)
        if held is None:
            return
        given_up = dict(held) if blocks is None else {block: 1 for block in blocks if held[block]}
        back: list[int] = []
        for block, count in given_up.items():
            held[block] -= count
            self._holds[block] -= count
            if self._holds[block] <= 0:
                del self._holds[block]
                if self._pool.blocks[block].ref_cnt > 0:
                    back.append(block)
        if blocks is None or not +held:
            del self._held[holder]
        if back:
            self._observer.unpinned(back, cached=False)
