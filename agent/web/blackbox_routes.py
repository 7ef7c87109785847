"""Routes of black boxes: which there are, and what is in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Response
from pydantic import ValidationError

from agent.blackbox.contents import NANOSECONDS
from agent.blackbox.reading import BoxDamaged, BoxReader, FoundBox, OpenBox
from agent.fragmentation import analyze
from agent.sampling.crew import Crew
from agent.web.cells import cut, states_by_cell
from agent.web.errors import ApiError, json_response
from agent.web.presenter import fragmentation
from agent.web.waiting import off_the_loop
from agent.wire import blackbox as wire_blackbox
from agent.wire import history as wire_history
from engine_shim.snapshot import MapSnapshot

ROUTE = "/v1/black-boxes"
MAX_CELLS = 4096
MAX_BOXES = 1000
MAX_EVENTS_TOLD, DEFAULT_EVENTS = 10_000, 200
MAX_REQUESTS_TOLD = 4096
READING = 2  # boxes that are being read at once: each may take as much memory as its map
BUSY = f"{READING} black boxes are being read already"


def add_black_boxes(app: FastAPI, reader: BoxReader | None) -> None:
    """Without a `reader` the agent keeps no boxes, and the routes say so."""
    crew = Crew(READING)

    def kept() -> BoxReader:
        if reader is None:
            action = "set KVATLAS_STATE_DIR to a folder, and start the agent anew"
            raise ApiError(404, "not_kept", "the agent keeps no black boxes", action)
        return reader

    @app.get(ROUTE, response_model=wire_blackbox.BoxList, tags=["black boxes"])
    async def boxes(
        engine: Annotated[str | None, Query(description="id of a pool, or of an engine", max_length=512)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_BOXES)] = 100,
    ) -> Response:
        """Engines that ended, with the last first."""
        found, damaged = await off_the_loop(crew, kept().boxes, "api-black-boxes", BUSY)
        told = [_summary(one) for one in found]
        wanted = [one for one in told if engine is None or engine in (one.id, one.engine_id)]
        return json_response(wire_blackbox.BoxList(total=len(wanted), damaged=list(damaged), boxes=wanted[:limit]))

    @app.get(ROUTE + "/{name}", response_model=wire_blackbox.BlackBox, tags=["black boxes"])
    async def box(
        name: Annotated[str, Path(description="as the list has it", max_length=512)],
        cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS,
        events: Annotated[int, Query(ge=0, le=MAX_EVENTS_TOLD, description="the newest")] = DEFAULT_EVENTS,
    ) -> Response:
        """One black box: its last map in cells, its last events, its history, and what happened to it."""
        there = kept()
        try:
            told = await off_the_loop(
                crew, lambda: describe_box(there.open(name), cells, events), "api-black-box", BUSY
            )
        except KeyError:
            raise ApiError(404, "not_found", f"no black box {name!r}", f"GET {ROUTE} lists them") from None
        except (BoxDamaged, OSError) as error:
            action = "see the file in the folder blackbox of the state folder"
            raise ApiError(503, "unavailable", f"{name} cannot be read: {error}", action) from error
        return json_response(told)


def describe_box(box: OpenBox, cells: int, events: int) -> wire_blackbox.BlackBox:
    """As the API tells it. Raises BoxDamaged for a box whose members are not those that an agent writes."""
    summary = _summary(box.found)
    told = box.told
    try:
        rows = told["events.json"].get("events", [])
        requests = [
            _request(one, summary.ended_unix)
            for one in sorted(told["requests.json"].get("requests", []), key=lambda one: -one["blocks"])
        ]
        return wire_blackbox.BlackBox(
            summary=summary,
            facts=dict(box.found.facts),
            map=_map(box.snapshot, cells) if box.snapshot is not None else None,
            map_reason=box.map_reason,
            requests_total=len(requests),
            requests=requests[:MAX_REQUESTS_TOLD],
            events_total=len(rows),
            events_missed=told["events.json"].get("not_kept_by_the_ring", 0),
            events=[_event(one) for one in rows[len(rows) - min(events, len(rows)) :]],
            marks=[wire_history.Mark(**one) for one in told["marks.json"].get("marks", [])],
            history=wire_blackbox.BoxHistory(
                step_seconds=told["history.json"].get("step_seconds", 0.0),
                start_unix=told["history.json"].get("start_unix", []),
                columns=told["history.json"].get("minimum_mean_maximum", {}),
            ),
        )
    except (ValidationError, KeyError, TypeError) as error:
        raise BoxDamaged(f"a member of it is not as an agent writes it: {type(error).__name__}") from error


def _summary(found: FoundBox) -> wire_blackbox.BoxSummary:
    facts = found.facts
    engine = facts["engine"]
    return wire_blackbox.BoxSummary(
        name=found.name,
        id=str(facts["id"]),
        engine_id=str(engine["engine_id"]),
        incarnation=str(engine.get("incarnation", "")),
        model=str(engine.get("model", "")),
        ended_unix=float(facts["ended_unix"]),
        state=str(facts.get("state", "")),
        reason=str(facts.get("reason", "")),
        in_good_order=facts.get("in_good_order"),
        size_bytes=found.size_bytes,
        left_out=[str(one) for one in facts.get("left_out", [])],
    )


def _map(snapshot: MapSnapshot, cells: int) -> wire_blackbox.BoxMap:
    total = snapshot.states.size
    per_cell, count = cut(total, cells)
    state, counts = states_by_cell(snapshot.states, per_cell, count)
    return wire_blackbox.BoxMap(
        total_blocks=total,
        blocks_per_cell=per_cell,
        cells=count,
        state=state,
        counts=counts,
        fragmentation=fragmentation(analyze(snapshot.states), known=not snapshot.flags.sleeping),
    )


def _request(told: Mapping[str, Any], ended_unix: float) -> wire_blackbox.BoxRequest:
    since = told.get("first_seen_unix_ns")
    return wire_blackbox.BoxRequest(
        request_id=told["request_id"],
        lora=told["lora"],
        cache_salt=told["cache_salt"],
        tokens=told["tokens"],
        blocks=told["blocks"],
        age_seconds=max(0.0, ended_unix - since / NANOSECONDS) if since else None,
    )


def _event(told: Mapping[str, Any]) -> wire_blackbox.BoxEvent:
    return wire_blackbox.BoxEvent(
        time_unix=told["time_ns"] / NANOSECONDS,
        kind=told["kind"],
        block=told["block"],
        count=told["count"],
        owner=told["owner"],
        other=told["other"],
    )
