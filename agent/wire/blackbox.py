"""What the agent says over HTTP of the black boxes that it keeps of engines that ended.

Times are Unix seconds; counts are blocks. Request ids and cache salts appear as hashes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agent.wire import BlockStateName, Fragmentation, WireModel
from agent.wire.history import Mark


class BoxSummary(WireModel):
    """One black box, without what is in it."""

    name: str  # what /v1/black-boxes/{name} takes
    id: str  # of the pool
    engine_id: str
    incarnation: str  # hexadecimal
    model: str
    ended_unix: float  # the engine's last sign of life
    state: str  # "gone", "unreadable", or "replaced" by a new start
    reason: str
    in_good_order: bool | None  # it said that it ends; None: not known
    size_bytes: int
    left_out: list[str]  # what could not be had, each with its reason


class BoxList(WireModel):
    schema_: Literal["kvatlas.black-boxes/v1"] = Field(default="kvatlas.black-boxes/v1", alias="schema")
    total: int  # boxes of what was asked for; `boxes` may be fewer
    damaged: list[str]  # names of those that cannot be read, each with its reason
    boxes: list[BoxSummary]  # the one that ended last, first


class BoxMap(WireModel):
    """The blocks as they were at the end, in equal cells of consecutive blocks as in MapCells."""

    total_blocks: int
    blocks_per_cell: int
    cells: int
    state: list[int]
    counts: dict[BlockStateName, list[int]]
    fragmentation: Fragmentation


class BoxRequest(WireModel):
    """One sequence at the end."""

    request_id: str  # hashed
    lora: str
    cache_salt: str  # hashed
    tokens: int
    blocks: int
    age_seconds: float | None  # at the engine's last sign of life; None where it does not say since when


class BoxEvent(WireModel):
    """One event of the map's ring: what happened to `count` blocks that start at `block`."""

    time_unix: float
    kind: str  # "allocate", "free", "cache", "evict", "reuse", "move", ...
    block: int
    count: int
    owner: int
    other: int


class BoxHistory(WireModel):
    """Every metric over its last hour: [minimum, mean, maximum] of each bucket."""

    step_seconds: float
    start_unix: list[float]
    columns: dict[str, list[list[float | None]]]


class BlackBox(WireModel):
    schema_: Literal["kvatlas.black-box-contents/v1"] = Field(default="kvatlas.black-box-contents/v1", alias="schema")
    summary: BoxSummary
    facts: dict[str, Any]  # box.json as it is: settings, counters, groups, histograms
    map: BoxMap | None
    map_reason: str  # why there is no map; "" where there is one
    requests_total: int
    requests: list[BoxRequest]  # most blocks first
    events_total: int  # in the box
    events_missed: int  # that the ring had no room for
    events: list[BoxEvent]  # the newest, oldest first
    marks: list[Mark]  # oldest first
    history: BoxHistory
