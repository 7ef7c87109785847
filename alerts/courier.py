"""Brings one sink what its outbox holds: one message at a time, at the sink's pace, again until it arrives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Final

from alerts.backoff import Backoff, TokenBucket
from alerts.clock import Clock
from alerts.grouping import compose, plan
from alerts.log import log_event
from alerts.notice import Notice
from alerts.outbox import Backlog
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink, Sink
from alerts.store import Store
from alerts.tally import Counted

OF_THE_SINK: Final = {Reason.FORBIDDEN, Reason.GONE, Reason.REJECTED}  # not of one message


class Courier:
    """`step` does what is to be done now and says when to look again. Belongs to one thread."""

    def __init__(
        self,
        store: Store,
        sink: Sink,
        clock: Clock,
        *,
        backoff: Backoff | None = None,
        random: Random | None = None,
        list_url: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.sink = sink
        self._store = store
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._random = random or Random()
        self._list_url = list_url
        now = clock.monotonic()
        cadence = sink.cadence
        sent_at = store.backlog(sink.name).sent_at  # by the agent before us, perhaps a moment ago
        self._bucket = TokenBucket(cadence.per_second, cadence.burst, now=now if sent_at is None else sent_at)
        if sent_at is not None:
            self._bucket.take(sent_at)
        self._calm_at = 0.0
        self._uphold_at = now
        self._parked_until = now  # not kept: a restart may mean that the sink was mended
        self._plain = False
        self.last_failure: Reason | None = None  # since the last message that was delivered

    def step(self) -> float | None:
        """Send what is due, one message at most. Returns the monotonic time at which something may be due again; None
        where that needs another commit."""
        now = self._clock.monotonic()
        backlog = self._store.backlog(self.sink.name)
        blocked_until = max(backlog.not_before, self._parked_until, self._bucket.ready_at(now))
        uphold_at = self._next_uphold(backlog)
        if blocked_until > now and (backlog.waiting or uphold_at is not None):
            return blocked_until
        found = plan(backlog.waiting, backlog.marks, self.sink.cadence, now=now, calm_at=self._calm_at)
        at = min((time for time in (found.next_at, uphold_at) if time is not None), default=None)
        if at is None or at > now:
            return at
        uphold = uphold_at is not None and uphold_at <= now
        notice = compose(
            found.due,
            backlog.told,
            at=self._clock.wall(),
            counted=backlog.counted,
            list_url=self._list_url(),
            uphold=uphold,
            unfinished=found.unfinished,
        )
        self._deliver(notice, backlog, uphold=uphold)
        return self._clock.monotonic()

    def _next_uphold(self, backlog: Backlog) -> float | None:
        every = self.sink.cadence.resend_seconds
        return self._uphold_at if every is not None and backlog.told else None

    def _deliver(self, notice: Notice, backlog: Backlog, *, uphold: bool) -> None:
        name, store = self.sink.name, self._store
        if notice.sequences:
            store.begin(name, notice)
        self._bucket.take(self._clock.monotonic())
        outcome = self._send(notice)
        if isinstance(outcome, Sent):
            self._sent(notice, upheld=uphold or not backlog.told)
            return
        self.last_failure = outcome.reason
        if isinstance(outcome, Shrink) and not self._plain:
            self._plain = True
            store.tally.add(name, Counted.SHRUNK)
            store.postpone(name, 0.0)
            log_event("notice_shrunk", level=logging.WARNING, sink=name, reason=outcome.reason, status=outcome.status)
            return
        if isinstance(outcome, Retry):
            self._again(outcome, backlog)
        elif outcome.reason in OF_THE_SINK:
            self._park(notice, outcome)
        else:
            self._give_up(notice, outcome, uphold=uphold)

    def _send(self, notice: Notice) -> Outcome:
        try:
            return self.sink.send(notice, plain=self._plain)
        except Exception as error:  # noqa: BLE001 - a fault in one message must not end the delivery of all others
            # Its text and traceback may hold what a library was given, and so the URL.
            log_event("sink_fault", level=logging.ERROR, sink=self.sink.name, error=type(error).__name__)
            if isinstance(error, (OSError, RuntimeError, MemoryError)):  # too little of something, as of threads
                return Retry(Reason.FAULT)
            return Shrink(Reason.FAULT) if not self._plain else Permanent(Reason.FAULT)

    def _sent(self, notice: Notice, *, upheld: bool) -> None:
        name, cadence = self.sink.name, self.sink.cadence
        self._store.finish(name, notice, group_seconds=cadence.group_seconds)
        self._store.tally.add(name, Counted.SENT)
        now = self._clock.monotonic()
        if upheld and cadence.resend_seconds is not None:
            self._uphold_at = now + cadence.resend_seconds
        if len(notice.entries) > cadence.storm_alerts:
            self._calm_at = now + cadence.storm_seconds
        if self.last_failure is not None:
            log_event("notices_delivered_again", sink=name)
        self._plain, self.last_failure = False, None

    def _again(self, outcome: Retry, backlog: Backlog) -> None:
        name = self.sink.name
        delay = self._backoff.delay(backlog.attempts + 1, outcome.after_seconds, self._random)
        attempts = self._store.postpone(name, delay)
        self._store.tally.add(name, Counted.RETRIED)
        if attempts == 1 or attempts & (attempts - 1) == 0:  # each doubling: an outage of a day is no flood of lines
            log_event(
                "notice_not_delivered",
                level=logging.WARNING,
                sink=name,
                reason=outcome.reason,
                status=outcome.status,
                attempts=attempts,
                again_in_seconds=round(delay, 1),
            )

    def _park(self, notice: Notice, outcome: Shrink | Permanent) -> None:
        """No message can pass. What waits stays, and goes on collecting: after the sink is mended and the agent started
        anew, whatever is still true is told, and the rest is mentioned."""
        self._store.postpone(self.sink.name, 0.0)
        self._parked_until = self._clock.monotonic() + self.sink.cadence.parked_seconds
        self._dead_letter("sink_refuses_all", notice, outcome, "mend the sink's address, and start the agent anew")

    def _give_up(self, notice: Notice, outcome: Shrink | Permanent, *, uphold: bool) -> None:
        """This message cannot pass, in either form."""
        self._store.give_up(self.sink.name, notice)
        self._dead_letter("notice_given_up", notice, outcome, "none; the next message counts the alerts of this one")
        if uphold and self.sink.cadence.resend_seconds is not None:
            self._uphold_at = self._clock.monotonic() + self.sink.cadence.resend_seconds

    def _dead_letter(self, event: str, notice: Notice, outcome: Shrink | Permanent, action: str) -> None:
        self._plain = False
        self._store.tally.add(self.sink.name, Counted.DEAD_LETTERED)
        log_event(
            event,
            level=logging.ERROR,
            sink=self.sink.name,
            reason=outcome.reason,
            status=outcome.status,
            alerts=len(notice.entries),
            firings=sum(entry.firings for entry in notice.entries),
            rules=", ".join(sorted({entry.alert.rule for entry in notice.entries})[:10]),
            action=action,
        )
