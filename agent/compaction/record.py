"""What the driver of the policy keeps of one pool, and what it makes of a sample of it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace

from agent.compaction.model import Decision, Observation, PlannedMoves, PolicyState, Relocation, Verdict
from agent.compaction.tally import Tally
from agent.sampling.model import NANOSECONDS, PoolSample
from engine_shim.compaction.mover import OffBy
from engine_shim.control.messages import RunReply, StatusReply

KEPT_VERDICTS = 50
# An engine that runs nothing may not publish after a run; a heartbeat so long after it vouches for what is there.
IDLE_SECONDS = 2.0
NEVER = float("-inf")
_NUMBERS = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class DatedVerdict:
    """A decision, its reason as it was last given, and since when it is taken."""

    since_unix: float
    decision: Decision
    reason: str


@dataclass(frozen=True, slots=True)
class DatedRun:
    """The last run that this agent asked for."""

    ended_unix: float  # when its report came
    route: str  # who asked, as in the audit log
    report: RunReply


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said last about how it stands to moving."""

    asked_at: float = NEVER  # monotonic; NEVER: ask (again)
    status: StatusReply | None = None
    error: str = "the engine was not asked yet"  # why there is no status


@dataclass(frozen=True, slots=True)
class PoolStanding:
    """How one pool stands: a copy."""

    why_not: str  # why the agent does nothing by itself here; "" where it may
    running: bool  # a run that this agent asked for is under way
    state: PolicyState
    spent_bytes: int  # by live moves, whoever asked for them
    budget_bytes: int | None  # left for live moves; None before there was a plan to set the allowance
    answer: Answer
    verdicts: tuple[DatedVerdict, ...]  # oldest first; one a change of reason
    last_run: DatedRun | None
    consumers: tuple[str, ...] = ()  # who profits from contiguous blocks: declared, or found
    hold_seconds: float | None = None  # until the next run is allowed; None: no pause
    relocation_held: str = ""  # why the policy does not switch relocation on: somebody switched it off


@dataclass(slots=True)
class PoolRecord:
    """One pool of one incarnation of its engine. Guarded by the driver's lock, but for the plan."""

    id: str
    incarnation: int
    state: PolicyState = field(default_factory=PolicyState)
    answer: Answer = field(default_factory=Answer)
    asking: bool = False  # the engine is being asked for its status, or for a switch
    runner: str = ""  # the route of who asked for the run that is under way
    stopped: str = ""  # why nothing may be done here though the engine could: its kill switch was used
    moving_seen: bool = False  # the engine has said that it allows moves
    off_seen: bool = False  # and, since `stopped` was set, that it does not
    relocation_held: str = ""  # somebody switched relocation off, and the policy is not to switch it on again
    not_before_ns: int = 0  # samples up to then are from before the end of a run
    seen: Observation | None = None
    verdicts: deque[DatedVerdict] = field(default_factory=lambda: deque(maxlen=KEPT_VERDICTS))
    noted: str = ""
    last_run: DatedRun | None = None
    tally: Tally = field(default_factory=Tally)
    # The driver's thread alone
    plan: PlannedMoves | None = None
    planned_at: float = NEVER
    plan_seconds: float = 0.0
    plan_sequence: int = -1
    planned_after_ns: int = 0  # `not_before_ns` when the plan was made

    def take_answer(self, answer: Answer) -> None:
        """The engine has said how it stands, or could not be asked."""
        self.answer, self.asking = answer, False
        if (status := answer.status) is None:
            return
        if not status.moving:
            self.off_seen = True
            if not self.stopped and (self.moving_seen or _stopped_while_it_ran(status)):
                # An engine that never allowed moves is another matter: it may relocate all the same.
                self.stopped = status.reason or "moving was switched off"
            return
        self.moving_seen = True
        if self.off_seen:
            self.stopped, self.off_seen = "", False

    def take_verdict(self, verdict: Verdict, now_unix: float) -> bool:
        """Count a decision. True where it is news: it acts, or more than the numbers of its reason has changed."""
        self.tally.decisions[verdict.decision] += 1
        kind = f"{verdict.decision.name}: {_NUMBERS.sub('#', verdict.reason)}"
        if not verdict.decision.acts and kind == self.noted:
            self.verdicts[-1] = replace(self.verdicts[-1], reason=verdict.reason)
            return False
        self.noted = kind
        self.verdicts.append(DatedVerdict(now_unix, verdict.decision, verdict.reason))
        return True

    def observe(self, sample: PoolSample, declared: tuple[str, ...], own_route: str) -> Observation:
        """What the policy is told of this sample. `declared` are consumers, `own_route` is the policy's own."""
        snapshot, report, identity = sample.snapshot, sample.report, sample.identity
        counters, status = snapshot.counters, self.answer.status
        found = str(status.details.get("consumer") or "") if status is not None else ""
        return Observation(
            incarnation=identity.incarnation,
            live=sample.state == "live",
            fragmentation=report.fragmentation_rate if sample.fragmentation_known else None,
            allocatable_blocks=report.allocatable_blocks,
            block_bytes=identity.block_bytes,
            written_bytes=counters.get("tokens_written", 0) * identity.block_bytes // max(1, identity.block_tokens),
            blocks_allocated=counters.get("blocks_allocated", 0),
            relocation_copies=counters.get("relocation_copies", 0),
            moved_bytes=counters.get("live_move_bytes", 0),
            relocation=self._relocation(snapshot.flags.relocating),
            allocation_policy=identity.policy,
            refusal=self._refusal(own_route),
            consumers=(*declared, found) if found else declared,
        )

    def _relocation(self, flagged: bool) -> Relocation:
        status = self.answer.status
        if flagged or (status is not None and status.relocation):
            return Relocation.ON
        if status is None or status.relocation is None or self.stopped or self.relocation_held:
            return Relocation.UNAVAILABLE
        return Relocation.OFF

    def _refusal(self, own_route: str) -> str:
        """Why live blocks may not be moved here."""
        status = self.answer.status
        if self.stopped:
            return self.stopped
        if status is None:
            return self.answer.error
        if not status.moving:
            return status.reason or "the engine does not allow moving"
        return f"a run that {self.runner} asked for is under way" if self.runner not in ("", own_route) else ""


def _stopped_while_it_ran(status: StatusReply) -> bool:
    """Did somebody use the switch, or did a check fail, before this agent knew the engine? An engine that does not say
    how its moves came to be off is left alone too: a switch that is forgotten is worse than relocation that is not
    used."""
    details = status.details
    return details.get("moving_off_by") != OffBy.START or bool(details.get("moving_failed"))


def known_ns(sample: PoolSample) -> int:
    """The last instant, in Unix nanoseconds, that a sample is known to describe."""
    snapshot = sample.snapshot
    if snapshot.running_requests:
        return snapshot.published_unix_ns
    return max(snapshot.published_unix_ns, snapshot.heartbeat_unix_ns - int(IDLE_SECONDS * NANOSECONDS))
