"""A history in a folder of the test's own, with clocks that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.history import MemoryHistory
from agent.history.keeper import HistoryKeeper
from agent.sampling.model import Clock

START_UNIX = 1_700_000_000.0  # a whole minute and 20 s


class Past:
    """A keeper without its thread: `at` sets both clocks, `write` is one step of the writer."""

    def __init__(self, folder: Path, max_mib: int = 64, start_unix: float = START_UNIX) -> None:
        self.now = start_unix
        self.passed = 1000.0
        self.memory = MemoryHistory()
        clock = Clock(wall=lambda: self.now, monotonic=lambda: self.passed)
        self.keeper = HistoryKeeper(folder, max_mib * 2**20, self.memory, clock)
        self.writer, self.reader, self.history = self.keeper.writer, self.keeper.reader, self.keeper.history

    def after(self, seconds: float) -> float:
        """Let time pass; returns what it is then."""
        self.now += seconds
        self.passed += seconds
        return self.now

    def write(self) -> None:
        self.writer.step()

    def end(self) -> None:
        """Let go of the files, as a kill does: nothing more is written."""
        self.writer._close()


MakePast = Callable[..., Past]


@pytest.fixture
def make_past(tmp_path: Path) -> Iterator[MakePast]:
    made: list[Past] = []

    def make(folder: Path | None = None, **options: float) -> Past:
        past = Past(folder or tmp_path / "state", **options)  # type: ignore[arg-type]
        made.append(past)
        return past

    yield make
    for past in made:
        past.end()
