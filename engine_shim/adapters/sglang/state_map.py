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

_COUNTER = {name: index for index, name in enumerate(COUNTERS)}
_STATES = 8  # as many as LIVE counts
_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)
# From a state to a state, by the counter that it adds to.
_MEANS = (
    ("blocks_allocated", ((_FREE, _USED), (_FREE, _CACHED))),
    ("blocks_freed", ((_USED, _FREE), (_USED, _CACHED))),
    ("blocks_reused", ((_CACHED, _USED),)),
    ("blocks_evicted", ((_CACHED, _FREE),)),
)


class StateMap:
    """One map, written by one thread. `publish` raises what goes wrong, for the adapter's guard to deal with."""

    def __init__(self, writer: MapWriter, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._writer = writer
        self._clock_ns = clock_ns
        self._shown: NDArray[np.uint8] = writer.columns["state"].copy()
        self._counted: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """Where the map is."""
        return self._writer.path

    def counted(self, name: str, amount: int = 1) -> None:
        """Add to one of layout.COUNTERS with the next publish."""
        self._counted[name] = self._counted.get(name, 0) + amount

    def publish(self, states: NDArray[np.uint8], running: int, waiting: int, steps: int) -> None:
        """Show these states, (n,), and that so many steps have ended since the last time."""
        writer = self._writer
        if not writer.active:  # a forked child: the map is the parent's
            raise MapUnavailable(f"{writer.path}: this process is a fork of the map's writer")
        began = time.thread_time_ns()
        changed = np.flatnonzero(states != self._shown)
        before, after = self._shown[changed], states[changed]
        turns = np.bincount(before.astype(np.int64) * _STATES + after, minlength=_STATES * _STATES)
        turns = turns.reshape(_STATES, _STATES)
        gained = turns.sum(axis=0) - turns.sum(axis=1)
        counts, self._counted = self._counted, {}
        counts["steps"] = counts.get("steps", 0) + steps
        for name, pairs in _MEANS:
            counts[name] = counts.get(name, 0) + sum(int(turns[pair]) for pair in pairs)
        live = writer.live
        now = self._clock_ns()
        segments = writer.tables["segments"]
        turned = np.minimum(np.bincount(changed // layout.SEGMENT_BLOCKS, minlength=len(segments)), 1).astype(np.uint64)
        with writer.publishing():
            segments += turned  # odd while it is written, and what was written in between has another word than before
            writer.columns["state"][changed] = after
            segments += turned
            live.state_counts[:] = live.state_counts + gained.astype(np.uint64)
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
