"""Delivery against a plain model: whatever fires, fails and is killed, every firing is told, in order, and once."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.backoff import Backoff
from alerts.courier import Courier
from alerts.grouping import Cadence
from alerts.model import Alert, Change, ChangeKind, Severity
from alerts.notice import News, Notice
from alerts.outbox import Delta, Outbox
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink
from alerts.store import Store
from tests.alerts.conftest import MEMORY, TurnedClock, make_alert

NAMES = ("a", "b", "c", "d")


class Killed(BaseException):
    """The process ended, after the receiver took the message and before that was recorded."""


class ModelSink:
    """Delivers, or fails as it is told to, and knows what people would have read."""

    name = "model"

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.outcomes: list[Outcome | None] = []  # None: killed just after it was delivered
        self.told: Counter[str] = Counter()  # firings, by fingerprint
        self.counted = 0
        self.firing: set[str] = set()
        self.untimely: list[str] = []
        self.kills = 0
        self.in_doubt = 0  # firings of messages that were delivered and not recorded
        self.messages: list[Notice] = []

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        outcome = self.outcomes.pop(0) if self.outcomes else Sent()
        if outcome is None or isinstance(outcome, Sent):
            self._deliver(notice)
        if outcome is None:
            self.kills += 1
            self.in_doubt += sum(entry.firings for entry in notice.entries) + sum(notice.counted.values())
            raise Killed
        return outcome

    def _deliver(self, notice: Notice) -> None:
        self.messages.append(notice)
        self.counted += sum(notice.counted.values())
        for entry in notice.entries:
            fingerprint = entry.alert.fingerprint
            if entry.over and not entry.firings and fingerprint not in self.firing and not self.kills:
                self.untimely.append(fingerprint)
            self.told[fingerprint] += entry.firings
            (self.firing.discard if entry.over else self.firing.add)(fingerprint)


class World:
    """Alerts that fire and are over, and a courier that may be killed and started anew."""

    def __init__(self, path: Path, cadence: Cadence) -> None:
        self.clock = TurnedClock()
        self.sink = ModelSink(cadence)
        self.fired: Counter[str] = Counter()
        self.open: dict[str, Alert] = {}
        self._path = path
        self.start()

    def start(self) -> None:
        self.store = Store(self._path, ["model"], clock=self.clock)
        self.courier = Courier(self.store, self.sink, self.clock, backoff=Backoff(), random=Random(1))

    def restart(self) -> None:
        self.store.close()
        self.start()

    def change(self, name: str, kind: ChangeKind) -> None:
        """What cannot be of an alert as it stands is left out."""
        if kind is ChangeKind.FIRED:
            if name in self.open:
                return
            self.fired[name] += 1
            self.open[name] = replace(make_alert(name, episode=self.fired[name]), fingerprint=name)
        elif name not in self.open:
            return
        if kind is ChangeKind.ESCALATED:
            self.open[name] = replace(self.open[name], severity=Severity.CRITICAL)
        alert = self.open.pop(name) if kind is ChangeKind.RESOLVED else self.open[name]
        if kind is ChangeKind.RESOLVED:
            alert = replace(alert, ended_at=self.clock.wall())
        self.store.commit({name: kind.value}, [Change(0, kind, alert, self.clock.wall())])

    def step(self) -> float | None:
        try:
            return self.courier.step()
        except Killed:
            self.restart()
            return self.clock.monotonic()

    def advance(self, seconds: float) -> None:
        """Let time pass, as the courier's thread would: it looks again when it said, and after a commit."""
        until = self.clock.monotonic() + seconds
        while (at := self.step()) is not None and at <= until:
            self.clock.turn(max(0.0, at - self.clock.monotonic()))
        self.clock.turn(max(0.0, until - self.clock.monotonic()))

    def drain(self) -> None:
        """Let a receiver that has recovered be told everything."""
        self.sink.outcomes.clear()
        for _ in range(200):
            if (at := self.step()) is None:
                return
            self.clock.turn(max(0.0, at - self.clock.monotonic()))
        raise AssertionError("it does not come to rest")


@contextmanager
def world(cadence: Cadence) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        made = World(Path(folder) / "alerts.sqlite", cadence)
        yield made
        made.store.close()


changes = st.tuples(st.sampled_from(NAMES), st.sampled_from([*ChangeKind, ChangeKind.FIRED, ChangeKind.RESOLVED]))
outcomes = st.sampled_from([Sent(), Sent(), Retry(Reason.TIMEOUT), Retry(Reason.RATE_LIMITED, 30.0), None])
refusals = st.sampled_from([Shrink(Reason.INVALID_MESSAGE), Permanent(Reason.INVALID_MESSAGE), Permanent(Reason.GONE)])
actions = st.lists(
    st.one_of(changes, changes, st.sampled_from([0.1, 0.6, 5.0, 61.0]), outcomes, st.just("restart")), max_size=40
)
cadences = st.sampled_from(
    [Cadence(), Cadence.at_once(), Cadence(most_changes=2), Cadence(collect_seconds=0.0, group_seconds=5.0)]
)


def play(made: World, script: list[object]) -> None:
    for action in script:
        if isinstance(action, tuple):
            made.change(*action)
        elif isinstance(action, float):
            made.clock.turn(action)
        elif action == "restart":
            made.restart()
        elif action is None or isinstance(action, (Sent, Retry, Shrink, Permanent)):
            made.sink.outcomes.append(action)
        made.step()


@given(actions, cadences)
@settings(max_examples=80)
def test_every_firing_is_told_and_ends_as_it_is(script: list[object], cadence: Cadence) -> None:
    with world(cadence) as made:
        play(made, script)
        made.drain()
        sink = made.sink
        assert sink.firing == set(made.open)
        assert not sink.untimely
        assert not sink.counted
        twice = sum((sink.told - made.fired).values())
        assert not made.fired - sink.told
        assert twice <= sink.in_doubt
        backlog = made.store.backlog("model")
        assert not backlog.waiting
        assert set(backlog.told) == set(made.open)


@given(st.lists(st.one_of(changes, changes, st.sampled_from([0.6, 61.0, 3601.0]), refusals, st.just("restart"))))
@settings(max_examples=60)
def test_what_was_refused_for_good_is_counted_later(script: list[object]) -> None:
    with world(Cadence()) as made:
        play(made, script)
        made.sink.outcomes.clear()
        made.change("a", ChangeKind.RESOLVED)
        made.change("a", ChangeKind.FIRED)  # so that there is something to tell
        made.drain()
        assert sum(made.sink.told.values()) + made.sink.counted == sum(made.fired.values())
        assert made.sink.firing >= {"a"}


def test_a_storm_over_three_samples_and_its_end_are_at_most_five_messages() -> None:
    with world(Cadence()) as made:
        for kind in (ChangeKind.FIRED, ChangeKind.RESOLVED):
            for tick in range(3):
                for number in range(tick, 500, 3):
                    made.change(f"engine-{number}", kind)
                made.advance(1.0)
            made.advance(120.0)
        assert len(made.sink.messages) <= 5
        assert made.sink.told == made.fired
        assert not made.sink.firing


def test_what_a_receiver_asked_for_holds_over_a_restart() -> None:
    with world(Cadence()) as made:
        made.sink.outcomes.append(Retry(Reason.RATE_LIMITED, 30.0))
        made.change("a", ChangeKind.FIRED)
        made.clock.turn(0.5)
        made.step()
        made.restart()
        made.clock.turn(29.0)
        assert made.step() == pytest.approx(made.clock.monotonic() + 2.5, abs=1.7)
        assert not made.sink.messages
        made.change("a", ChangeKind.RESOLVED)
        made.drain()
        [told] = made.sink.messages
        assert [entry.news for entry in told.entries] == [News.BRIEF]


def test_a_sink_that_was_refused_is_asked_anew_by_the_next_process() -> None:
    with world(Cadence()) as made:
        made.sink.outcomes.append(Permanent(Reason.GONE, 404))
        made.change("a", ChangeKind.FIRED)
        made.clock.turn(0.5)
        made.step()
        made.clock.turn(3599.0)
        made.step()
        assert not made.sink.messages
        made.restart()
        made.step()
        [told] = made.sink.messages
        assert [entry.news for entry in told.entries] == [News.FIRING]


def test_a_fault_of_ours_is_tried_as_plain_text_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with world(Cadence()) as made:
        faults: list[BaseException] = [RuntimeError("no thread"), KeyError("a"), KeyError("b")]
        send = made.sink.send

        def fail(notice: Notice, *, plain: bool = False) -> Outcome:
            if faults:
                raise faults.pop(0)
            return send(notice, plain=plain)

        made.sink.send = fail  # type: ignore[method-assign]
        made.change("a", ChangeKind.FIRED)
        made.drain()
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
            "sink_fault",
            "sink_fault",
            "sink_fault",
            "notice_given_up",
        ]
        made.change("a", ChangeKind.RESOLVED)
        made.drain()
        [told] = made.sink.messages
        assert told.counted == {"pool_nearly_full": 1}


def test_what_a_message_may_not_hold_follows_without_a_pause() -> None:
    with world(Cadence(most_changes=2)) as made:
        for _ in range(3):
            for kind in (ChangeKind.FIRED, ChangeKind.RESOLVED):
                made.change("a", kind)
        began = made.clock.monotonic()
        made.drain()
        assert len(made.sink.messages) == 3
        assert made.clock.monotonic() - began < 5.0


def test_a_machine_is_told_again_at_its_interval_and_not_before() -> None:
    with world(Cadence.at_once(resend_seconds=60.0)) as made:
        made.change("a", ChangeKind.FIRED)
        times = []
        for _ in range(4):
            at = made.step()
            assert at is not None
            made.clock.turn(max(0.0, at - made.clock.monotonic()))
            times.append(made.clock.monotonic())
        made.step()
        assert [len(message.sequences) for message in made.sink.messages] == [1, 0]
        assert times[-1] - times[0] == pytest.approx(60.0)
        made.restart()
        made.step()
        assert len(made.sink.messages) == 3  # nobody knows how long we were away


def test_the_model_notices_a_lost_firing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: an outbox that forgets a change must not pass."""
    put = Outbox.put
    taken: list[object] = []

    def forget_the_first(outbox: Outbox, one: object) -> object:
        if not taken:
            taken.append(one)
            return Delta()
        return put(outbox, one)  # type: ignore[arg-type]

    monkeypatch.setattr(Outbox, "put", forget_the_first)
    with world(Cadence()) as made:
        made.change("a", ChangeKind.FIRED)
        made.drain()
        assert made.fired - made.sink.told
