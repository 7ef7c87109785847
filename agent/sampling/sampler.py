"""Reads every map once a tick and keeps the latest view; one engine's fault never costs another its sample."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from agent.history import History
from agent.log import EventLog
from agent.sampling.deputy import Deputy
from agent.sampling.discovery import MAX_MAPS, MAX_NAMED, FoundMap, Scan, name_some, printable, scan
from agent.sampling.follower import READ_TIMEOUT_SECONDS, Follower, OpenMap
from agent.sampling.judgement import Limits
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock, PoolSample

LEAST_HUNG_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """How the sampler goes about it; times in seconds."""

    interval_seconds: float = 1.0
    gone_seconds: float = 300.0  # how long the last map of an engine that ended stays in view
    max_open: int = MAX_MAPS  # maps whose files are kept open
    torn_seconds: float = READ_TIMEOUT_SECONDS  # that a tick may wait for whole snapshots, over all maps
    # A read that does not come back, as from a file system that hangs, is not waited for longer than this, and all of
    # a tick's not longer than that.
    hung_seconds: float = 2.0
    all_hung_seconds: float = 4.0
    limits: Limits = field(default_factory=Limits)


class Sampler:
    """`tick()` samples once; `run()` does so at each interval until `stop()`. `view` is the latest result."""

    def __init__(
        self,
        folders: Callable[[], Sequence[Path]],
        open_map: OpenMap,
        history: History,
        *,
        settings: SamplerSettings | None = None,
        clock: Clock | None = None,
        log: EventLog | None = None,
        find: Callable[[Sequence[Path], frozenset[tuple[int, int]]], Scan] = scan,
    ) -> None:
        """`find` looks into the folders; the inodes that it is given are known to be maps."""
        self.settings = settings or SamplerSettings()
        self._find = find
        self._folders = folders
        self._open_map = open_map
        self._history = history
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.sampler"))
        self._followers: dict[str, Follower] = {}
        self._expired: dict[tuple[int, int], tuple[int, int]] = {}  # stamps of dead maps that left the view, by inode
        self._deputy = Deputy("map reader")
        self._view = EMPTY_VIEW
        self._stopping = threading.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def view(self) -> AgentView:
        return self._view

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each tick, on the sampler's thread."""
        self._listeners.append(listener)

    def run(self) -> None:
        """Tick at whole intervals; a tick that takes longer than one skips those it missed."""
        due = self._clock.monotonic()
        while not self._stopping.is_set():
            try:
                self.tick()
                self._log.on_change("sampler", "tick", "ok", quiet_first="ok")
            except Exception as error:  # noqa: BLE001 - the thread must outlive any fault; /healthz tells that ticks fail
                self._log.on_change("sampler", "tick", f"{type(error).__name__}: {error}", level=logging.ERROR)
            now = self._clock.monotonic()
            due = max(due + self.settings.interval_seconds, now)
            self._stopping.wait(due - now)

    def stop(self) -> None:
        """End `run` at its next wait. May be called from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Close every map; the sampler is of no use afterwards."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()
        self._deputy.close()

    def tick(self) -> AgentView:
        """Look for maps, read each, and publish the new view."""
        began, now_unix = self._clock.monotonic(), self._clock.wall()
        folders = tuple(self._folders())
        followed = frozenset(follower.found.inode for follower in self._followers.values())
        found = self._find(folders, followed | frozenset(self._expired))
        present = frozenset(one.inode for one in found.maps)
        self._expired = {inode: stamp for inode, stamp in self._expired.items() if inode in present}
        left_out = self._follow(found.maps)
        samples, faults = self._poll_all(now_unix)
        unreadable = name_some([*faults, *left_out, *found.unreadable], found.more)
        for id, sample in samples.items():
            self._log.on_change("engine", id, sample.state, reason=sample.reason)
        for line in unreadable[:MAX_NAMED]:
            self._log.on_change("unreadable", line.partition(": ")[0], line, level=logging.WARNING)
        self._view = AgentView(
            generation=self._view.generation + 1,
            taken_unix=now_unix,
            samples=MappingProxyType(samples),
            unreadable=unreadable,
            folders=tuple(printable(folder) for folder in folders),
            sample_seconds=self._clock.monotonic() - began,
            taken_monotonic=began,
        )
        for listener in self._listeners:
            listener()
        return self._view

    def _poll_all(self, now_unix: float) -> tuple[dict[str, PoolSample], list[str]]:
        """A sample of each pool by id, and the maps that gave none, with the reason."""
        samples: dict[str, PoolSample] = {}
        faults: list[str] = []
        waiting, hanging = self.settings.torn_seconds, self.settings.all_hung_seconds
        is_open = sum(follower.is_open for follower in self._followers.values())
        for id, follower in sorted(self._followers.items()):
            was_open, began = follower.is_open, self._clock.monotonic()
            patience, may_open = max(waiting, 0.0), was_open or is_open < self.settings.max_open
            in_time = not follower.busy and self._deputy.do(
                partial(self._poll, follower, now_unix, patience, may_open),
                max(min(self.settings.hung_seconds, hanging), LEAST_HUNG_SECONDS),
            )
            sample, fault = follower.latest, follower.fault
            if in_time:
                waiting -= follower.waited_seconds
                is_open += follower.is_open - was_open
            else:
                hanging -= self._clock.monotonic() - began
                fault = "a read of it does not come back; look at its file system"
                sample = None if sample is None else replace(sample, state="unreadable", reason=fault)
            if fault:
                faults.append(f"{printable(follower.found.path)}: {fault}")
            if in_time and follower.gone_for_seconds() > self.settings.gone_seconds:
                self._expire(follower)
            elif sample is not None:
                samples[id] = sample
        return samples, faults

    def _poll(self, follower: Follower, now_unix: float, patience_seconds: float, may_open: bool) -> None:
        try:
            follower.poll(now_unix, patience_seconds=patience_seconds, may_open=may_open)
        except Exception as error:  # noqa: BLE001 - a fault of ours with one map must not cost the others their sample
            follower.fail(error)

    def _follow(self, maps: Iterable[FoundMap]) -> list[str]:
        """Start to follow new files and let go of what is gone for good; returns the files left out and why."""
        left_out: list[str] = []
        present: set[str] = set()
        for found in maps:
            present.add(found.id)
            follower = self._followers.get(found.id)
            if self._expired.get(found.inode) == found.stamp:
                continue
            if follower is not None and follower.found.inode == found.inode:
                follower.found = found  # its stamp may be another
                continue
            if follower is None:
                self._followers[found.id] = self._new_follower(found)
            elif found.path == follower.found.path or follower.is_gone:
                # The writer started anew: under the same name, or in another folder. The old file may still be there.
                follower.close()
                self._expired[follower.found.inode] = follower.found.stamp
                self._followers[found.id] = self._new_follower(found)
            else:
                same = printable(follower.found.path)
                left_out.append(f"{printable(found.path)}: left out, {same} has the same name")
        for id, follower in list(self._followers.items()):
            # A file that was removed can still be read while it is open, and an engine that is gone is still shown.
            if id not in present and not (follower.is_open or follower.is_gone or follower.busy):
                self._followers.pop(id)
                self._log.forget(id)
        return left_out

    def _new_follower(self, found: FoundMap) -> Follower:
        return Follower(found, self._open_map, self._history, self.settings.limits, self._clock)

    def _expire(self, follower: Follower) -> None:
        follower.close()
        del self._followers[follower.found.id]
        self._expired[follower.found.inode] = follower.found.stamp
        self._history.drop(follower.found.id)
        self._log.forget(follower.found.id)
