"""Judges each view by the rules, on a thread of its own: the sampler waits for neither the disk nor a receiver."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from agent.alerting.device_feed import DeviceFeed
from agent.alerting.feed import PoolFeed
from agent.alerting.own import OwnFeed
from agent.log import EventLog
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock
from alerts.lifecycle import Lifecycle, LifecycleSettings, Step
from alerts.model import Change, ChangeKind, Phase
from alerts.mutes import Mute
from alerts.readings import Reading
from alerts.rules import Rule, fingerprint
from alerts.state import AlertState, StateUnreadable

KEPT_RESOLVED = 100
KEEP_SECONDS = 60.0  # how often durations of open alerts are written down, besides what must not be lost
OVERDUE_INTERVALS = 3.0  # without a sample for so long, pools are not known any more
LEAST_OVERDUE_SECONDS = 3.0


class Keeper(Protocol):
    """Where states and changes are kept; see alerts.store."""

    def load_states(self) -> Mapping[str, str]: ...

    def take_late_states(self) -> Mapping[str, str]: ...

    def commit(self, states_changed: Mapping[str, str | None], changes: Sequence[Change]) -> Sequence[Change]: ...

    def mutes(self) -> Sequence[Mute]: ...


@dataclass(frozen=True, slots=True)
class AlertsStanding:
    """Every open alert, and those that were over last, newest first."""

    open: tuple[AlertState, ...] = ()
    resolved: tuple[Change, ...] = ()


class Evaluator:
    """`notice` may come from any thread; `run` is one thread's, or `tick` is called instead."""

    def __init__(
        self,
        rules: Sequence[Rule],
        keeper: Keeper,
        pools: PoolFeed,
        own: OwnFeed,
        *,
        devices: DeviceFeed | None = None,
        settings: LifecycleSettings | None = None,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self._keeper, self._pools, self._own = keeper, pools, own
        self._devices = devices or DeviceFeed()
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.alerting"))
        overdue = max(OVERDUE_INTERVALS * own.interval_seconds, LEAST_OVERDUE_SECONDS)
        settings = settings or LifecycleSettings()
        settings = replace(settings, most_elapsed_seconds=max(overdue, settings.most_elapsed_seconds))
        self._overdue_seconds = overdue
        self._lifecycle = Lifecycle(rules, self._load(), settings=settings)
        self._evaluated: float | None = None  # monotonic
        self._kept = self._clock.monotonic()
        self._resolved: deque[Change] = deque(maxlen=KEPT_RESOLVED)
        self._standing = AlertsStanding(tuple(self._lifecycle.states.values()))
        self.readings: tuple[Reading, ...] = ()  # what was judged last
        self._listeners: list[Callable[[AlertsStanding, float], None]] = []
        self._view = EMPTY_VIEW
        self._news = threading.Event()
        self._stopping = False

    @property
    def standing(self) -> AlertsStanding:
        """As of the last evaluation."""
        return self._standing

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._lifecycle.rules

    def subscribe(self, listener: Callable[[AlertsStanding, float], None]) -> None:
        """Tell `listener` how alerts stand, now and after each evaluation, on its thread, with the Unix time of the
        sample that was judged, or the present one where none comes."""
        listener(self._standing, self._clock.wall())
        self._listeners.append(listener)

    def notice(self, view: AgentView) -> None:
        """There are new samples; returns at once."""
        self._view = view
        self._news.set()

    def run(self) -> None:
        """Evaluate after each new view, and now and then where none comes, until `stop`."""
        while True:
            self._news.wait(self._overdue_seconds)
            self._news.clear()
            if self._stopping:
                return
            try:
                self.tick(self._view)
                self._log.on_change("alerting", "tick", "ok", quiet_first="ok")
            except Exception as error:  # noqa: BLE001 - the thread must outlive a fault of ours: no alert is worse
                self._log.on_change("alerting", "tick", f"{type(error).__name__}: {error}", level=logging.ERROR)

    def stop(self) -> None:
        """End `run` soon."""
        self._stopping = True
        self._news.set()

    def tick(self, view: AgentView) -> Step:
        """Evaluate once, and keep what came of it."""
        if view.generation == 0:
            return Step((), self._lifecycle.states, frozenset())  # no sample yet: nothing is absent either
        now = self._clock.monotonic()
        fresh = self._own.late_seconds(view, now) < self._overdue_seconds
        elapsed = 0.0 if self._evaluated is None else now - self._evaluated
        own = self._devices.readings(self._own.reading(view, now))
        readings = (*own, *self._pools.readings(view, now, fresh=fresh))
        mutes = self._keeper.mutes()
        if found := self._found():
            self._lifecycle = self._lifecycle.going_on_with(found)
        step = self._lifecycle.evaluate(readings, self._clock.wall(), elapsed_seconds=elapsed, mutes=mutes)
        self.readings = readings
        before, self._lifecycle = self._lifecycle, self._lifecycle.after(step)
        keep = set(step.touched)
        if now - self._kept >= KEEP_SECONDS:
            keep |= step.states.keys()
            self._kept = now
        texts = {id: step.states[id].to_json() if id in step.states else None for id in sorted(keep)}
        try:
            self._keeper.commit(texts, step.changes)
        except BaseException:  # raised again, whatever it is
            self._lifecycle = before  # it was not kept, so it has not happened: the next evaluation finds it again
            raise
        self._evaluated = now
        self._resolved.extendleft(one for one in step.changes if one.kind is ChangeKind.RESOLVED)
        self._standing = AlertsStanding(tuple(step.states.values()), tuple(self._resolved))
        judged_unix = view.taken_unix if fresh else self._clock.wall()
        for listener in self._listeners:
            try:
                listener(self._standing, judged_unix)
            except Exception as error:  # noqa: BLE001 - the others are told all the same
                self._log.on_change("alerting", "listener", f"{type(error).__name__}: {error}", level=logging.ERROR)
        return step

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Open alerts by severity and state: pending, firing or muted."""
        counts: dict[tuple[str, str], int] = {}
        for one in self._standing.open:
            muted = one.phase is Phase.FIRING and one.told is None
            key = (one.alert.severity.value, "muted" if muted else one.phase.value)
            counts[key] = counts.get(key, 0) + 1
        return MappingProxyType(counts)

    def _load(self) -> dict[str, AlertState]:
        return self._read(self._keeper.load_states())

    def _found(self) -> dict[str, AlertState]:
        """What the keeper could not read at the start, and has now. Where we know an alert too, that it was told is
        more than that it is pending."""
        late = self._keeper.take_late_states()
        if not late:
            return {}
        known = self._lifecycle.states
        ours = {id for id, state in known.items() if state.told is not None}
        found = self._read({id: text for id, text in late.items() if id not in ours})
        return {id: state for id, state in found.items() if id not in known or state.told is not None}

    def _read(self, texts: Mapping[str, str]) -> dict[str, AlertState]:
        states: dict[str, AlertState] = {}
        forgotten: list[str] = []
        for id, text in texts.items():
            try:
                state = AlertState.from_json(text)
                if not id == state.fingerprint == fingerprint(state.alert.rule, state.alert.labels):
                    raise StateUnreadable("its name is not that of its rule and labels")
                states[id] = state
            except StateUnreadable as error:
                forgotten.append(id)
                self._log.event("an open alert was forgotten", level=logging.WARNING, id=id, reason=str(error))
        self._keeper.commit(dict.fromkeys(forgotten), ())
        return states
