"""The route of the capacity planner: a model and settings in, a plan out. It reads no files and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response

from agent.capacity.formats import KV_FORMATS, WEIGHT_FORMATS
from agent.capacity.gpus import GPUS
from agent.capacity.live import live_pool
from agent.capacity.live import to_json as live_json
from agent.capacity.presets import PRESETS
from agent.capacity.reading import LayoutUnknown
from agent.capacity.request import PlanRequest
from agent.capacity.words import refusal
from agent.sampling.model import PoolSample
from agent.web.errors import ApiError, json_response
from agent.wire.plan import LiveAdvice, PlanAnswer, PlanCard, PlanChoices
from engine_shim.errors import SettingsError

ROUTE = "/v1/plan"
TOLD_STATES = ("live", "stalled")  # of a pool whose blocks are as the map says; in any other they were, or nobody knows

PoolId = Annotated[str, Path(description="id of a pool, or of an engine with one", max_length=512)]


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
        unknown = "" if found.state in TOLD_STATES else f"the pool is {found.state}: {found.reason}"
        pool = live_pool(found.snapshot, found.report, found.waste.tokens if found.waste else None, unknown)
        return json_response(LiveAdvice.model_validate(live_json(pool)))

    @app.get(ROUTE, response_model=PlanChoices, tags=["capacity"])
    async def choices() -> Response:
        """Models, GPUs and number formats that a plan can name."""
        cards = [
            PlanCard(name=one.name, memory_bytes=one.memory_bytes, estimated=one.estimated, source=one.source)
            for one in GPUS.values()
        ]
        return json_response(
            PlanChoices(
                presets=list(PRESETS),
                gpus=cards,
                kv_dtypes=["auto", *KV_FORMATS],
                weight_dtypes=["auto", *WEIGHT_FORMATS],
            )
        )

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
