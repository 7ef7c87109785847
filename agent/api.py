"""The agent's HTTP API: reads of the latest view, in one shape of success and one of error."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from agent import presenter, wire
from agent.cells import map_cells
from agent.docs_page import render_docs
from agent.exporter import CONTENT_TYPE, Exporter
from agent.history import MAX_POINTS, METRICS, History
from agent.model import AgentView, Clock, PoolSample
from agent.security import WriteGuard

MAX_CELLS = 4096
MAX_BLOCKS_PER_PAGE = 4096
MAX_REQUESTS_PER_PAGE = 4096
DEFAULT_HISTORY_SECONDS = 600.0
DEFAULT_POINTS = 600

PoolId = Annotated[str, Path(description="id of a pool, as /v1/engines lists it", max_length=512)]


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the API serves from; the clock is the one that the samples were taken with."""

    view: Callable[[], AgentView]
    exporter: Exporter
    history: History
    guard: WriteGuard
    version: str
    interval_seconds: float
    threshold: float
    started_unix: float
    clock: Clock = field(default_factory=Clock)


class ApiError(HTTPException):
    """An error in the one shape; the handler turns it into an ErrorBody."""

    def __init__(self, status: int, error: str, message: str, action: str) -> None:
        super().__init__(status, detail=message)
        self.body = wire.ErrorBody(error=error, message=message, action=action)


def create_app(context: ApiContext) -> FastAPI:
    """A new application; any number may live in one process."""
    app = FastAPI(
        title="KVAtlas agent",
        version=context.version,
        docs_url=None,
        redoc_url=None,
        # Named as a range, so that FastAPI's own 422, which is never sent, is not documented.
        responses={"4XX": {"model": wire.ErrorBody}, "5XX": {"model": wire.ErrorBody}},
    )
    _add_error_handlers(app)
    _add_probes(app, context)
    _add_engines(app, context)
    return app


def require_writer(context: ApiContext) -> Callable[[Request], Awaitable[None]]:
    """A dependency for routes that change something: raises 401 or 403 unless the guard lets the request pass."""

    async def check(request: Request) -> None:
        peer = request.client.host if request.client else None
        access = context.guard.check(request.headers.get("authorization"), peer)
        if not access.allowed:
            status = 403 if context.guard.token is None else 401
            raise ApiError(status, "forbidden" if status == 403 else "unauthorized", access.message, access.action)

    return check


def _add_probes(app: FastAPI, context: ApiContext) -> None:
    @app.get("/metrics", tags=["metrics"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format 0.0.4."""
        return Response(context.exporter.render(), media_type=CONTENT_TYPE)

    @app.get("/healthz", tags=["probes"])
    async def healthz() -> Response:
        """200 while the sampler ticks: 503 says that this process should be started anew."""
        view = context.view()
        age = context.clock.wall() - (view.taken_unix or context.started_unix)
        limit = max(10.0, 10 * context.interval_seconds)
        if age > limit:
            raise ApiError(503, "unavailable", f"no sample for {age:.0f} s", "look at the agent's log and restart it")
        return _plain("ok")

    @app.get("/readyz", tags=["probes"])
    async def readyz() -> Response:
        """200 once the folders were looked through."""
        if context.view().generation == 0:
            raise ApiError(503, "unavailable", "the first sample is not taken yet", "ask again in a second")
        return _plain("ready")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(render_docs(app.openapi()))


def _add_engines(app: FastAPI, context: ApiContext) -> None:
    def sample(id: str) -> PoolSample:
        found = context.view().samples.get(id)
        if found is None:
            raise ApiError(404, "not_found", f"no pool {id!r}", "GET /v1/engines lists the pools that are known")
        return found

    @app.get("/v1/engines", response_model=wire.EngineList, tags=["engines"])
    async def engines() -> Response:
        """Every pool, and the agent itself."""
        view, now = context.view(), context.clock.wall()
        status = wire.AgentStatus(
            version=context.version,
            started_unix=context.started_unix,
            interval_seconds=context.interval_seconds,
            threshold=context.threshold,
            folders=list(view.folders),
            unreadable=list(view.unreadable),
            writes_enabled=context.guard.enabled,
        )
        summaries = [presenter.summarize(one, now) for one in view.samples.values()]
        return _json(wire.EngineList(now_unix=now, agent=status, engines=summaries))

    @app.get("/v1/engines/{id}", response_model=wire.EngineSummary, tags=["engines"])
    async def engine(id: PoolId) -> Response:
        """One pool."""
        return _json(presenter.summarize(sample(id), context.clock.wall()))

    @app.get("/v1/engines/{id}/map", response_model=wire.MapCells, tags=["engines"])
    async def cells(id: PoolId, cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS) -> Response:
        """The heatmap: the pool in at most `cells` cells of consecutive blocks."""
        return _json(map_cells(sample(id), cells, context.clock.wall()))

    @app.get("/v1/engines/{id}/blocks", response_model=wire.BlockPage, tags=["engines"])
    async def blocks(
        id: PoolId,
        start: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_BLOCKS_PER_PAGE)] = 256,
    ) -> Response:
        """Single blocks with every column that the writer keeps."""
        found = sample(id)
        total = found.snapshot.states.size
        if start >= total:
            raise ApiError(400, "bad_request", f"start={start} in a pool of {total} blocks", f"use 0 to {total - 1}")
        return _json(presenter.block_page(found, start, count, context.clock.wall()))

    @app.get("/v1/engines/{id}/requests", response_model=wire.RequestPage, tags=["engines"])
    async def requests(id: PoolId, limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS_PER_PAGE)] = 256) -> Response:
        """Live sequences, those with most blocks first."""
        return _json(presenter.request_page(sample(id), limit, context.clock.wall()))

    @app.get("/v1/engines/{id}/history", response_model=wire.History, tags=["engines"])
    async def history(
        id: PoolId,
        metric: Annotated[str, Query(description=", ".join(METRICS))],
        start: Annotated[float | None, Query(alias="from", description="Unix seconds; ten minutes before `to`")] = None,
        end: Annotated[float | None, Query(alias="to", description="Unix seconds; now")] = None,
        step: Annotated[float | None, Query(description="seconds; 600 points by default")] = None,
    ) -> Response:
        """One metric over time in buckets of `step` seconds."""
        sample(id)
        end = context.clock.wall() if end is None else end
        start = end - DEFAULT_HISTORY_SECONDS if start is None else start
        step = max(context.interval_seconds, (end - start) / DEFAULT_POINTS) if step is None else step
        try:
            buckets = context.history.query(id, metric, start, end, step)
        except KeyError:
            buckets = []
        except ValueError as error:
            action = f"metric is one of {', '.join(METRICS)}; at most {MAX_POINTS} points"
            raise ApiError(400, "bad_request", str(error), action) from error
        points = [
            wire.HistoryPoint(time_unix=one.start_unix, minimum=one.minimum, mean=one.mean, maximum=one.maximum)
            for one in buckets
        ]
        return _json(wire.History(id=id, metric=metric, step_seconds=step, points=points))


def _add_error_handlers(app: FastAPI) -> None:
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
        return _json(body, error.status_code, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(_describe(one) for one in error.errors())
        return _json(
            wire.ErrorBody(error="bad_request", message=problems, action="GET /docs lists the parameters"), 400
        )

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        fields = {"path": request.url.path, "error": f"{type(error).__name__}: {error}"}
        logging.getLogger("kvatlas.api").error("request failed", extra={"fields": fields})
        body = wire.ErrorBody(error="internal", message="the agent failed", action="see the agent's log")
        return _json(body, 500)


def _describe(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"] if part not in ("query", "path"))
    given = problem.get("input")
    return f"{where}={given!r}: {problem['msg']}" if given is not None else f"{where}: {problem['msg']}"


def _json(model: wire.WireModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


def _plain(text: str) -> Response:
    return Response(text + "\n", media_type="text/plain")
