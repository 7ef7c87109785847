"""The tier above blocks: which sectors hold anything, and for which kind of attention."""

from __future__ import annotations

from collections.abc import Sequence

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.layout import NO_GROUP, BlockState

_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)


class SectorBook:
    """Counts, for each sector, its blocks in use and cached, and tells the sectors' map what follows from that.

    A sector is USED as long as one of its blocks is, else CACHED as long as one is cached, else FREE: Transformers
    takes an empty sector back before it next schedules. Its group is the kind of attention that it was given to.
    """

    def __init__(self, sectors: int, reserved: int, observer: MapObserver) -> None:
        self.observer = observer
        self._used = [0] * sectors
        self._cached = [0] * sectors
        self._group = [NO_GROUP] * sectors
        self._shown = [(_FREE, NO_GROUP)] * sectors
        self._changed: set[int] = set()
        observer.reserved(range(reserved))

    def changed(self, sectors: Sequence[int], group: int, used: int, cached: int) -> None:
        """One block in each of these (which may repeat) became used or stopped being it, and likewise cached."""
        for sector in sectors:
            self._used[sector] += used
            self._cached[sector] += cached
            self._group[sector] = group
        self._changed.update(sectors)

    def forget(self) -> None:
        """Everything is going to be told anew."""
        count = len(self._used)
        self._used, self._cached = [0] * count, [0] * count
        self._changed.update(range(count))

    def settle(self) -> None:
        """Tell the map what changed since the last time."""
        for sector in sorted(self._changed):
            state = _USED if self._used[sector] > 0 else _CACHED if self._cached[sector] > 0 else _FREE
            group = NO_GROUP if state == _FREE else self._group[sector]
            if self._shown[sector] != (state, group):
                self._tell(sector, state, group)
                self._shown[sector] = (state, group)
        self._changed.clear()

    def _tell(self, sector: int, state: int, group: int) -> None:
        observer, one = self.observer, [sector]
        before, before_group = self._shown[sector]
        if before != _FREE and (state == _FREE or group != before_group):
            (observer.freed if before == _USED else observer.evicted)(one)
            before = _FREE
        if before == _FREE and state != _FREE:
            observer.allocated(one, group=group)
            before = _USED
        if before == _USED and state == _CACHED:
            observer.cached(one)
        elif before == _CACHED and state == _USED:
            observer.reused(one, group=group)
