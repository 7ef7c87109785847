"""Work that may take its time, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from agent.sampling.crew import Crew
from agent.web.errors import ApiError

Answer = TypeVar("Answer")


async def off_the_loop(crew: Crew, ask: Callable[[], Answer], name: str, busy: str) -> Answer:
    """What `ask` returns or raises, on a thread of its own. Raises ApiError, with `busy`, where all of the crew wait.

    Not on the event loop's executor, whose threads would hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(value: Answer | None, error: BaseException | None) -> None:
        if answer.done():  # the asker has gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value, failure = None, None
        try:
            value = ask()
        except Exception as error:  # noqa: BLE001 - carried over to the event loop, where it is handled
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    if not crew.start(work, name):
        # It may have none that is at work, and be refused a thread: the limit of processes is the whole pod's.
        why = "the agent may start no thread for now" if crew.free else busy
        raise ApiError(503, "unavailable", why, "ask again later")
    return await answer
