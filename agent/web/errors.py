"""The one error shape of the HTTP API, whatever went wrong."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent import wire
from agent.log import EventLog


class ApiError(HTTPException):
    """An error in the one shape; the handler turns it into an ErrorBody."""

    def __init__(self, status: int, error: str, message: str, action: str) -> None:
        super().__init__(status, detail=message)
        self.body = wire.ErrorBody(error=error, message=message, action=action)


def add_error_handlers(app: FastAPI) -> None:
    """Make every refusal of `app` an ErrorBody, those of the framework too."""
    app.add_middleware(FaultShield)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        if isinstance(error, ApiError):
            body = error.body
        elif error.status_code == 404:
            body = wire.ErrorBody(
                error="not_found", message=f"no {request.url.path}", action="GET /docs lists all paths"
            )
        else:
            words = {405: "method_not_allowed"}
            message = f"{request.method} {request.url.path}: {error.detail}"
            word = words.get(error.status_code, "refused")
            body = wire.ErrorBody(error=word, message=message, action="GET /docs lists all paths and methods")
        headers = dict(error.headers or {})
        if error.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(body, error.status_code, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(_describe(one) for one in error.errors())
        return json_response(
            wire.ErrorBody(error="bad_request", message=problems, action="GET /docs lists the parameters"), 400
        )


class FaultShield:
    """Turns any fault of ours into the one error shape, and logs it once however often it is asked for.

    A handler for Exception would not do: the framework raises the error again for the server, which logs each with its
    traceback, and a dashboard asks every second.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = EventLog(logging.getLogger("kvatlas.api"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer and the log one line
            # The route and not the path that the client chose: those are without number.
            path = getattr(scope.get("route"), "path", "no route")
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}:{frame.lineno}"
            text = f"{type(error).__name__}: {error}"
            self._log.on_change("request failed", f"{path} {where}", text, level=logging.ERROR)
            if not started:
                body, status = _of_fault(error)
                await json_response(body, status)(scope, receive, send)


def _of_fault(error: Exception) -> tuple[wire.ErrorBody, int]:
    if isinstance(error, RuntimeError) and "start new thread" in str(error):  # Python's own words
        message = "the agent may start no thread for now"
        return wire.ErrorBody(error="unavailable", message=message, action="ask again later"), 503
    return wire.ErrorBody(error="internal", message="the agent failed", action="see the agent's log"), 500


def _describe(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"] if part not in ("query", "path"))
    given = problem.get("input")
    if where == "body" and isinstance(given, bytes):
        return "the body is not read as JSON; send it with the header Content-Type: application/json"
    return f"{where}={_shown(given)}: {problem['msg']}" if given is not None else f"{where}: {problem['msg']}"


def _shown(value: Any) -> str:
    """The beginning of a value: a body may have megabytes."""
    text = repr(value[:80] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def json_response(model: wire.WireModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A model as it is, without a second validation."""
    return Response(model.model_dump_json(), status, headers, media_type="application/json")
