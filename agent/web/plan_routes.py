"""The route of the capacity planner: a model and settings in, a plan out. It reads no files and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from pydantic import ConfigDict, Field

from agent import wire
from agent.capacity.geometry import Confidence
from agent.capacity.live import live_pool
from agent.capacity.live import to_json as live_json
from agent.capacity.reading import LayoutUnknown
from agent.capacity.request import PlanRequest
from agent.capacity.words import refusal
from agent.sampling.model import PoolSample
from agent.web.errors import ApiError, json_response
from engine_shim.errors import SettingsError

ROUTE = "/v1/plan"

PoolId = Annotated[str, Path(description="id of a pool, or of an engine with one", max_length=512)]


class PlanAnswer(wire.WireModel):
    """The plan, under the keys that scripts may rely on; more stand beside them, as in `kvatlas plan --json`."""

    model_config = ConfigDict(extra="allow")

    schema_: str = Field(alias="schema")
    model: str
    attention: str | None
    kv_bytes_per_token: int | None
    kv_bytes_per_token_ideal: int | None
    kv_bytes_per_block: int | None
    state_bytes_per_sequence: int | None
    memory: dict[str, Any] | None
    num_blocks: int | None
    pool_tokens: int | None
    max_concurrent_sequences: int | None
    fits: bool | None
    confidence: Confidence
    warnings: list[str]
    arithmetic: list[str]
    advice: list[dict[str, Any]] | None = None
    advice_together: dict[str, Any] | None = None


class LiveAdvice(wire.WireModel):
    """What to change in an engine that runs, from its map."""

    schema_: str = Field(alias="schema")
    engine: str
    model: str
    memory_is_short: bool
    verdict: str
    pool_bytes: int
    live_share: float
    options: list[dict[str, Any]]
    planned: dict[str, Any] | None
    planned_options: list[dict[str, Any]] | None


def add_planning(
    app: FastAPI, sample: Callable[[str], PoolSample], require_writer: Callable[[Request], Awaitable[None]]
) -> None:
    """`sample` raises ApiError for a pool that is not known, `require_writer` for who may not POST."""
    # Plans are arithmetic alone: several at once would only take each other's time, and the sampler's.
    one_at_a_time = asyncio.Semaphore(1)

    @app.get("/v1/engines/{id}/advice", response_model=LiveAdvice, tags=["capacity"])
    async def advice(id: PoolId) -> Response:
        """Whether memory is short in one pool, what each change would bring, and what is ruled out."""
        found = sample(id)
        pool = live_pool(found.snapshot, found.report, found.waste.tokens if found.waste else None)
        return json_response(LiveAdvice.model_validate(live_json(pool)))

    @app.post(ROUTE, response_model=PlanAnswer, tags=["capacity"], dependencies=[Depends(require_writer)])
    async def plan(asked: PlanRequest) -> Response:
        """What a model keeps in memory, what fits on given GPUs, and with `advise` what to change."""
        try:
            # Off the loop: advice is some twenty plans, and a config may have thousands of layers.
            async with one_at_a_time:
                found = await asyncio.to_thread(asked.ask)
        except LayoutUnknown as unknown:
            return json_response(PlanAnswer.model_validate(refusal(asked.model or "model", str(unknown))))
        except SettingsError as error:
            raise ApiError(400, "bad_request", str(error), "GET /docs lists the fields of a plan") from error
        return json_response(PlanAnswer.model_validate(found.to_json()))
