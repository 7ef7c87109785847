"""What the history keeps: samples, frames, marks and log lines, as they are handed to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.history.frames import States


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of a pool at one time."""

    pool: str
    time_unix: float
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """States of a pool's blocks at one time; nobody changes the array."""

    pool: str
    time_unix: float
    incarnation: str
    sequence: int
    states: States


HOLD = "hold: "  # begins the text of a decision to do nothing


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, or was decided, at one time. `pool` is "" where it is about the agent."""

    time_unix: float
    pool: str
    kind: str  # "engine", "decision", "alert", ...
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the agent's log."""

    text: str


Entry = Sample | Frame | Mark | Line
