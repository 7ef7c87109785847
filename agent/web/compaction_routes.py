"""Routes of compaction: how the policy stands, a run on demand, the kill switch, and what was done so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Query, Request, Response

from agent.compaction.audit import Asker
from agent.compaction.driver import CompactionDriver
from agent.compaction.presenter import audit_record, describe_run, describe_standing, plan_of
from agent.sampling.crew import Crew
from agent.sampling.model import PoolSample
from agent.web.errors import ApiError, json_response
from agent.web.security import WriteGuard
from agent.web.waiting import Answer, off_the_loop
from agent.wire import compaction as wire_compaction
from engine_shim.control.messages import CompactRequest, ControlRequest, PlanRequest, encode_request
from engine_shim.errors import ControlMalformed, ControlRefused, ControlTimeout, ControlUnavailable, KvatlasError

ROUTE = "/v1/engines/{id}/compaction"
RELOCATION_ROUTE = "/v1/engines/{id}/relocation"
MAX_ENTRIES = 1000
WAITING = 16  # requests that wait for engines at once
PoolId = Annotated[str, Path(description="id of a pool, as /v1/engines lists it", max_length=512)]


def add_compaction(
    app: FastAPI,
    driver: CompactionDriver,
    sample: Callable[[str], PoolSample],
    require_writer: Callable[[Request], Awaitable[None]],
    guard: WriteGuard,
) -> None:
    """`sample` raises ApiError for a pool that is not known; `require_writer` for who may not change anything."""
    crew = Crew(WAITING)

    def known_as(engine: str) -> str:
        """The pool id that entries carry; a pool that has gone is asked for by that id itself."""
        try:
            return sample(engine).id
        except ApiError:
            return engine

    def asker(request: Request, route: str = ROUTE) -> Asker:
        address = request.client.host if request.client else None
        access = "loopback" if guard.token is None else "token"
        return Asker(route=f"{request.method} {route}", access=access, address=address)  # type: ignore[arg-type]

    @app.get(ROUTE, response_model=wire_compaction.CompactionState, tags=["compaction"])
    async def state(
        id: PoolId,
        plan: Annotated[bool, Query(description="also plan a run, from the last sample")] = False,
        target: Annotated[float | None, Query(ge=0, le=1, description="of the plan; the policy's")] = None,
        max_moves: Annotated[int | None, Query(ge=0, description="of the plan; as many as the target takes")] = None,
    ) -> Response:
        """What the policy does about one pool and why, what it may still spend, and what the last run brought."""
        found = sample(id)
        wanted = driver.settings.target if target is None else target
        # Asked now: what was switched by hand, or for an engine that the policy leaves alone, is not known otherwise.
        await _off_the_loop(crew, lambda: driver.look(found))
        stands = driver.standing(found)
        made = await _off_the_loop(crew, lambda: plan_of(found, wanted, max_moves, stands)) if plan else None
        return json_response(describe_standing(found, stands, driver.settings, made))

    @app.post(
        ROUTE, response_model=wire_compaction.CompactionRun, tags=["compaction"], dependencies=[Depends(require_writer)]
    )
    async def run(id: PoolId, request: Request, order: wire_compaction.CompactionOrder | None = None) -> Response:
        """One run, answered when it has ended; with `dry_run`, what the engine would move."""
        found, order, who = sample(id), order or wire_compaction.CompactionOrder(), asker(request)
        wanted: ControlRequest
        if order.dry_run:
            wanted = plan = PlanRequest(target=order.target, max_moves=order.max_moves)
            _check(wanted)
            reply = await _off_the_loop(crew, lambda: driver.plan(found, plan))
        else:
            wanted = compact = CompactRequest(
                target=order.target, max_moves=order.max_moves, max_seconds=order.max_seconds, verify=order.verify
            )
            _check(wanted)
            reply = await _off_the_loop(crew, lambda: driver.compact(found, compact, who))
            if reply.decision == "refused":
                raise ApiError(403, "refused", reply.reason, "see the reason; the engine's operator decides")
        return json_response(describe_run(found.id, reply))

    @app.delete(
        ROUTE,
        response_model=wire_compaction.CompactionSwitch,
        tags=["compaction"],
        dependencies=[Depends(require_writer)],
    )
    async def switch_off(id: PoolId, request: Request) -> Response:
        """The kill switch: forbids moves of live blocks and ends a run under way. `kvatlas compact --on` undoes it."""
        found, who = sample(id), asker(request)
        reply = await _off_the_loop(crew, lambda: driver.switch_off(found, who))
        return json_response(wire_compaction.CompactionSwitch(id=found.id, moving=reply.on, reason=reply.reason))

    @app.post(
        RELOCATION_ROUTE,
        response_model=wire_compaction.RelocationSwitch,
        tags=["compaction"],
        dependencies=[Depends(require_writer)],
    )
    async def relocate(id: PoolId, request: Request, order: wire_compaction.RelocationOrder) -> Response:
        """Switch relocating allocation on or off, where the engine was started to allow it. The policy does not switch
        it on again after it was switched off here, until the engine or the agent starts anew."""
        found, who = sample(id), asker(request, RELOCATION_ROUTE)
        reply = await _off_the_loop(crew, lambda: driver.switch_relocation(found, order.on, who))
        return json_response(wire_compaction.RelocationSwitch(id=found.id, relocation=reply.on, reason=reply.reason))

    @app.get("/v1/compactions", response_model=wire_compaction.CompactionList, tags=["compaction"])
    async def compactions(
        engine: Annotated[str | None, Query(description="id of a pool", max_length=512)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = 100,
    ) -> Response:
        """What was decided and asked for, and what came of it, newest first."""
        wanted = engine and known_as(engine)
        entries = [audit_record(entry) for entry in driver.audit.recent(limit, wanted or None)]
        return json_response(wire_compaction.CompactionList(unwritten=driver.audit.unwritten_entries, entries=entries))


def _check(request: ControlRequest) -> None:
    """Refuse what the engine would refuse, as the asker's fault; a reply that cannot be read is not theirs."""
    try:
        encode_request(request)
    except ControlMalformed as error:
        raise ApiError(400, "bad_request", str(error), "GET /docs lists the fields and their ranges") from error


async def _off_the_loop(crew: Crew, ask: Callable[[], Answer]) -> Answer:
    """Ask an engine, whose answer may take a minute. Raises ApiError."""
    try:
        return await off_the_loop(crew, ask, "api-compaction", f"{WAITING} requests wait for engines already")
    except KvatlasError as error:
        raise _api_error(error) from error


def _api_error(error: KvatlasError) -> ApiError:
    text = str(error)
    if isinstance(error, ControlTimeout):
        return ApiError(504, "timeout", text, "GET the same path to see what came of it, then ask again")
    if isinstance(error, ControlUnavailable):
        return ApiError(503, "unavailable", text, "see that the engine runs and offers control")
    if isinstance(error, ControlMalformed):
        return ApiError(502, "malformed", text, "run one version of KVAtlas in the engine and in the agent")
    if isinstance(error, ControlRefused):
        words: dict[str, tuple[int, str]] = {
            "busy": (409, "wait for the run to end, or end it with DELETE"),
            "refused": (403, "see the reason; the engine's operator decides"),
        }
        status, action = words.get(error.error, (400, "change what is asked for"))
        return ApiError(status, error.error, f"{error.field}: {text}" if error.field else text, action)
    return ApiError(400, "bad_request", text, "change what is asked for")
