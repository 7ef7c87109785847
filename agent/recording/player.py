"""Plays a recording: where it is, how fast it goes, and the agent at that place."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from agent import wire
from agent.config import AgentSettings
from agent.log import EventLog
from agent.recording.chunks import RecordingError
from agent.recording.present import present_context
from agent.recording.reading import Recording
from agent.recording.session import Session
from agent.sampling.model import NANOSECONDS
from agent.web.api import create_app
from agent.web.security import WriteGuard

MIN_SPEED, MAX_SPEED = 0.01, 10_000.0
MAX_TOLD_GAPS = 100
STOP_SECONDS = 3.0
REPLAY_HEADER = b"kvatlas-replay"


@dataclass(slots=True)
class _Pace:
    """A place on the time line, when it was that (monotonic), and how fast it has gone on since."""

    at_ns: int
    since: float
    speed: float
    paused: bool

    def now_ns(self, now: float) -> int:
        return self.at_ns if self.paused else self.at_ns + round((now - self.since) * self.speed * NANOSECONDS)


class Player:
    """An ASGI application whose answers are those of the agent at the place that the recording has come to.

    Every answer carries the header `KVAtlas-Replay` with the file's name. `go` may be called from any thread.
    """

    def __init__(
        self,
        recording: Recording,
        settings: AgentSettings,
        guard: WriteGuard,
        *,
        start_ns: int | None = None,
        speed: float = 1.0,
        paused: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises RecordingError where what leads to the start is damaged."""
        self.recording = recording
        self._settings, self._guard, self._monotonic = settings, guard, monotonic
        self._log = EventLog(logging.getLogger("kvatlas.replay"))
        self._changed = threading.Condition()
        self._going = threading.Lock()  # one change of place at a time, and no step meanwhile
        self._stopping = False
        self._fault = ""
        start_ns = recording.start_ns if start_ns is None else start_ns
        self._pace = _Pace(self._within(start_ns), monotonic(), speed, paused)
        self._next_ns = self._pace.at_ns  # the time line waits there for the sample to be taken
        self._session = self._open(self._pace.at_ns)
        self._app = create_app(present_context(lambda: self._session.context))
        self._next_ns = self._due_ns()
        self._pace.since = monotonic()
        self._thread = threading.Thread(target=self.run, name="replay", daemon=True)
        self._name = recording.path.name.encode("ascii", "backslashreplace")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (REPLAY_HEADER, self._name)]}
            await send(message)

        await self._app(scope, receive, marked)

    @property
    def position_ns(self) -> int:
        """Where it is on the recording's time line: never beyond a sample that is not taken yet."""
        pace = self._pace
        return max(pace.at_ns, min(pace.now_ns(self._monotonic()), self._next_ns))

    def status(self) -> wire.ReplayStatus:
        """Where it stands, as the API tells it."""
        recording, pace = self.recording, self._pace
        position = self.position_ns
        return wire.ReplayStatus(
            file=recording.path.name,
            id=recording.header.id,
            recorded_from_unix=recording.start_ns / NANOSECONDS,
            recorded_until_unix=recording.end_ns / NANOSECONDS,
            position_unix=position / NANOSECONDS,
            speed=pace.speed,
            paused=pace.paused,
            at_end=position >= recording.end_ns,
            recording_ended=recording.ended or "the recorder was killed",
            samples=len(recording.sample_times_ns),
            events=recording.events,
            lost_events=recording.lost_events,
            gaps=[
                wire.ReplayGap(time_unix=gap.time_unix, first_event=gap.first, events=gap.count)
                for gap in recording.gaps[:MAX_TOLD_GAPS]
            ],
            dropped=recording.torn,
            notes=recording.notes[:MAX_TOLD_GAPS],
            fault=self._fault,
        )

    def go(
        self, *, position_ns: int | None = None, speed: float | None = None, paused: bool | None = None
    ) -> wire.ReplayStatus:
        """Change the place, the speed, or whether it goes on. Raises RecordingError where the place is damaged, and
        then stays where it was."""
        with self._going:
            opened = None
            if position_ns is not None:
                target = self._within(position_ns)
                opened = self._open(target)
            with self._changed:
                now = self._monotonic()
                at = self.position_ns if position_ns is None else target
                old = self._pace
                self._pace = _Pace(
                    at, now, old.speed if speed is None else speed, old.paused if paused is None else paused
                )
                if opened is not None:
                    self._session, opened = opened, self._session
                    self._fault = ""
                self._next_ns = self._due_ns()
                self._changed.notify_all()
            if opened is not None:
                opened.close()
                del opened
                gc.collect()  # a session is cycles of samples as large as the pool: not for whenever the collector runs
            return self.status()

    def run(self) -> None:
        """Take each sample when its time has come, until `stop`."""
        while not self._stopping:
            with self._changed:
                wait = self._wait_seconds()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
            with self._going:
                self._step()

    def _step(self) -> None:
        """Take the next sample, if its time has still come."""
        if (wait := self._wait_seconds()) is None or wait > 0:
            return
        try:
            self._session.advance(self._due_ns())
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end this thread unsaid either
            self._fault = str(error) if isinstance(error, RecordingError) else f"{type(error).__name__}: {error}"
            self._log.event("the replay stops here", level=logging.ERROR, reason=self._fault)
            with self._changed:
                self._pace = _Pace(self.position_ns, self._monotonic(), self._pace.speed, True)
            return
        with self._changed:
            self._next_ns = self._due_ns()

    def _wait_seconds(self) -> float | None:
        """Until the next sample is due; None where none will be without a change."""
        pace, due = self._pace, self._session.next_ns
        if pace.paused or due is None:
            return None
        return max(0.0, (due - pace.now_ns(self._monotonic())) / NANOSECONDS / pace.speed)

    def _due_ns(self) -> int:
        """When something is to be taken next; the end where nothing is."""
        due = self._session.next_ns
        return self.recording.end_ns if due is None else due

    def _within(self, time_ns: int) -> int:
        return min(max(time_ns, self.recording.start_ns), self.recording.end_ns)

    def _open(self, time_ns: int) -> Session:
        session = Session(self.recording, self._settings, self._guard, lambda: self.position_ns, self)
        try:
            session.begin(time_ns)
        except BaseException:  # raised again, with what was begun of the session ended
            session.close()
            raise
        return session
