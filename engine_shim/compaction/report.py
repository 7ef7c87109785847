"""What one run of compaction did: predicted beside realised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from engine_shim.compaction.planning import MovePlan


class Outcome(Enum):
    """How a run ended."""

    REACHED = "reached"  # fragmentation is at the target, or was already
    BEST = "best"  # the best that pins or the budget of moves leave is done, and the target not met
    PARTIAL = "partial"  # less than was planned: moves dropped, blocks allocated in the window, or out of time
    ABORTED = "aborted"  # somebody stopped it
    REFUSED = "refused"  # the engine does not allow moving, or it is switched off; nothing was moved
    FAILED = "failed"  # something raised or a check failed; `reason` has the cause


@dataclass(frozen=True, slots=True)
class Measured:
    """A pool at one end of a run. Lengths are blocks; None where it is not known (or nothing is allocatable)."""

    fragmentation: float | None = None
    largest_run: int | None = None
    sequence_runs: int | None = None  # contiguous runs over all live sequences

    @classmethod
    def before(cls, plan: MovePlan | None) -> Measured:
        """As the pool stood when a plan was made for it."""
        return cls() if plan is None else cls(plan.fragmentation_before, plan.largest_run_before, plan.runs_before)

    @classmethod
    def predicted(cls, plan: MovePlan | None) -> Measured:
        """As it would stand if all of a plan were done, and nothing else."""
        return cls() if plan is None else cls(plan.fragmentation_after, plan.largest_run_after, plan.runs_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """One run, from its start to its end. Counts are blocks unless named otherwise.

    `predicted` is the first plan's. `longest_stall_seconds` is the longest that one step boundary was held up;
    `moving_seconds` is the sum of all. `given_back_bytes` is for a consumer that returns memory after the run to fill
    in; None where none did.
    """

    outcome: Outcome
    reason: str
    planned_moves: int
    moved_blocks: int
    moved_bytes: int
    dropped: Mapping[str, int]  # by mover.Drop's name
    chunks: int
    replans: int
    allocated_in_window: int  # blocks that the engine handed out where room was being made
    verified_blocks: int  # moved blocks whose contents were compared
    seconds: float
    moving_seconds: float
    longest_stall_seconds: float
    before: Measured
    predicted: Measured
    after: Measured
    cached_lost_predicted: int  # prefixes in the way of the first plan, of an engine that does not keep them
    cached_lost: int
    given_back_bytes_predicted: int | None = None
    given_back_bytes: int | None = None

    @classmethod
    def nothing(cls, outcome: Outcome, reason: str) -> CompactionReport:
        """Of a run for which not even a plan was needed."""
        unknown = Measured()
        return cls(
            outcome=outcome,
            reason=reason,
            planned_moves=0,
            moved_blocks=0,
            moved_bytes=0,
            dropped={},
            chunks=0,
            replans=0,
            allocated_in_window=0,
            verified_blocks=0,
            seconds=0.0,
            moving_seconds=0.0,
            longest_stall_seconds=0.0,
            before=unknown,
            predicted=unknown,
            after=unknown,
            cached_lost_predicted=0,
            cached_lost=0,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as an audit log or a socket message holds them."""
        return {**asdict(self), "outcome": self.outcome.value, "dropped": dict(self.dropped)}
