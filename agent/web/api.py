"""The agent's HTTP API: reads of the latest view, in one shape of success and one of error."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from agent import wire
from agent.alerting.service import Alerting
from agent.blackbox.reading import BoxReader
from agent.compaction.driver import CompactionDriver
from agent.devices.model import NOTHING_READ, DevicesView
from agent.engine_metrics import presenter as metrics_presenter
from agent.engine_metrics.model import EngineMetricsView, UnmappedEngine
from agent.exporter import CONTENT_TYPE, Exporter
from agent.history import History
from agent.history.reading import Past
from agent.log import EventLog
from agent.sampling.model import AgentView, Clock, PoolSample
from agent.web import presenter
from agent.web.alert_routes import add_alerts
from agent.web.blackbox_routes import add_black_boxes
from agent.web.body_limit import BodyLimit
from agent.web.cells import map_cells
from agent.web.compaction_routes import add_compaction
from agent.web.device_routes import add_devices
from agent.web.docs_page import render_docs
from agent.web.errors import ApiError, add_error_handlers, json_response
from agent.web.gate import Gate, WriteGate
from agent.web.history_routes import add_history
from agent.web.plan_routes import add_planning
from agent.web.profile import add_profile
from agent.web.replay_routes import Plays, add_replay
from agent.web.request_page import RequestQuery, request_page
from agent.web.security import WriteGuard, is_proxied

MAX_CELLS = 4096
MAX_BLOCKS_PER_PAGE = 4096
MAX_REQUESTS_PER_PAGE = 4096
MAX_NAMED_POOLS = 8  # in an error

PoolId = Annotated[str, Path(description="id of a pool, or of an engine with one", max_length=512)]


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the API serves from; the clock is the one that the samples were taken with."""

    view: Callable[[], AgentView]
    exporter: Exporter
    history: History
    guard: WriteGuard
    compaction: CompactionDriver
    version: str
    interval_seconds: float
    threshold: float
    started_unix: float
    clock: Clock = field(default_factory=Clock)
    alerting: Alerting | None = None  # without it there are no routes of alerts
    engine_metrics: Callable[[], EngineMetricsView] = EngineMetricsView
    devices: Callable[[], DevicesView] = lambda: NOTHING_READ
    past: Past | None = None  # what is kept of the past
    gate: Gate | None = None  # without it one that keeps no audit
    replay: Plays | None = None  # where the pools are those of a recording
    boxes: BoxReader | None = None  # of engines that ended


def create_app(context: ApiContext) -> FastAPI:
    """A new application; any number may live in one process."""
    app = FastAPI(
        title="KVAtlas agent",
        version=context.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Named as a range, so that FastAPI's own 422, which is never sent, is not documented.
        responses={"4XX": {"model": wire.ErrorBody}, "5XX": {"model": wire.ErrorBody}},
    )
    app.add_middleware(BodyLimit)
    # A replay's clock goes back and stands still; who asks does neither.
    steady = time.monotonic if context.replay is not None else context.clock.monotonic
    app.add_middleware(WriteGate, gate=context.gate or Gate(context.guard, clock=steady))
    add_error_handlers(app)
    _add_probes(app, context)
    _add_engines(app, context)
    add_history(
        app,
        lambda id: _sample(context, id).id,
        context.history,
        context.past,
        context.clock,
        context.interval_seconds,
    )
    add_black_boxes(app, context.boxes)
    may_change = require_writer(context)
    add_compaction(app, context.compaction, lambda id: _sample(context, id), may_change, context.guard)
    add_planning(app, lambda id: _sample(context, id), may_change)
    add_devices(app, context.devices, context.clock)
    add_profile(app, lambda id: _sample(context, id))
    if context.alerting is not None:
        add_alerts(app, context.alerting, may_change, context.clock)
    if context.replay is not None:
        add_replay(app, context.replay, may_change)
    return app


def require_writer(context: ApiContext) -> Callable[[Request], Awaitable[None]]:
    """A dependency for routes that change something: raises 401 or 403 unless the guard lets the request pass."""

    async def check(request: Request) -> None:
        peer = request.client.host if request.client else None
        headers = request.headers
        access = context.guard.check(
            headers.get("authorization"), peer, headers.get("origin"), proxied=is_proxied(headers)
        )
        if not access.allowed:
            status = 403 if context.guard.token is None else 401
            raise ApiError(status, "forbidden" if status == 403 else "unauthorized", access.message, access.action)

    return check


def _add_probes(app: FastAPI, context: ApiContext) -> None:
    started = context.clock.monotonic()

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["metrics"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format 0.0.4."""
        if context.replay is not None:
            what = "a replay has no metrics: they would be taken for those of an engine that runs"
            raise ApiError(404, "replay", what, "scrape the agent beside the engine")
        return Response(context.exporter.render(), media_type=CONTENT_TYPE)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["probes"])
    async def healthz() -> Response:
        """200 while the sampler ticks: 503 says that this process should be started anew."""
        view = context.view()
        age = context.clock.monotonic() - (started if view.taken_monotonic is None else view.taken_monotonic)
        limit = max(10.0, 10 * context.interval_seconds)
        if age > limit:
            raise ApiError(503, "unavailable", f"no sample for {age:.0f} s", "look at the agent's log and restart it")
        return _plain("ok")

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["probes"])
    async def readyz() -> Response:
        """200 once the folders were looked through."""
        if context.view().generation == 0:
            raise ApiError(503, "unavailable", "the first sample is not taken yet", "ask again in a second")
        # Maps are served whatever the driver does: that it fails is said, and keeps nobody from this agent.
        nvml = context.devices().nvml
        return _plain(f"ready; devices are not: {nvml.reason}" if nvml.state.failed else "ready")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(render_docs(app.openapi()))


def _sample(context: ApiContext, id: str) -> PoolSample:
    """The pool of that id, or the only one of the engine of that id."""
    samples = context.view().samples
    if (found := samples.get(id)) is not None:
        return found
    pools = [one for one in samples.values() if one.identity.engine_id == id]
    if len(pools) == 1:
        return pools[0]
    if not pools and (unmapped := _unmapped(context, id)) is not None:
        what = f"engine {unmapped.id!r} is known from its metrics alone and publishes no block map"
        raise ApiError(404, "no_block_map", what, "run the shim in the engine to see its blocks")
    if pools:
        names = ", ".join(one.id for one in pools[:MAX_NAMED_POOLS])
        raise ApiError(404, "not_found", f"engine {id!r} has {len(pools)} pools", f"ask for one of them: {names}")
    names = f", as {', '.join(list(samples)[:MAX_NAMED_POOLS])}" if samples else ""
    raise ApiError(404, "not_found", f"no pool {id!r}", f"GET /v1/engines lists the pools that are known{names}")


def _unmapped(context: ApiContext, id: str) -> UnmappedEngine | None:
    """The engine without a map of that id."""
    return next((one for one in context.engine_metrics().unmapped if one.id == id), None)


def _summary(context: ApiContext, sample: PoolSample, now_unix: float) -> wire.EngineSummary:
    """One pool, with what its engine's own metrics say where they are read."""
    summary = presenter.summarize(sample, now_unix)
    if context.replay is not None:
        summary = summary.model_copy(update={"replay": True})
    joined = context.engine_metrics().by_pool.get(sample.id)
    if joined is None:
        return summary
    return summary.model_copy(
        update={
            "metrics": metrics_presenter.describe_joined(joined, now_unix),
            "metrics_comparison": metrics_presenter.describe_comparison(joined.comparison),
        }
    )


def _add_engines(app: FastAPI, context: ApiContext) -> None:
    log = EventLog(logging.getLogger("kvatlas.api"))

    def sample(id: str) -> PoolSample:
        return _sample(context, id)

    @app.get("/v1/engines", response_model=wire.EngineList, tags=["engines"])
    async def engines() -> Response:
        """Every pool, and the agent itself."""
        view, now = context.view(), context.clock.wall()
        summaries, unfit = [], []
        for one in view.samples.values():
            try:
                summaries.append(_summary(context, one, now))
            except ValueError as error:  # a number that no map should hold: of this pool, not of the others
                log.on_change("pool left out", one.id, str(error), level=logging.ERROR)
                unfit.append(f"{one.id}: its numbers cannot be told; see the agent's log")
        status = wire.AgentStatus(
            version=context.version,
            started_unix=context.started_unix,
            interval_seconds=context.interval_seconds,
            threshold=context.threshold,
            folders=list(view.folders),
            unreadable=[*view.unreadable, *unfit],
            writes_enabled=context.guard.enabled,
            writes_need_token=context.guard.token is not None,
            engine_metrics=metrics_presenter.describe_sources(context.engine_metrics(), now),
            replay=None if context.replay is None else context.replay.status(),
        )
        read = context.engine_metrics()
        unmapped = [metrics_presenter.describe_unmapped(one, now, read.interval_seconds) for one in read.unmapped]
        return json_response(wire.EngineList(now_unix=now, agent=status, engines=summaries, unmapped=unmapped))

    @app.get("/v1/engines/{id}", response_model=wire.EngineSummary | wire.UnmappedEngine, tags=["engines"])
    async def engine(id: PoolId) -> Response:
        """One pool; or an engine that is known from its metrics alone, which has `block_map` false."""
        now, unmapped = context.clock.wall(), _unmapped(context, id)
        if unmapped is not None:
            every = context.engine_metrics().interval_seconds
            return json_response(metrics_presenter.describe_unmapped(unmapped, now, every))
        return json_response(_summary(context, sample(id), now))

    @app.get("/v1/engines/{id}/map", response_model=wire.MapCells, tags=["engines"])
    async def cells(
        id: PoolId,
        cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS,
        request: Annotated[str | None, Query(description="say also where the blocks of this request are")] = None,
    ) -> Response:
        """The heatmap: the pool in at most `cells` cells of consecutive blocks."""
        return json_response(map_cells(sample(id), cells, context.clock.wall(), request))

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
        return json_response(presenter.block_page(found, start, count, context.clock.wall()))

    @app.get("/v1/engines/{id}/requests", response_model=wire.RequestPage, tags=["engines"])
    async def requests(
        id: PoolId,
        limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS_PER_PAGE)] = 256,
        sort: wire.RequestOrder = "blocks",
        ascending: bool = False,
        contains: Annotated[str, Query(max_length=200, description="in the id or a label, whatever its case")] = "",
        lora: Annotated[str | None, Query(max_length=200, description="exactly; empty: without one")] = None,
        cache_salt: Annotated[str | None, Query(max_length=200, description="exactly; empty: without one")] = None,
    ) -> Response:
        """Live sequences, those with most blocks first unless asked otherwise, with totals and groups of all that
        match."""
        query = RequestQuery(limit, sort, ascending, contains, lora, cache_salt)
        found, now = sample(id), context.clock.wall()
        return json_response(await run_in_threadpool(request_page, found, query, now))


def _plain(text: str) -> Response:
    return Response(text + "\n", media_type="text/plain")
