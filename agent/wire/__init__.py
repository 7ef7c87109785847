"""What the agent says over HTTP: the models that its API returns and its clients parse.

Rates are 0 to 1 and None where undefined; times are Unix seconds; counts are blocks unless the name says otherwise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

EngineState = Literal["live", "stale", "stalled", "sleeping", "gone", "unreadable"]
BlockStateName = Literal["free", "cached", "used", "pinned", "reserved", "unknown"]
ENDED_OWNER = "ended sequence"  # owner of blocks whose sequence is gone: cached ones keep their owner
STATE_NAMES: tuple[BlockStateName, ...] = ("free", "cached", "used", "pinned", "reserved")


class WireModel(BaseModel):
    """Frozen, and refuses NaN and infinity, which JSON does not have.

    `schema_` stands for the JSON key `schema`, a name that pydantic's own models already have.
    """

    model_config = ConfigDict(
        frozen=True, allow_inf_nan=False, ser_json_inf_nan="null", validate_by_name=True, serialize_by_alias=True
    )


class ErrorBody(WireModel):
    """The one error shape: what failed, where, what to do."""

    error: str  # a stable word: "not_found", "bad_request", "unauthorized", "unavailable", ...
    message: str
    action: str


class BlockCounts(WireModel):
    """Partition of the pool: the six sum to `total_blocks`."""

    free: int
    cached: int
    used: int
    pinned: int
    reserved: int
    unknown: int = 0


class Fragmentation(WireModel):
    """1 - largest run / total, over free + cached blocks (`rate`) and over free ones alone (`strict_rate`)."""

    rate: float | None
    strict_rate: float | None
    largest_allocatable_run: int
    largest_free_run: int
    allocatable_runs: int
    run_length_histogram: list[int]  # allocatable runs with 2**i <= length < 2**(i + 1)


class Forecast(WireModel):
    """When no allocatable block is left at the present trend; None where none is in sight.

    New sequences wait before that: they may not take the headroom.
    """

    exhaustion_seconds: float | None
    reason: str
    known: bool = True  # false where there is nothing to judge by, so that None says nothing
    headroom_seconds: float | None = None  # until only the headroom is left; 0: now
    admission_blocked: bool = False  # requests wait, and too few blocks are left for a new sequence
    admission_reason: str = ""  # "" unless blocked
    queue_grows: bool = False  # ever more requests wait


class EngineMetrics(WireModel):
    """What an engine says of itself in its own metrics; what it does not say, or not believably, is absent."""

    source: str  # the address
    age_seconds: float | None  # since it was read
    frozen_seconds: float  # how long nothing has changed though it reports running requests; 0 where something does
    rank: int | None  # the data-parallel one; None: all of them, or not told
    values: dict[str, float]  # by quantity: kv_usage_ratio, running_requests, waiting_requests, capacity_tokens, ...
    notes: list[str]  # what is doubtful about them


class MetricsDifference(WireModel):
    """One quantity in the metrics and, in the seconds around that reading, in the map. Counters: what was added."""

    quantity: str
    metrics: float
    map_low: float
    map_high: float
    disagreement_ratio: float  # 0 to 1, outside that range
    beyond_tolerance: bool


class MetricsComparison(WireModel):
    """How an engine's own metrics and its map agree."""

    compared: bool
    why_not: str
    disagrees: bool  # in two readings in a row, beyond what the times of reading explain
    disagreement_ratio: float | None  # the largest that lasts; None where nothing is compared
    reason: str  # both numbers, where they disagree
    differences: list[MetricsDifference]


class EngineSummary(WireModel):
    """One pool of one engine, as of its last whole snapshot."""

    block_map: Literal[True] = True

    id: str  # what /v1/engines/{id} takes: "<engine id>.<rank>.<pool>"
    engine_id: str
    incarnation: str  # hexadecimal
    kind: str
    version: str
    model: str
    pool: str
    policy: str
    medium: str
    gpu_uuids: list[str]
    rank: str  # "dp0.tp0.pp0"
    pid: int
    state: EngineState
    reason: str  # why it is not "live"; "" where it is
    degraded: bool  # the shim's observer has stopped; numbers no longer follow the pool
    snapshot_age_seconds: float | None
    heartbeat_age_seconds: float | None
    last_step_age_seconds: float | None
    running_requests: int
    waiting_requests: int
    total_blocks: int
    usable_blocks: int
    headroom_blocks: int
    block_tokens: int
    block_bytes: int
    blocks: BlockCounts
    fragmentation: Fragmentation
    tail_waste_tokens: int | None  # empty slots in used blocks
    tail_waste_bytes: int | None
    oldest_pinned_seconds: float | None
    forecast: Forecast
    counters: dict[str, int]
    metrics: EngineMetrics | None = None  # where the agent was told to read them
    metrics_comparison: MetricsComparison | None = None
    replay: bool = False  # of a recording that is played back: `pid` is of then, and no engine runs


class UnmappedEngine(WireModel):
    """An engine known from its own metrics alone. It has no block map: nothing is known of its fragmentation."""

    block_map: Literal[False] = False
    id: str
    engine_id: str
    kind: str
    model: str  # "" where it is not told
    state: Literal["live", "frozen", "unreachable"]
    reason: str  # why it is not "live"
    metrics: EngineMetrics
    ranks: list[EngineMetrics]  # where there are several data-parallel ones


class MetricsSource(WireModel):
    """An address whose metrics are read."""

    source: str
    engine_id: str  # "" unless the operator gave it
    up: bool
    fault: str  # of the last attempt
    age_seconds: float | None
    several_writers: bool
    engines: int


class ReplayGap(WireModel):
    """Events that the recorder came too late for. The sample after it is right again."""

    time_unix: float
    first_event: int  # number of the first one
    events: int


class ReplayStatus(WireModel):
    """A recording that is played back: what the agent serves is what was then, and no engine runs behind it."""

    schema_: Literal["kvatlas.replay/v1"] = Field(default="kvatlas.replay/v1", alias="schema")
    file: str  # its name
    id: str  # of the recorded pool
    recorded_from_unix: float
    recorded_until_unix: float
    position_unix: float  # where it is
    speed: float  # seconds of the recording in a second
    paused: bool
    at_end: bool
    recording_ended: str  # why
    samples: int
    events: int
    lost_events: int
    gaps: list[ReplayGap]
    dropped: str  # what of the file's end could not be used; "" where nothing
    notes: list[str]  # of the recorder
    fault: str  # why the replay stopped; "" while all is well


class ReplayOrder(BaseModel):
    """The body of POST /v1/replay; what is left out stays as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    position_unix: float | None = Field(default=None, ge=0, le=1e10, description="where to go")
    speed: float | None = Field(default=None, ge=0.01, le=10_000, description="seconds of the recording in a second")
    paused: bool | None = None


class AgentStatus(WireModel):
    """Beside the list of engines: the agent itself."""

    version: str
    started_unix: float
    interval_seconds: float
    threshold: float  # the fragmentation rate above which the pool is called fragmented
    folders: list[str]  # where maps are looked for
    unreadable: list[str]  # maps or folders seen and not read, each with its reason
    writes_enabled: bool
    writes_need_token: bool = True  # false: peers on the agent's own machine may change things without one
    engine_metrics: list[MetricsSource] = []
    replay: ReplayStatus | None = None  # where the pools are those of a recording, and no engine runs


class EngineList(WireModel):
    schema_: Literal["kvatlas.engines/v1"] = Field(default="kvatlas.engines/v1", alias="schema")
    now_unix: float
    agent: AgentStatus
    engines: list[EngineSummary]
    unmapped: list[UnmappedEngine] = []  # no block map: from their own metrics alone


class MapCells(WireModel):
    """The pool cut into equal cells of consecutive blocks, column by column; every list has one entry a cell.

    Cell i covers blocks start = i * blocks_per_cell up to min(start + blocks_per_cell, total_blocks) - 1.
    """

    schema_: Literal["kvatlas.map-cells/v1"] = Field(default="kvatlas.map-cells/v1", alias="schema")
    id: str
    sequence: int
    snapshot_age_seconds: float
    total_blocks: int
    blocks_per_cell: int
    cells: int
    state: list[int]  # most frequent BlockState of the cell; ties: the higher value; 255 unknown
    counts: dict[BlockStateName, list[int]]  # blocks of the cell in each state; states that occur nowhere are left out
    references: list[int] | None  # highest reference count in the cell
    age_seconds: list[float] | None  # since the most recent touch in the cell; whole tenths
    owner: list[int] | None  # index into `owners` of the owner of most blocks in the cell; -1 nobody
    owners: list[str]  # request ids
    requested: list[int] | None = None  # blocks that the request asked about was first to hold; None: no such request


class Block(WireModel):
    """One block, every column that the writer keeps."""

    block: int
    state: BlockStateName
    references: int | None
    tokens: int | None
    owner: str | None
    position: int | None
    age_seconds: float | None
    group: int | None


class BlockPage(WireModel):
    schema_: Literal["kvatlas.blocks/v1"] = Field(default="kvatlas.blocks/v1", alias="schema")
    id: str
    sequence: int
    start: int
    blocks: list[Block]


RequestOrder = Literal[
    "blocks",
    "tokens",
    "owned_blocks",
    "exclusive_blocks",
    "runs",
    "tail_waste_tokens",
    "age_seconds",
    "tokens_per_second",
    "last_block_seconds",
    "request_id",
    "lora",
    "cache_salt",
]
"""Columns that live sequences can be sorted by."""


class Request(WireModel):
    """One live sequence and what it holds; `exclusive_blocks` and `runs` count only blocks it was first to hold.

    `blocks` is its whole table, in which shared blocks are; `owned_blocks` are those that it was the first to hold, so
    that over all sequences each block counts once.
    """

    request_id: str
    lora: str
    cache_salt: str
    tokens: int
    blocks: int
    exclusive_blocks: int | None
    runs: int | None
    tail_waste_tokens: int | None
    age_seconds: float
    owned_blocks: int | None = None
    tokens_per_second: float | None = None  # mean over its life, the prompt's tokens included
    last_block_seconds: float | None = None  # since it last took a block; one that stands still takes none


class RequestGroup(WireModel):
    """Sequences with one label, summed up; each block counts once, with the sequence that was the first to hold it."""

    label: str  # "": those without one
    requests: int
    tokens: int
    owned_blocks: int | None
    exclusive_blocks: int | None
    runs: int | None
    tail_waste_tokens: int | None
    oldest_seconds: float | None


class RequestPage(WireModel):
    """Live sequences; totals and groups are of all that match, however many are listed."""

    schema_: Literal["kvatlas.requests/v1"] = Field(default="kvatlas.requests/v1", alias="schema")
    id: str
    sequence: int
    total: int  # in the pool
    requests: list[Request]  # the first `limit` of those that match, in the order asked for
    matching: int | None = None
    totals: RequestGroup | None = None
    by_lora: list[RequestGroup] = []  # most blocks first, at most 50
    lora_groups: int = 0  # that there are
    by_cache_salt: list[RequestGroup] = []
    cache_salt_groups: int = 0


class HistoryPoint(WireModel):
    """A bucket of samples; None where no sample had a value."""

    time_unix: float
    minimum: float | None
    mean: float | None
    maximum: float | None


class History(WireModel):
    schema_: Literal["kvatlas.history/v1"] = Field(default="kvatlas.history/v1", alias="schema")
    id: str
    metric: str
    step_seconds: float
    points: list[HistoryPoint]
