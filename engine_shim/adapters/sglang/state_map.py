"""A map of states alone, for pools of so many slots that telling of each one by one would cost more than they do.

What is published is the difference between two arrays of states, at memory speed: a byte a slot, the counts, and the
counters that follow from it. There are no owners, no ages and no events: those cost a Python number for each slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_shim import layout
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.errors import MapUnavailable
from engine_shim.layout import COUNTERS, BlockState
from engine_shim.runs import find_runs

_COUNTER = {name: index for index, name in enumerate(COUNTERS)}
_BITS = 3  # that tell a state
_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)
# Every way from a state to another, and the counter that it adds to.
_TURNS = {
    (_FREE, _USED): "blocks_allocated",
    (_FREE, _CACHED): "blocks_allocated",
    (_USED, _FREE): "blocks_freed",
    (_USED, _CACHED): "blocks_freed",
    (_CACHED, _USED): "blocks_reused",
    (_CACHED, _FREE): "blocks_evicted",
    (_FREE, int(BlockState.RESERVED)): None,  # the padding, in the beginning
}
_WORD = np.dtype(np.uint64)


class StateMap:
    """One map, written by one thread. `publish` raises what goes wrong, for the adapter's guard to deal with.

    `states` is what `publish` shows, (blocks,); `padded` is the same with two places or more behind it.
    """

    def __init__(self, writer: MapWriter, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._writer = writer
        self._clock_ns = clock_ns
        shown = writer.columns["state"]
        whole = (len(shown) + 1) // layout.SEGMENT_BLOCKS + 1  # segments, with two places to spare
        self._padded: NDArray[np.uint8] = np.zeros((whole, layout.SEGMENT_BLOCKS), np.uint8)
        self.padded = self._padded.reshape(-1)
        self.states = self.padded[: len(shown)]
        self.states[:] = shown
        self._shown = self._padded.copy()
        self._counted: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """Where the map is."""
        return self._writer.path

    def counted(self, name: str, amount: int = 1) -> None:
        """Add to one of layout.COUNTERS with the next publish."""
        self._counted[name] = self._counted.get(name, 0) + amount

    def publish(self, running: int, waiting: int, steps: int) -> None:
        """Show `states`, and that so many steps have ended since the last time."""
        writer = self._writer
        if not writer.active:  # a forked child: the map is the parent's
            raise MapUnavailable(f"{writer.path}: this process is a fork of the map's writer")
        began = time.thread_time_ns()
        self.padded[len(self.states) :] = 0
        # Whole segments, of which few have changed, by words and by bytes: numbers for each slot would cost ten times.
        differs = (self._padded.view(_WORD) != self._shown.view(_WORD)).any(axis=1)
        changed = np.flatnonzero(differs)
        after = self._padded[changed]
        turns = self._shown[changed]
        turns <<= _BITS
        turns |= after
        counts, self._counted = self._counted, {}
        counts["steps"] = counts.get("steps", 0) + steps
        gained = [0] * len(writer.live.state_counts)
        for (old, new), counter in _TURNS.items():
            if turned := int(np.count_nonzero(turns == (old << _BITS | new))):
                gained[old] -= turned
                gained[new] += turned
                if counter is not None:
                    counts[counter] = counts.get(counter, 0) + turned
        starts, lengths = (found * layout.SEGMENT_BLOCKS for found in find_runs(differs))
        runs = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        live = writer.live
        now = self._clock_ns()
        segments, column = writer.tables["segments"], writer.columns["state"]
        with writer.publishing():
            segments[changed] += np.uint64(1)  # odd while it is written, and later another word than before
            for blocks in runs:
                column[blocks] = self.states[blocks]
            segments[changed] += np.uint64(1)
            live.state_counts[:] += np.array(gained, np.int64).astype(np.uint64)
            for name, amount in counts.items():
                live.counters[_COUNTER[name]] += np.uint64(amount)
            live.running_requests[0], live.waiting_requests[0] = running, waiting
            if steps:
                live.last_step_unix_ns[0] = now
            live.published_unix_ns[0] = now
            live.counters[_COUNTER["shim_cpu_ns"]] += np.uint64(time.thread_time_ns() - began)
        self._shown[changed] = after

    def degrade(self) -> None:
        """Mark the map as one that is not kept up any more."""
        if self._writer.active:
            self._writer.live.flags[0] = int(self._writer.live.flags[0]) | layout.FLAG_DEGRADED

    def close(self) -> None:
        """Remove the map. Idempotent."""
        self._writer.close()
