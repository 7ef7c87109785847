"""Work on threads of its own, also where the process may start none for a while."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent.sampling.crew import Crew
from agent.sampling.deputy import Deputy
from agent.web.errors import ApiError
from agent.web.waiting import off_the_loop

PATIENCE_SECONDS = 60.0


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The pod's limit of processes is used up, until it is undone."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def test_a_crew_that_may_start_no_thread_loses_no_place(
    no_threads: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crew, done = Crew(1), threading.Event()
    for _ in range(3):
        assert not crew.start(done.set, "work")
    assert crew.free
    assert len(caplog.records) == 1  # a stretch is told once: anybody may ask
    with pytest.raises(ApiError, match="may start no thread"):
        asyncio.run(off_the_loop(crew, done.set, "work", "all are busy"))
    no_threads.undo()
    assert crew.start(done.set, "work")
    assert done.wait(PATIENCE_SECONDS)
    assert crew.wait_idle(PATIENCE_SECONDS)


def test_a_deputy_that_may_start_no_thread_serves_later(no_threads: pytest.MonkeyPatch) -> None:
    deputy, done = Deputy("reader"), threading.Event()
    with pytest.raises(RuntimeError):
        deputy.do(done.set, PATIENCE_SECONDS)
    no_threads.undo()
    assert deputy.do(done.set, PATIENCE_SECONDS)
    assert done.is_set()
    deputy.close()
