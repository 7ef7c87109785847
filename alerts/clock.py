"""Time as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """`wall` in Unix seconds, for what people read and what outlives a process; `monotonic` for durations."""

    @property
    def wall(self) -> Callable[[], float]: ...

    @property
    def monotonic(self) -> Callable[[], float]: ...


@dataclass(frozen=True, slots=True)
class _SystemClock:
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


SYSTEM_CLOCK: Clock = _SystemClock()
