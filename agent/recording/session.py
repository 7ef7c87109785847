"""An agent whose only pool is a recorded one: everything that the agent does with samples, at the recording's time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from agent.alerting.rule_files import load_rules
from agent.alerting.service import Alerting
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.settings import Scope
from agent.config import AgentSettings
from agent.devices.model import NOTHING_RECORDED, DevicesView
from agent.exporter import Exporter
from agent.history import MemoryHistory
from agent.recording.marks import ReplayMarks
from agent.recording.past import RecordedPast
from agent.recording.reading import Cursor, Recording, State
from agent.sampling.discovery import FoundMap, Scan, printable
from agent.sampling.model import NANOSECONDS, AgentView, Clock
from agent.sampling.sampler import Sampler
from agent.web.api import ApiContext
from agent.web.replay_routes import Plays
from agent.web.security import WriteGuard
from alerts.store import Store
from engine_shim import __version__
from engine_shim.errors import ControlRefused
from engine_shim.snapshot import EngineIdentity, MapFlags, MapSnapshot

WARM_UP_SECONDS = 600.0
"""Samples before the place that a replay begins at: what charts, forecasts and alerts look back on."""


class RecordedMap:
    """What the sampler reads in place of a map: the recording at the cursor."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    @property
    def identity(self) -> EngineIdentity:
        return self._state().snapshot.identity

    def read(self, timeout_seconds: float = 0.0) -> MapSnapshot:
        return self._state().snapshot

    def flags(self) -> MapFlags:
        return self._state().snapshot.flags

    def heartbeat_unix_ns(self) -> int:
        return self._state().snapshot.heartbeat_unix_ns

    def sequence(self) -> int:
        return self._state().snapshot.sequence

    def writer_alive(self) -> bool:
        return self._state().alive

    def close(self) -> None:
        """Nothing is open but the recording, which is its player's."""


class _NoControl:
    """In place of an engine's control socket: nothing in a recording can be moved."""

    def request(self, request: Any, *, timeout_seconds: float | None = None) -> NoReturn:
        raise ControlRefused("this is a recording: there is no engine behind it that could be asked")


class Session:
    """From one place of a recording onwards; what lies before `begin` is only looked back on. One thread advances."""

    def __init__(
        self,
        recording: Recording,
        settings: AgentSettings,
        guard: WriteGuard,
        position_ns: Callable[[], int],
        replay: Plays,
    ) -> None:
        """`position_ns` is the time line's now, which this session is never ahead of by more than a sample."""
        self.recording = recording
        self._position_ns = position_ns
        self._cursor: Cursor = recording.cursor()
        self._state: State | None = None
        self._ticking_ns: int | None = 0  # the time while a sample is taken: it stands still
        self._ahead_ns = 0  # of the recorder's wall clock, before the time line
        self._lock = threading.Lock()
        header = recording.header
        clock = Clock(self._wall, self._monotonic)
        interval = header.interval_seconds
        history = MemoryHistory(seconds=settings.history_seconds, interval_seconds=interval)
        found = FoundMap(printable(header.id), Path(recording.path), (0, 1))
        self.sampler = Sampler(
            lambda: (recording.path,),
            lambda path: RecordedMap(self._read),
            history,
            settings=replace(settings.sampler(), interval_seconds=interval),
            clock=clock,
            find=lambda folders, known: Scan((found,), ()),
        )
        self._marks = marks = ReplayMarks()
        driver = CompactionDriver(
            replace(settings.compaction_driver(), scope=Scope.parse("off")),
            AuditLog(None, listener=marks.recorder.note_decision),
            control_of=lambda path: _NoControl(),
            clock=clock,
        )
        # Judged as the live agent judges; told to nobody, since there is no sink.
        self._alerting = Alerting(
            load_rules(settings.alert_rules),
            (),
            Store(None, [], clock=clock),
            driver,
            devices=self._devices,
            clock=clock,
            interval_seconds=interval,
            runbook=settings.alert_runbook,
            agent_name=header.host,
        )
        self._alerting.evaluator.subscribe(marks.recorder.notice_alerts)
        self._driver = driver
        self.context = ApiContext(
            view=lambda: self.sampler.view,
            exporter=Exporter(lambda: self.sampler.view, clock=clock),
            history=history,
            guard=guard,
            compaction=driver,
            alerting=self._alerting,
            version=__version__,
            interval_seconds=interval,
            threshold=settings.threshold,
            started_unix=header.started_unix,
            clock=clock,
            devices=self._devices,
            past=RecordedPast(recording, self._monotonic_ns, marks),
            replay=replay,
        )

    @property
    def samples(self) -> int:
        """How many samples of the recording lie behind."""
        return self._cursor.samples

    @property
    def next_ns(self) -> int | None:
        """When there is something to be taken next, on the time line: a sample, or what came after the last; None where
        nothing is left."""
        times = self.recording.sample_times_ns
        if self.samples < len(times):
            return times[self.samples]
        return self.recording.end_ns if self._cursor.time_ns < self.recording.end_ns else None

    def begin(self, time_ns: int) -> None:
        """Look back on what came before a time, and come to it, exact to the event. Raises RecordingError."""
        times = self.recording.sample_times_ns
        upto = max(1, self.recording.samples_up_to(time_ns))
        first = min(self.recording.samples_up_to(time_ns - round(WARM_UP_SECONDS * NANOSECONDS)), upto - 1)
        for index in range(first, upto):
            self.advance(times[index])
            if index == first > 0:
                self._marks.forget()
        if time_ns > times[upto - 1]:
            self.advance(time_ns)

    def advance(self, time_ns: int) -> AgentView:
        """Come to a time and sample the recording there, as the agent did; not where nothing is recorded since the last
        one. Raises RecordingError."""
        samples, events = self._cursor.samples, self._cursor.events_followed
        self._cursor.seek(time_ns)
        if self._state is not None and (samples, events) == (self._cursor.samples, self._cursor.events_followed):
            return self.sampler.view
        self._state = state = self._cursor.state()
        self._ticking_ns = time_ns
        self._ahead_ns = round(state.taken_unix * NANOSECONDS) - self._cursor.sample_ns
        try:
            view = self.sampler.tick()
            self._marks.recorder.notice(view)
            self._driver.tick(view)
            self._alerting.evaluator.tick(view)
        finally:
            self._ticking_ns = None
        return view

    def close(self) -> None:
        self._alerting.stop()
        self.sampler.close()

    def _read(self) -> State:
        if self._state is None:
            raise RuntimeError("begin() comes first")
        return self._state

    def _devices(self) -> DevicesView:
        """As recorded; of a recording that holds none, so: those of this machine are another's."""
        told = None if self._state is None else self._state.devices
        return NOTHING_RECORDED if told is None else told

    def _monotonic_ns(self) -> int:
        ticking = self._ticking_ns
        return self._position_ns() if ticking is None else ticking

    def _monotonic(self) -> float:
        return self._monotonic_ns() / NANOSECONDS

    def _wall(self) -> float:
        return (self._monotonic_ns() + self._ahead_ns) / NANOSECONDS
