"""Reads every map once a tick and keeps the latest view; one engine's fault never costs another its sample."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from agent.discovery import FoundMap, scan
from agent.follower import Follower, OpenMap
from agent.history import History
from agent.judgement import Limits
from agent.log import EventLog
from agent.model import EMPTY_VIEW, AgentView, Clock, PoolSample


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """How the sampler goes about it; times in seconds."""

    interval_seconds: float = 1.0
    gone_seconds: float = 300.0  # how long the last map of an engine that ended stays in view
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
    ) -> None:
        self.settings = settings or SamplerSettings()
        self._folders = folders
        self._open_map = open_map
        self._history = history
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.sampler"))
        self._followers: dict[str, Follower] = {}
        self._expired: frozenset[tuple[int, int]] = frozenset()  # inodes of dead maps that left the view
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

    def tick(self) -> AgentView:
        """Look for maps, read each, and publish the new view."""
        began, now_unix = self._clock.monotonic(), self._clock.wall()
        folders = tuple(self._folders())
        followed = frozenset(follower.found.inode for follower in self._followers.values())
        found = scan(folders, followed | self._expired)
        self._expired &= frozenset(one.inode for one in found.maps)
        unreadable = [*found.unreadable, *self._follow(found.maps)]
        samples: dict[str, PoolSample] = {}
        for id, follower in sorted(self._followers.items()):
            sample = self._poll(follower, now_unix)
            if follower.fault:
                unreadable.append(f"{follower.found.path}: {follower.fault}")
            if follower.gone_for_seconds(now_unix) > self.settings.gone_seconds:
                self._expire(follower)
            elif sample is not None:
                samples[id] = sample
                self._log.on_change("engine", id, sample.state, reason=sample.reason)
        for line in unreadable:
            self._log.on_change("unreadable", line.partition(": ")[0], line, level=logging.WARNING)
        self._view = AgentView(
            generation=self._view.generation + 1,
            taken_unix=now_unix,
            samples=MappingProxyType(samples),
            unreadable=tuple(unreadable),
            folders=tuple(str(folder) for folder in folders),
            sample_seconds=self._clock.monotonic() - began,
        )
        for listener in self._listeners:
            listener()
        return self._view

    def _poll(self, follower: Follower, now_unix: float) -> PoolSample | None:
        try:
            return follower.poll(now_unix)
        except Exception as error:  # noqa: BLE001 - a fault of ours with one map must not cost the others their sample
            follower.fail(error)
            return follower.latest

    def _follow(self, maps: Iterable[FoundMap]) -> list[str]:
        """Start to follow new files and let go of what is gone for good; returns the files left out and why."""
        left_out: list[str] = []
        present: set[str] = set()
        for found in maps:
            present.add(found.id)
            follower = self._followers.get(found.id)
            if found.inode in self._expired or (follower is not None and follower.found.inode == found.inode):
                continue
            if follower is None:
                self._followers[found.id] = self._new_follower(found)
            elif found.path == follower.found.path or follower.gone_for_seconds(self._clock.wall()) > 0:
                # The writer started anew: under the same name, or in another folder. The old file may still be there.
                follower.close()
                self._expired |= {follower.found.inode}
                self._followers[found.id] = self._new_follower(found)
            else:
                left_out.append(f"{found.path}: left out, {follower.found.path} has the same name")
        for id, follower in list(self._followers.items()):
            # A file that was removed can still be read while it is open.
            if id not in present and not follower.is_open:
                self._followers.pop(id)
                self._log.forget(id)
        return left_out

    def _new_follower(self, found: FoundMap) -> Follower:
        return Follower(found, self._open_map, self._history, self.settings.limits, self._clock)

    def _expire(self, follower: Follower) -> None:
        follower.close()
        del self._followers[follower.found.id]
        self._expired |= {follower.found.inode}
        self._history.drop(follower.found.id)
        self._log.forget(follower.found.id)
