"""Keeps a black box of each engine that ends, on a thread of its own, within bounds of number and size.

Each engine's map is held open from when it is first seen: one that vanishes with its engine, as it does where that ends
in good order, can be read all the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent.blackbox.contents import Ended, box_members, last_sign_unix, write_archive
from agent.history.entries import Mark
from agent.history.model import History
from agent.log import EventLog
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock, PoolSample
from alerts.database import DatabaseUnusable
from engine_shim.allocation_map.claim import writer_holds
from engine_shim.layout import HEADER
from engine_shim.text import safe_name

FOLDER, SUFFIX = "blackbox", ".tar.gz"
MAX_BYTES = 256 * 2**20  # of all boxes
MAX_HELD = 128  # maps that are held open; beyond that one that vanishes at once is boxed from its last sample
RETRY_SECONDS = 60.0
STOP_SECONDS = 3.0


@dataclass(slots=True)
class _Watched:
    """One start of one engine's pool."""

    sample: PoolSample
    file: int | None
    boxed: bool = False
    retry_at: float = 0.0  # monotonic

    @property
    def incarnation(self) -> int:
        return self.sample.identity.incarnation

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class BlackBoxes:
    """`notice` may come from any thread; `run` is one thread's, or `look` is called instead."""

    def __init__(
        self,
        state_folder: Path,
        most: int,
        history: History,
        *,
        marks: Callable[[str, float, float], Sequence[Mark]] = lambda id, start, end: (),
        settings: Mapping[str, Any] | None = None,
        max_held: int = MAX_HELD,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        """At most `most` boxes are kept; with 0, none is made. `marks` tells what happened to a pool in a time."""
        self.folder = state_folder / FOLDER
        self._most = most
        self._max_held = min(max_held, MAX_HELD)
        self._history = history
        self._marks = marks
        self._settings = dict(settings or {})
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.blackbox"))
        self._watched: dict[str, _Watched] = {}
        self._view = EMPTY_VIEW
        self._news = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self.run, name="black boxes", daemon=True)

    def start(self) -> None:
        if not self._most:
            return
        with suppress(OSError):  # what an agent left that was killed at work
            for path in (*self.folder.glob(".*.part"), *self.folder.glob(".map-*")):
                path.unlink(missing_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """What an engine leaves behind that ends from now on is boxed by the next agent, if its map is still there."""
        self._stopping = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def notice(self, view: AgentView) -> None:
        """There are new samples; returns at once."""
        self._view = view
        self._news.set()

    def run(self) -> None:
        """Look at each new view until `stop`."""
        while True:
            self._news.wait()
            self._news.clear()
            if self._stopping:
                break
            try:
                self.look(self._view)
                self._log.on_change("black boxes", "look", "ok", quiet_first="ok")
            except Exception as error:  # noqa: BLE001 - the thread must outlive a fault of ours with one engine
                self._log.on_change("black boxes", "look", f"{type(error).__name__}: {error}", level=logging.ERROR)
        for watched in self._watched.values():
            watched.close()

    def look(self, view: AgentView) -> None:
        """Box every engine that has ended since the last look."""
        if not self._most:
            return
        for id, sample in view.samples.items():
            watched = self._watched.get(id)
            if watched is not None and watched.incarnation != sample.identity.incarnation:
                self._end(id, watched, "replaced", "the engine was started anew")
                watched = None
            if watched is None:
                watched = self._watched[id] = self._begin(id, sample)
            elif not watched.boxed:
                watched.sample = sample
            if sample.state == "gone" or (sample.state == "unreadable" and _is_over(watched.file)):
                self._box(id, watched, sample.state, sample.reason)
        for id in [id for id in self._watched if id not in view.samples]:
            self._end(id, self._watched.pop(id), "gone", "its map is not there any more")

    def _begin(self, id: str, sample: PoolSample) -> _Watched:
        """Hold the map of a pool that is new here; where a box of this start is there already, that is all."""
        if any(self.folder.glob(f"*{_tail(id, sample)}")):
            return _Watched(sample, None, boxed=True)
        file = None
        if sum(one.file is not None for one in self._watched.values()) < self._max_held:
            with suppress(OSError):
                file = _hold(sample)
        return _Watched(sample, file)

    def _end(self, id: str, watched: _Watched, state: str, reason: str) -> None:
        if not watched.boxed:
            self._box(id, watched, state, reason)
        watched.close()

    def _box(self, id: str, watched: _Watched, state: str, reason: str) -> None:
        now = self._clock.monotonic()
        if watched.boxed or now < watched.retry_at:
            return
        watched.retry_at = now + RETRY_SECONDS  # also where a fault of ours ends this
        snapshot = watched.sample.snapshot
        ended_unix = last_sign_unix(watched.sample.identity, snapshot)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if watched.file is None:
                with suppress(OSError):
                    watched.file = _hold(watched.sample)
            marks: Sequence[Mark] = ()
            with suppress(DatabaseUnusable):
                marks = self._marks(id, ended_unix - 86_400.0, self._clock.wall() + 1.0)
            ended = Ended(
                id, watched.sample.identity, state, reason, watched.file, snapshot, settings=self._settings, marks=marks
            )
            moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(max(0.0, ended_unix)))
            path = self.folder / f"{moment}-{_tail(id, watched.sample)}"
            size = write_archive(path, box_members(ended, self._history, self.folder), ended_unix)
        except OSError as error:
            why = error.strerror or type(error).__name__
            self._log.event("no black box", level=logging.WARNING, engine=id, reason=why, action="make room")
            return
        watched.boxed = True
        watched.close()
        self._log.event("black box", engine=id, reason=reason, file=str(path), size_bytes=size)
        self._keep_bounds()

    def _keep_bounds(self) -> None:
        """The newest boxes, by when their engines ended, up to the number and the size; one is always kept."""
        total = 0
        for number, path in enumerate(sorted(self.folder.glob(f"*{SUFFIX}"), reverse=True)):
            with suppress(OSError):
                total += path.stat().st_size
                if number and (number >= self._most or total > MAX_BYTES):
                    path.unlink()


def _tail(id: str, sample: PoolSample) -> str:
    """What the name of a box ends with, and tells the pool's start by."""
    return f"{safe_name(id)}-{sample.identity.incarnation:016x}{SUFFIX}"


def _hold(sample: PoolSample) -> int | None:
    """The map of this start, open; None where the path leads to another one. Raises OSError."""
    file = os.open(sample.snapshot.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    raw = os.pread(file, HEADER.itemsize, 0)
    if len(raw) == HEADER.itemsize and int(np.frombuffer(raw, HEADER)[0]["incarnation"]) == sample.identity.incarnation:
        return file
    os.close(file)
    return None


def _is_over(file: int | None) -> bool:
    """Has the writer of a map that cannot be read let go of it? So it is where it died while it published."""
    try:
        return file is not None and not writer_holds(file)
    except OSError:
        return False
