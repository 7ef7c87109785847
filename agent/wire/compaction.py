"""What the agent says over HTTP of compaction and relocation: plans, runs, the policy's verdicts, the audit log.

Rates are 0 to 1 and None where undefined; times are Unix seconds; counts are blocks unless the name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent.wire import WireModel


class CompactionOrder(BaseModel):
    """The body of POST /v1/engines/{id}/compaction. The engine may keep to tighter limits of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: float = Field(default=0.10, ge=0, le=1, description="fragmentation rate to come down to")
    max_moves: int | None = Field(default=None, ge=0, description="blocks to move at most; null: what the target takes")
    max_seconds: float = Field(default=60.0, gt=0, le=600, description="then the run ends as far as it came")
    verify: bool = Field(default=False, description="compare contents before each commit")
    dry_run: bool = Field(default=False, description="say what the engine would move, and move nothing")


class CompactionFigures(WireModel):
    """A pool after a run: predicted by its first plan, or realised. None where it is not known."""

    moves: int
    fragmentation_rate: float | None
    largest_allocatable_run: int | None
    sequence_runs: int | None  # contiguous runs over all live sequences
    cached_blocks_lost: int | None
    given_back_bytes: int | None


class CompactionRun(WireModel):
    """What a run did; of a dry run, what it would: then nothing is moved and `..._after` is predicted."""

    schema_: Literal["kvatlas.compaction-run/v1"] = Field(default="kvatlas.compaction-run/v1", alias="schema")
    id: str
    decision: str  # the engine's word: "planned", "reached", "best", "partial", "aborted", "refused", "failed"
    reason: str
    planned_moves: int
    moved_blocks: int
    moved_bytes: int
    fragmentation_rate_before: float | None
    fragmentation_rate_after: float | None
    largest_allocatable_run_before: int | None
    largest_allocatable_run_after: int | None
    predicted: CompactionFigures
    realised: CompactionFigures
    details: dict[str, Any]  # whatever else the engine reports, such as seconds and longest_stall_seconds


class LastCompaction(WireModel):
    ended_unix: float
    asked_by: str  # as in the audit log: "policy", or the route
    run: CompactionRun


class CompactionVerdict(WireModel):
    """A decision of the policy, taken since `since_unix` with the same reason but for its numbers."""

    since_unix: float
    decision: str  # "compact", "relocate", "stop_relocating", "hold_healthy", ...
    acts: bool
    reason: str


class CompactionBudget(WireModel):
    """What moves of live blocks have cost since the agent first saw this engine, and what is left. Bytes."""

    moved_bytes: int
    reserved_bytes: int  # by the run that is under way
    allowance_bytes: int | None  # one full plan; None until there was one
    left_bytes: int | None
    written_share: float  # of KV bytes written, that is added to the allowance
    relocation_copies_per_block: float  # allowed


class EngineMoving(WireModel):
    """How the engine stood to moving when it was last asked."""

    asked: bool  # false: it was not asked yet, or could not be; `reason` says why
    moving: bool | None
    relocation: bool | None  # None: this pool has no relocating allocation, or it is not known
    running: bool | None
    policy: str
    reason: str


class CompactionPlan(WireModel):
    """Made by the agent from its last sample: it costs the engine nothing."""

    target: float
    moves: int
    bytes: int
    fragmentation_rate_before: float | None
    fragmentation_rate_after: float | None
    largest_allocatable_run_before: int
    largest_allocatable_run_after: int
    sequence_runs_before: int | None
    sequence_runs_after: int | None
    cached_blocks_lost: int
    reachable: bool  # false: pinned and reserved blocks stand in the way, and this is the best that there is
    limited: bool  # max_moves cut it
    reason: str


class CompactionState(WireModel):
    """The agent's policy for one pool: what it does, why, and what it may still spend."""

    schema_: Literal["kvatlas.compaction/v1"] = Field(default="kvatlas.compaction/v1", alias="schema")
    id: str
    automatic: bool  # the agent may act here by itself
    automatic_reason: str  # why not
    target: float
    enter: float
    exit: float
    fragmentation_rate: float | None
    decision: str | None  # of the last sample; None before the first
    reason: str
    running: bool  # a run that this agent asked for is under way
    undone_runs: int  # in a row that did not last
    settled: bool  # so many that the policy expects no more of it
    budget: CompactionBudget
    engine: EngineMoving
    verdicts: list[CompactionVerdict]  # newest first
    last_run: LastCompaction | None
    plan: CompactionPlan | None  # where it was asked for
    undone_reason: str = ""  # how the last run that did not last was undone
    next_run_seconds: float | None = None  # of the cooldown or the back-off; None: no pause
    consumers: list[str] = Field(default_factory=list)  # who profits from contiguous blocks: declared, or found
    require_consumer: bool = False  # the policy does nothing without one
    relocation_held: str = ""  # why the policy does not switch relocation on: somebody switched it off


class CompactionSwitch(WireModel):
    """How the engine's switch stands now."""

    schema_: Literal["kvatlas.compaction-switch/v1"] = Field(default="kvatlas.compaction-switch/v1", alias="schema")
    id: str
    moving: bool
    reason: str


class RelocationOrder(BaseModel):
    """The body of POST /v1/engines/{id}/relocation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    on: bool


class RelocationSwitch(WireModel):
    """How relocating allocation stands in the engine now."""

    schema_: Literal["kvatlas.relocation-switch/v1"] = Field(default="kvatlas.relocation-switch/v1", alias="schema")
    id: str
    relocation: bool
    reason: str


class AuditRecord(WireModel):
    """One thing that was decided or asked for, with what came of it."""

    time_unix: float
    route: str  # who: "policy", "cli", or the route of the API
    access: str
    address: str | None
    action: str  # "decide", "hold", "compact", "relocation", "moving"
    engine: str
    parameters: dict[str, Any]
    outcome: str
    reason: str
    seconds: float | None
    result: dict[str, Any]


class CompactionList(WireModel):
    schema_: Literal["kvatlas.compactions/v1"] = Field(default="kvatlas.compactions/v1", alias="schema")
    unwritten: int  # entries that are in memory alone since the audit log could last be written
    entries: list[AuditRecord]  # newest first
