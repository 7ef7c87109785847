"""Alerts to deliver, clocks that tests turn, and receivers on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from alerts.model import Alert, Change, ChangeKind, Severity
from tests.alerts.slack_receiver import Answer, Receiver, slack_judge

START = 1_790_000_000.0
# Where there is one, a file system that need not wait for a disk: thousands of commits are made here.
MEMORY = next((folder for folder in ("/dev/shm",) if os.access(folder, os.W_OK)), None)


class TurnedClock:
    """Stands still until it is turned. `set_wall` sets the wall clock alone, as an administrator does."""

    def __init__(self) -> None:
        self._monotonic = 1000.0
        self._wall = START

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def turn(self, seconds: float) -> None:
        self._monotonic += seconds
        self._wall += seconds

    def set_wall(self, unix: float) -> None:
        self._wall = unix


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


MakeAlert = Callable[..., Alert]
MakeChange = Callable[..., Change]


def make_alert(engine: str = "a", rule: str = "pool_nearly_full", episode: int = 1, **more: object) -> Alert:
    """A firing one; `more` replaces its fields."""
    alert = Alert(
        fingerprint=f"{rule}/{engine}",
        episode=f"{rule}/{engine}/{episode}",
        rule=rule,
        severity=Severity.WARNING,
        labels={"engine_id": engine, "model": "llama", "pool": "main"},
        value=0.97,
        value_text="97 %",
        threshold_text="over 95 %",
        summary=f"Pool main of {engine} is nearly full",
        meaning="New requests wait, and running ones are soon preempted.",
        action="Send fewer requests, or give the pool more memory.",
        started_at=START - 60.0,
        link=f"http://agent.example/engines/{engine}",
        runbook_url="https://runbooks.example/pool_nearly_full",
    )
    return replace(alert, **more)  # type: ignore[arg-type]


def fired(alert: Alert, at: float = START) -> Change:
    return Change(0, ChangeKind.FIRED, alert, at)


def resolved(alert: Alert, at: float = START, reason: str = "back at 80 %") -> Change:
    return Change(0, ChangeKind.RESOLVED, replace(alert, ended_at=at), at, reason)


@pytest.fixture
def slack() -> Iterator[Receiver]:
    """A receiver as strict as Slack."""
    receiver = Receiver(slack_judge)
    yield receiver
    receiver.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """One that takes everything."""
    receiver = Receiver(lambda _: Answer())
    yield receiver
    receiver.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a store may be."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder) / "alerts" / "alerts.sqlite"
