"""Routes of the past: one metric over time, the blocks at a time, and what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from fastapi import FastAPI, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from numpy.typing import NDArray

from agent import wire
from agent.fragmentation import analyze
from agent.history import MAX_POINTS, METRICS, History
from agent.history.frames import FrameCorrupt
from agent.history.reading import MAX_MARKS_READ, KeptFrame, Past
from agent.sampling.model import Clock
from agent.web.cells import cut, states_by_cell
from agent.web.errors import ApiError, json_response
from agent.web.presenter import block_counts, fragmentation
from agent.wire import history as wire_history
from alerts.database import DatabaseUnusable

DEFAULT_HISTORY_SECONDS = 600.0
DEFAULT_POINTS = 600
DEFAULT_MARK_SECONDS = 86_400.0
MAX_CELLS = 4096
MAX_TIMES = 3600
MAX_TIME = 1e11  # Unix seconds; SQLite's integers hold it in milliseconds

PoolId = Annotated[str, Path(description="id of a pool, or of an engine with one", max_length=512)]


def add_history(
    app: FastAPI,
    pool_id: Callable[[str], str],
    history: History,
    past: Past | None,
    clock: Clock,
    interval_seconds: float,
) -> None:
    """`pool_id` finds the pool of that id in the present view, or raises ApiError. Without a `past`, frames and marks
    are not kept, and the routes say so."""

    async def known(id: str) -> str:
        """The pool's id; also of one that only the past knows."""
        try:
            return pool_id(id)
        except ApiError:
            if past is not None and id in await run_in_threadpool(_kept_pools, past):
                return id
            raise

    def kept() -> Past:
        if past is None:
            action = "set KVATLAS_STATE_DIR to a folder, and start the agent anew"
            raise ApiError(404, "not_kept", "the agent keeps nothing of the past but metrics in memory", action)
        return past

    @app.get("/v1/engines/{id}/history", response_model=wire.History, tags=["engines"])
    async def read_history(
        id: PoolId,
        metric: Annotated[str, Query(description=", ".join(METRICS))],
        start: Annotated[float | None, Query(alias="from", description="Unix seconds; ten minutes before `to`")] = None,
        end: Annotated[float | None, Query(alias="to", description="Unix seconds; now")] = None,
        step: Annotated[float | None, Query(description="seconds; 600 points by default")] = None,
    ) -> Response:
        """One metric over time in buckets of `step` seconds, as far back as it is kept."""
        id = await known(id)
        end = clock.wall() if end is None else end
        start = end - DEFAULT_HISTORY_SECONDS if start is None else start
        step = max(interval_seconds, (end - start) / DEFAULT_POINTS) if step is None else step
        try:
            if past is None:
                buckets = history.query(id, metric, start, end, step)  # memory alone answers in a millisecond
            else:
                buckets = await run_in_threadpool(history.query, id, metric, start, end, step)
        except KeyError:
            buckets = []
        except ValueError as error:
            action = f"give Unix seconds, and a step for at most {MAX_POINTS} points"
            if metric not in METRICS:
                action = f"metric is one of {', '.join(METRICS)}"
            raise ApiError(400, "bad_request", str(error), action) from error
        points = [
            wire.HistoryPoint(time_unix=one.start_unix, minimum=one.minimum, mean=one.mean, maximum=one.maximum)
            for one in buckets
        ]
        return json_response(wire.History(id=id, metric=metric, step_seconds=step, points=points))

    @app.get("/v1/engines/{id}/frames", response_model=wire_history.FrameCells, tags=["engines"])
    async def read_frame(
        id: PoolId,
        at: Annotated[float | None, Query(description="Unix seconds; now", ge=-MAX_TIME, le=MAX_TIME)] = None,
        cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS,
    ) -> Response:
        """The blocks at an earlier time: the newest frame that is not after `at`, in at most `cells` cells."""
        reader, id = kept(), await known(id)
        at = clock.wall() if at is None else at
        try:
            frame = await run_in_threadpool(reader.frame_at, id, at)
            if frame is None:
                raise _no_frame(id, at, await run_in_threadpool(reader.frame_range, id))
        except (DatabaseUnusable, FrameCorrupt) as error:
            raise _unreadable(error) from error
        return json_response(await run_in_threadpool(_frame_cells, id, at, frame, cells))

    @app.get("/v1/engines/{id}/frames/times", response_model=wire_history.FrameTimes, tags=["engines"])
    async def read_frame_times(
        id: PoolId,
        start: Annotated[
            float | None,
            Query(alias="from", description="Unix seconds; ten minutes before `to`", ge=-MAX_TIME, le=MAX_TIME),
        ] = None,
        end: Annotated[
            float | None, Query(alias="to", description="Unix seconds; now", ge=-MAX_TIME, le=MAX_TIME)
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_TIMES)] = DEFAULT_POINTS,
    ) -> Response:
        """The instants of which a frame is kept; where there are more than `limit`, evenly spread ones."""
        reader, id = kept(), await known(id)
        end = clock.wall() if end is None else end
        start = end - DEFAULT_HISTORY_SECONDS if start is None else start
        if start > end:
            raise ApiError(400, "bad_request", f"from={start} is after to={end}", "give a range that ends later")
        try:
            times, ends = await run_in_threadpool(
                lambda: (reader.frame_times(id, start, end), reader.frame_range(id))  # in one turn of one thread
            )
        except DatabaseUnusable as error:
            raise _unreadable(error) from error
        step, chosen = thin_out(times, start, end, limit)
        return json_response(
            wire_history.FrameTimes(
                id=id,
                from_unix=start,
                to_unix=end,
                first_unix=ends[0] if ends else None,
                last_unix=ends[1] if ends else None,
                total=times.size,
                step_seconds=step,
                times_unix=chosen.tolist(),
            )
        )

    @app.get("/v1/engines/{id}/marks", response_model=wire_history.MarkList, tags=["engines"])
    async def read_marks(
        id: PoolId,
        start: Annotated[
            float | None,
            Query(alias="from", description="Unix seconds; a day before `to`", ge=-MAX_TIME, le=MAX_TIME),
        ] = None,
        end: Annotated[
            float | None, Query(alias="to", description="Unix seconds; now", ge=-MAX_TIME, le=MAX_TIME)
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_MARKS_READ)] = MAX_MARKS_READ,
        holds: Annotated[bool, Query(description="with decisions to do nothing")] = True,
    ) -> Response:
        """What happened to a pool and was decided for it: the newest `limit` of that time."""
        reader, id = kept(), await known(id)
        end = clock.wall() + 1.0 if end is None else end
        start = end - DEFAULT_MARK_SECONDS if start is None else start
        try:
            found = await run_in_threadpool(reader.marks, id, start, end, limit, holds=holds)
        except DatabaseUnusable as error:
            raise _unreadable(error) from error
        marks = [
            wire_history.Mark(
                time_unix=one.time_unix, pool=one.pool, kind=one.kind, text=one.text, detail=dict(one.detail)
            )
            for one in found
        ]
        return json_response(wire_history.MarkList(id=id, marks=marks))


def thin_out(times: NDArray[np.float64], start: float, end: float, limit: int) -> tuple[float, NDArray[np.float64]]:
    """At most `limit` (at least 1) of `times`, which rise from `start` to `end`: all, with a step of 0, or the last one
    of each step of that many seconds. Steps are counted from the end, so that the newest is among them."""
    if times.size <= limit:
        return 0.0, times
    step = (end - start) / limit
    if step <= 0:
        return 0.0, times[-1:]
    before_end = np.minimum(np.floor((end - times) / step), limit - 1)
    last_of_step = np.append(before_end[1:] != before_end[:-1], True)
    return step, times[last_of_step]


def _kept_pools(past: Past) -> tuple[str, ...]:
    try:
        return past.pools()
    except DatabaseUnusable:
        return ()


def _frame_cells(id: str, at_unix: float, frame: KeptFrame, cells: int) -> wire_history.FrameCells:
    total = frame.states.size
    per_cell, count = cut(total, cells)
    state, counts = states_by_cell(frame.states, per_cell, count)
    report = analyze(frame.states)
    return wire_history.FrameCells(
        id=id,
        at_unix=at_unix,
        time_unix=frame.time_unix,
        age_seconds=max(0.0, at_unix - frame.time_unix),
        resolution_seconds=frame.resolution_seconds,
        incarnation=frame.incarnation,
        sequence=frame.sequence,
        first_unix=frame.first_unix,
        last_unix=frame.last_unix,
        previous_unix=frame.previous_unix,
        next_unix=frame.next_unix,
        total_blocks=total,
        blocks_per_cell=per_cell,
        cells=count,
        state=state,
        counts=counts,
        blocks=block_counts(report),
        fragmentation=fragmentation(report),
    )


def _no_frame(id: str, at: float, kept: tuple[float, float] | None) -> ApiError:
    there = "none is kept of this pool yet" if kept is None else f"there are frames from {kept[0]:.3f} to {kept[1]:.3f}"
    return ApiError(404, "not_found", f"no frame of {id!r} at {at:.3f} or before: {there}", "ask for a later time")


def _unreadable(error: Exception) -> ApiError:
    return ApiError(503, "unavailable", f"the history cannot be read: {error}", "see the agent's log")
