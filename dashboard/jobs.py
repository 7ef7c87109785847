"""Changes that take their time, on threads of their own: the page goes on, and the kill switch works meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agent.client import AgentClient, AgentRefused, AgentUnavailable

Answer = TypeVar("Answer")


class NotAsked(Exception):
    """The agent was not even asked: nothing was changed. The text says why."""


@dataclass(slots=True)
class Job(Generic[Answer]):
    """One change that was asked for. `answer` or `error` is set once `done` is."""

    what: str
    agent: str  # its address
    began: float = field(default_factory=time.monotonic)
    answer: Answer | None = None
    error: AgentRefused | AgentUnavailable | NotAsked | None = None
    taken_in: bool = False  # the page has seen its end
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def start(what: str, writer: AgentClient, call: Callable[[AgentClient], Answer]) -> Job[Answer]:
    """Ask on a thread; the `writer` is the job's own, and is closed at its end."""
    job: Job[Answer] = Job(what, writer.url)

    def work() -> None:
        try:
            with writer:
                job.answer = call(writer)
        except (AgentRefused, AgentUnavailable) as error:
            job.error = error
        finally:
            job.done.set()

    try:
        threading.Thread(target=work, name="dashboard-change", daemon=True).start()
    except RuntimeError as error:  # the host or the control group lets the process have no more
        writer.close()
        job.error = NotAsked(str(error))
        job.done.set()
    return job
