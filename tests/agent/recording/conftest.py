"""Engines that run when they are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.agent.recording.support import SteppingEngine


class StartStepping(Protocol):
    def __call__(self, **options: Any) -> SteppingEngine: ...


@pytest.fixture
def start_stepping(folder: Path) -> Iterator[StartStepping]:
    """Starts engines whose maps are in `folder`, and kills them in the end."""
    engines: list[SteppingEngine] = []

    def start(**options: Any) -> SteppingEngine:
        engines.append(SteppingEngine(folder, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
