"""Finds an engine's processes here by what its map says of them, over namespaces, and never by a pid alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.devices.model import EngineHere

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h: PROC_PID_INIT_INO
_MAX_ANCESTORS = 32
_SEARCH_AGAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process as /proc shows it here."""

    pid: int  # in this namespace
    name: str
    parent: int
    start_ticks: int
    innermost_pid: int  # as the process itself knows it
    rss_bytes: int


class ProcessTable:
    """Looks processes up. A pid joins only where the start time agrees, since pids of namespaces overlap."""

    def __init__(self, *, monotonic: Callable[[], float], proc: Path = Path("/proc")) -> None:
        self._proc, self._monotonic = proc, monotonic
        self._found: dict[tuple[int, int], tuple[int | None, float]] = {}  # pid and start in a map: pid here, and when

    @property
    def sees_all(self) -> bool:
        """Is this the machine's first namespace, of which the pids are that NVML tells?"""
        try:
            return os.readlink(self._proc / "self" / "ns" / "pid") == _FIRST_PID_NAMESPACE
        except OSError:
            return False

    def look(self, pid: int) -> LocalProcess | None:
        """The process of that pid here; None where there is none, or it may not be looked at."""
        folder = self._proc / str(pid)
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            # The name stands in brackets and may hold anything, brackets too: fields are counted after the last one.
            front, _, back = stat.rpartition(")")
            rest, name = back.split(), front.partition("(")[2]
            lines = dict(line.partition(":")[::2] for line in status.splitlines())
            innermost = int(lines["NSpid"].split()[-1]) if "NSpid" in lines else pid
            pages = int(rest[21])
            return LocalProcess(pid, name, int(rest[1]), int(rest[19]), innermost, pages * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError, IndexError, KeyError):
            return None

    def engine(self, engine: EngineHere) -> LocalProcess | None:
        """The process that wrote the engine's map, under whatever pid it has here."""
        direct = self.look(engine.pid)
        if direct is not None and self._is(direct, engine):
            return direct
        key, now = (engine.pid, engine.pid_start_ticks), self._monotonic()
        known = self._found.get(key)
        if known is not None:
            pid, searched = known
            if pid is not None and (process := self.look(pid)) is not None and self._is(process, engine):
                return process
            if now - searched < _SEARCH_AGAIN_SECONDS:
                return None
        process = self._search(engine)
        if len(self._found) > 1024:  # maps that came and went
            self._found.clear()
        self._found[key] = (process.pid if process else None, now)
        return process

    def owner(self, pid: int, engines: Iterable[tuple[EngineHere, LocalProcess]]) -> EngineHere | None:
        """The engine that a process belongs to: its own, or a worker that it started; None where to none."""
        by_pid = {process.pid: engine for engine, process in engines}
        current = pid
        for _ in range(_MAX_ANCESTORS):
            if current in by_pid:
                return by_pid[current]
            process = self.look(current)
            if process is None or process.parent <= 1:
                return None
            current = process.parent
        return None

    @staticmethod
    def _is(process: LocalProcess, engine: EngineHere) -> bool:
        return process.start_ticks == engine.pid_start_ticks and process.innermost_pid == engine.pid

    def _search(self, engine: EngineHere) -> LocalProcess | None:
        with suppress(OSError):
            for name in os.listdir(self._proc):
                if name.isdigit() and (process := self.look(int(name))) is not None and self._is(process, engine):
                    return process
        return None
