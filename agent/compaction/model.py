"""What the compaction policy is told, what it remembers, and what it answers: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine_shim.errors import SettingsError


class Decision(Enum):
    """What the policy does about one pool now. A closed set: also the label of the counted decisions."""

    RELOCATE = "switch relocating allocation on"
    STOP_RELOCATING = "switch relocating allocation off"
    COMPACT = "move live blocks"
    HOLD_OFF = "the policy is switched off"
    HOLD_NOT_LIVE = "the engine is not live"
    HOLD_UNDEFINED = "nothing is allocatable"
    HOLD_SMALL = "too few allocatable blocks to matter"
    HOLD_HEALTHY = "fragmentation is below the threshold"
    HOLD_BRIEF = "fragmentation is not above the threshold for long enough"
    HOLD_EASED = "fragmentation has fallen below the threshold again"
    HOLD_NO_CONSUMER = "nobody profits from contiguous blocks"
    HOLD_RUNNING = "a run is under way"
    HOLD_RELOCATING = "relocation is given time to show what it brings"
    HOLD_REFUSED = "the engine does not allow live blocks to be moved"
    HOLD_COOLDOWN = "the last run is too recent"
    HOLD_BACKOFF = "the last runs did not last"
    HOLD_NO_PLAN = "no plan was made yet"
    HOLD_NO_GAIN = "a plan would gain too little"
    HOLD_BUDGET = "the budget does not cover the plan"

    @property
    def acts(self) -> bool:
        return self in (Decision.RELOCATE, Decision.STOP_RELOCATING, Decision.COMPACT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision about one pool, with its reason in numbers. `max_moves` and `moves` are 0 unless it is COMPACT."""

    decision: Decision
    reason: str
    moves: int = 0  # as planned
    max_moves: int = 0  # blocks that the run may move at most


class Relocation(Enum):
    """Relocating allocation in an engine."""

    UNAVAILABLE = "unavailable"  # it cannot, or its operator did not allow it
    OFF = "off"
    ON = "on"


@dataclass(frozen=True, slots=True)
class PlannedMoves:
    """What the policy needs to know of a plan that was made without a limit on its moves."""

    moves: int
    fragmentation_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One pool at one tick. Counters are the map's: they grow within one incarnation of the engine."""

    incarnation: int
    live: bool
    fragmentation: float | None  # over the allocatable set; None where that is empty or means nothing
    allocatable_blocks: int
    block_bytes: int
    written_bytes: int  # KV bytes that the engine has computed and stored
    blocks_allocated: int
    relocation_copies: int
    moved_bytes: int = 0  # by moves of live blocks, whoever asked for them
    relocation: Relocation = Relocation.UNAVAILABLE
    allocation_policy: str = ""  # as the map names it
    refusal: str = ""  # why live blocks may not be moved, "" where they may
    consumers: tuple[str, ...] = ()  # who profits from contiguous blocks: declared, or found
    plan: PlannedMoves | None = None  # see `wants_plan`


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, as its report has it."""

    moved_bytes: int
    fragmentation_after: float | None
    failed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """SettingsError on values that contradict each other."""

    enabled: bool = True
    enter: float = 0.30  # act above this fragmentation rate
    exit: float = 0.20  # an episode ends at this one
    for_seconds: float = 10.0  # that an episode must last before anything is done
    min_allocatable_blocks: int = 64
    min_gain: float = 0.05  # by which a plan must lower the fragmentation rate
    require_consumer: bool = False
    relocation: bool = True  # may be switched on where the engine allows it
    relocation_settle_seconds: float = 60.0  # before live blocks are moved as well
    relocation_copies_per_block: float = 2.0  # copies per allocated block, from when it was switched on
    relocation_min_blocks: int = 1000  # allocated before that ratio is judged
    relocation_retry_seconds: float = 3600.0  # after it was over budget, or was asked for and did not come on
    relocation_answer_seconds: float = 10.0
    written_share: float = 0.01  # of KV bytes written, that live moves may amount to
    cooldown_seconds: float = 30.0
    lasting_seconds: float = 60.0  # a run that F undoes within this has not lasted
    fresh_seconds: float = 2.0  # a sample this soon after a run may still be from before it
    backoff_seconds: float = 60.0  # after the first run that did not last; doubles with each one more
    max_backoff_seconds: float = 3600.0
    settled_after: int = 3  # runs in a row that did not last
    max_overrun: float = 2.0  # times the plan, that a run may move where the pool changes under it
    run_timeout_seconds: float = 180.0  # a run that is not heard of again counts as failed, and as fully spent

    def __post_init__(self) -> None:
        if not 0 <= self.exit <= self.enter <= 1:
            raise SettingsError(f"exit={self.exit} and enter={self.enter}: give 0 <= exit <= enter <= 1")
        for name in self.__slots__:
            value = getattr(self, name)
            if not value >= 0:
                raise SettingsError(f"{name}={value}: give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What the policy remembers of one pool. Times are the caller's monotonic clock, in seconds."""

    incarnation: int | None = None
    episode_since: float | None = None  # F rose above `enter`, and has not fallen to `exit` since
    # Live moves
    run_since: float | None = None  # a run was asked for, and its result is not known
    reserved_bytes: int = 0  # what it may spend
    spent_bytes: int = 0  # owed at the start, and moved by all runs that this agent knows of
    owed_bytes: int = 0  # moved before the policy first saw this incarnation, and not earned by then
    moved_start: int = 0  # the counter of moved bytes then
    allowance_bytes: int | None = None  # one full plan; None until there was one
    written_start: int = 0  # the counter when the policy first saw this incarnation
    hold_until: float | None = None
    last_run_ended: float | None = None
    watched_until: float | None = None  # F above `enter` before this undoes the last run
    undone: int = 0  # runs in a row that did not last
    undone_reason: str = ""
    undone_failed: bool = False  # the last of them failed, rather than being undone
    # Relocation
    relocation_asked: float | None = None
    relocation_on_since: float | None = None
    relocation_ours: bool = False  # we switched it on, so we switch it off when it is over budget
    relocation_stop_asked: float | None = None
    relocation_barred_until: float | None = None
    copies_start: int = 0  # counters when it was seen on
    allocated_start: int = 0
