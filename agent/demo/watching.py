"""What both demos do while they run: wait for engines, sample them, and notice that they are to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from agent.client import AgentClient, AgentUnavailable
from agent.demo.figures import EngineFigures
from agent.demo.supervisor import ChildFailed, Supervisor
from agent.wire import EngineSummary

SAMPLE_SECONDS = 1.0
POLL_SECONDS = 0.2


class StopOnSignal:
    """Notes Ctrl-C and SIGTERM; a second Ctrl-C changes nothing, the end is under way."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: object) -> None:
        self.requested = True


def await_true(missing: Callable[[], str], supervisor: Supervisor, stop: StopOnSignal, seconds: float) -> None:
    """Wait until nothing is missing, or a signal came; ChildFailed that says what is where that takes too long."""
    deadline = time.monotonic() + seconds
    while not stop.requested:
        supervisor.check()
        if not (what := missing()):
            return
        if time.monotonic() > deadline:
            raise ChildFailed(f"{what} after {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def live_engines(client: AgentClient) -> list[EngineSummary]:
    """Those that the agent sees live; none while it does not answer."""
    try:
        return [engine for engine in client.engines().engines if engine.state == "live"]
    except AgentUnavailable:
        return []


def watch(
    client: AgentClient,
    supervisor: Supervisor,
    stop: StopOnSignal,
    deadline: float | None,
    show: Callable[[list[EngineSummary]], None],
    figures: Sequence[EngineFigures],
) -> None:
    """Sample until the deadline or a signal; an agent that does not answer in time costs a sample, not the demo."""
    by_id = {figure.engine_id: figure for figure in figures}
    due = time.monotonic()
    while not stop.requested and (deadline is None or time.monotonic() < deadline):
        supervisor.check()
        if time.monotonic() >= due:
            due += SAMPLE_SECONDS
            try:
                listed = client.engines().engines
            except AgentUnavailable:
                continue
            for engine in listed:
                if engine.engine_id in by_id and engine.state == "live":
                    by_id[engine.engine_id].add(engine)
            show(listed)
        time.sleep(POLL_SECONDS)
