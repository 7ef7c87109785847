"""What the agent says over HTTP of the past: frames of blocks, and marks of what happened.

Times are Unix seconds; counts are blocks.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agent.wire import BlockCounts, BlockStateName, Fragmentation, WireModel


class FrameCells(WireModel):
    """The states of a pool's blocks at an earlier time, in equal cells of consecutive blocks as in MapCells."""

    schema_: Literal["kvatlas.frame/v1"] = Field(default="kvatlas.frame/v1", alias="schema")
    id: str
    at_unix: float  # as asked for
    time_unix: float  # of the frame: the newest one that is not after `at_unix`
    age_seconds: float  # between the two
    resolution_seconds: int  # frames of that time are so far apart; a larger age means that none was kept
    incarnation: str  # hexadecimal
    sequence: int
    first_unix: float  # the oldest frame that is kept
    last_unix: float
    previous_unix: float | None  # its neighbours
    next_unix: float | None
    total_blocks: int
    blocks_per_cell: int
    cells: int
    state: list[int]  # most frequent BlockState of the cell; ties: the higher value; 255 unknown
    counts: dict[BlockStateName, list[int]]  # blocks of the cell in each state; states that occur nowhere are left out
    blocks: BlockCounts | None = None  # of the whole pool then
    fragmentation: Fragmentation | None = None  # of a sleeping engine it means nothing, and a frame does not know


class FrameTimes(WireModel):
    """The instants of which a frame is kept: what a scrubber can go to."""

    schema_: Literal["kvatlas.frame-times/v1"] = Field(default="kvatlas.frame-times/v1", alias="schema")
    id: str
    from_unix: float  # as asked for
    to_unix: float
    first_unix: float | None  # the oldest frame that is kept at all; None: there is none
    last_unix: float | None
    total: int  # frames in that time
    step_seconds: float  # 0: all of them are listed; else the last one of each step of that length
    times_unix: list[float]  # oldest first


class Mark(WireModel):
    """Something that happened to a pool or the agent, or was decided."""

    time_unix: float
    pool: str  # "" where it is about the agent
    kind: str  # "engine", "decision" or "alert"
    text: str
    detail: dict[str, Any]


class MarkList(WireModel):
    schema_: Literal["kvatlas.marks/v1"] = Field(default="kvatlas.marks/v1", alias="schema")
    id: str
    marks: list[Mark]  # oldest first
