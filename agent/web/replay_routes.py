"""The route of a replay: where it is, and going elsewhere in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import Depends, FastAPI, Request, Response

from agent import wire
from agent.sampling.crew import Crew
from agent.sampling.model import NANOSECONDS
from agent.web.errors import ApiError, json_response
from agent.web.waiting import off_the_loop
from engine_shim.errors import TraceError

ROUTE = "/v1/replay"
WAITING = 4


class Plays(Protocol):
    """A player, from any thread."""

    def status(self) -> wire.ReplayStatus: ...

    def go(
        self, *, position_ns: int | None = None, speed: float | None = None, paused: bool | None = None
    ) -> wire.ReplayStatus:
        """Raises TraceError where the place cannot be read."""
        ...


def add_replay(app: FastAPI, player: Plays, require_writer: Callable[[Request], Awaitable[None]]) -> None:
    """`require_writer` raises ApiError for who may not change anything."""
    crew = Crew(WAITING)

    @app.get(ROUTE, response_model=wire.ReplayStatus, tags=["replay"])
    async def replay() -> Response:
        """What is replayed, and where it is."""
        return json_response(player.status())

    @app.post(ROUTE, response_model=wire.ReplayStatus, tags=["replay"], dependencies=[Depends(require_writer)])
    async def go(order: wire.ReplayOrder) -> Response:
        """Go to another place, at another speed, or stop and go on. What is not given stays."""

        def ask() -> wire.ReplayStatus:
            place = None if order.position_unix is None else round(order.position_unix * NANOSECONDS)
            return player.go(position_ns=place, speed=order.speed, paused=order.paused)

        try:
            return json_response(await off_the_loop(crew, ask, "api-replay", f"{WAITING} wait for the replay already"))
        except TraceError as error:
            raise ApiError(409, "unreadable", str(error), "choose a time before it") from error
