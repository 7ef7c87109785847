"""Delivery as a whole: a thread for each sink, so that one which hangs holds up no other, and never who commits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from alerts.backoff import Backoff
from alerts.clock import SYSTEM_CLOCK, Clock
from alerts.courier import Courier
from alerts.errors import AlertsConfigError
from alerts.log import log_event
from alerts.sinks.base import Sink
from alerts.store import Store

STOP_SECONDS: Final = 3.0
LONGEST_SLEEP_SECONDS: Final = 60.0
FAULT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SinkHealth:
    """How delivery to one sink stands."""

    waiting: int  # changes that it is still to be told
    oldest_seconds: float | None  # since the first of them came
    failing_seconds: float | None  # since the first failure after the last message that was delivered
    attempts: int  # that failed, since then
    last_failure: str  # why; "" where the last message was delivered
    sent_seconds: float | None  # since then


class Pipeline:
    """Delivers what is committed to the store from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        sinks: Iterable[Sink],
        clock: Clock = SYSTEM_CLOCK,
        *,
        list_url: Callable[[], str | None] = lambda: None,
        backoff: Backoff | None = None,
        random: Random | None = None,
    ) -> None:
        """The store must have been given the names of these sinks. Raises AlertsConfigError for two of one name."""
        self._store = store
        self._clock = clock
        self._couriers = [
            Courier(
                store,
                sink,
                clock,
                backoff=backoff,
                random=random,
                list_url=list_url,
            )
            for sink in sinks
        ]
        names = [courier.sink.name for courier in self._couriers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise AlertsConfigError(f"two sinks are called {twice!r}; give each a name of its own")
        self._runners = [_Runner(courier, clock) for courier in self._couriers]
        store.on_commit(self.wake)

    def start(self) -> None:
        for runner in self._runners:
            runner.start()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """End the threads; one that waits for its receiver is left behind. What waits is in the store."""
        for runner in self._runners:
            runner.end()
        until = self._clock.monotonic() + timeout_seconds
        for runner in self._runners:
            runner.join(max(0.0, until - self._clock.monotonic()))

    def wake(self) -> None:
        """Look at the outboxes now: something was committed, or a clock was set."""
        for runner in self._runners:
            runner.wake()

    def outcomes(self) -> Mapping[tuple[str, str], int]:
        """By sink and outcome (`alerts.tally.Counted`), 0 where nothing was counted yet."""
        return self._store.tally.read()

    def health(self) -> Mapping[str, SinkHealth]:
        """By sink."""
        now = self._clock.monotonic()
        found = {}
        for courier in self._couriers:
            backlog = self._store.backlog(courier.sink.name)
            found[courier.sink.name] = SinkHealth(
                waiting=len(backlog.waiting),
                oldest_seconds=now - backlog.waiting[0].since if backlog.waiting else None,
                failing_seconds=None if backlog.failing_since is None else now - backlog.failing_since,
                attempts=backlog.attempts,
                last_failure=courier.last_failure.value if courier.last_failure else "",
                sent_seconds=None if backlog.sent_at is None else now - backlog.sent_at,
            )
        return found


class _Runner:
    """The thread of one courier."""

    def __init__(self, courier: Courier, clock: Clock) -> None:
        self._courier = courier
        self._clock = clock
        self._condition = threading.Condition()
        self._woken = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"alerts-{courier.sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def end(self) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            try:
                at = self._courier.step()
            except Exception as error:  # noqa: BLE001 - a sink whose thread has ended would be silent without a word
                log_event(
                    "courier_fault", level=logging.ERROR, sink=self._courier.sink.name, error=type(error).__name__
                )
                at = self._clock.monotonic() + FAULT_SECONDS
            seconds = LONGEST_SLEEP_SECONDS if at is None else min(at - self._clock.monotonic(), LONGEST_SLEEP_SECONDS)
            with self._condition:
                if not self._ended and not self._woken and seconds > 0:
                    self._condition.wait(seconds)
                self._woken = False
                if self._ended:
                    return
