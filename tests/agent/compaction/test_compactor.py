"""When the policy acts, when it holds and why, and that no history of a pool takes it over its budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.compaction.compactor import CompactionPolicy
from agent.compaction.model import (
    Decision,
    Observation,
    PlannedMoves,
    PolicySettings,
    PolicyState,
    Relocation,
    RunResult,
    Verdict,
)
from engine_shim.errors import SettingsError

BLOCK = 1000
SEEN = Observation(
    incarnation=7,
    live=True,
    fragmentation=0.9,
    allocatable_blocks=1000,
    block_bytes=BLOCK,
    written_bytes=50_000_000,  # before the policy looked: earns nothing
    blocks_allocated=10_000,
    relocation_copies=0,
    allocation_policy="vllm",
)
PLAN = PlannedMoves(moves=100, fragmentation_after=0.1)
RULES = PolicySettings(
    for_seconds=10,
    cooldown_seconds=30,
    lasting_seconds=60,
    backoff_seconds=100,
    max_backoff_seconds=1000,
    relocation_settle_seconds=60,
)


@dataclass
class Pool:
    """One pool and its policy, second by second."""

    policy: CompactionPolicy = field(default_factory=lambda: CompactionPolicy(RULES))
    seen: Observation = SEEN
    state: PolicyState = field(default_factory=PolicyState)
    now: float = 1000.0
    plan: PlannedMoves = PLAN
    verdicts: list[Verdict] = field(default_factory=list)

    def tick(self, seconds: float = 1.0, **changes: object) -> Verdict:
        """Let time pass and decide once; a plan is made where one is wanted."""
        self.now += seconds
        self.seen = replace(self.seen, **changes)  # type: ignore[arg-type]
        wants = self.policy.wants_plan(self.state, self.seen, self.now)
        observation = replace(self.seen, plan=self.plan if wants else None)
        self.state, verdict = self.policy.decide(self.state, observation, self.now)
        assert verdict.decision is not Decision.HOLD_NO_PLAN
        assert wants or verdict.decision not in (Decision.COMPACT, Decision.HOLD_BUDGET, Decision.HOLD_NO_GAIN)
        self.verdicts.append(verdict)
        return verdict

    def until(self, decision: Decision, most: int = 5000) -> Verdict:
        for _ in range(most):
            if (verdict := self.tick()).decision is decision:
                return verdict
        raise AssertionError(f"never {decision}: {self.verdicts[-1]}")

    def run_ends(self, moved: int = 100, after: float | None = 0.1, failed: bool = False, reason: str = "") -> None:
        """The run that was asked for ends now, and the pool is as it left it."""
        self.state = self.policy.after_run(self.state, RunResult(moved * BLOCK, after, failed, reason), self.now)
        self.seen = replace(self.seen, fragmentation=after if after is not None else self.seen.fragmentation)


@pytest.mark.parametrize(
    ("changes", "rules", "decision", "reason"),
    [
        pytest.param({}, {}, Decision.COMPACT, "100 moves would bring F from 0.90 to 0.10", id="acts"),
        pytest.param({}, {"enabled": False}, Decision.HOLD_OFF, "switched off", id="off"),
        pytest.param({"live": False}, {}, Decision.HOLD_NOT_LIVE, "not live", id="hung engine"),
        pytest.param({"fragmentation": None}, {}, Decision.HOLD_UNDEFINED, "allocatable", id="full pool"),
        pytest.param({"allocatable_blocks": 63}, {}, Decision.HOLD_SMALL, "63 allocatable", id="small"),
        pytest.param({"allocatable_blocks": 64}, {}, Decision.COMPACT, "", id="just large enough"),
        pytest.param({"fragmentation": 0.30}, {}, Decision.HOLD_HEALTHY, "0.30 is not above 0.30", id="at threshold"),
        pytest.param({"fragmentation": 0.31}, {}, Decision.COMPACT, "from 0.31", id="just above"),
        pytest.param({}, {"for_seconds": 1000}, Decision.HOLD_BRIEF, "for 20 of 1000 s", id="too brief"),
        pytest.param({"refusal": "a KV connector is configured"}, {}, Decision.HOLD_REFUSED, "connector", id="refused"),
        pytest.param({}, {"require_consumer": True}, Decision.HOLD_NO_CONSUMER, "nobody", id="no consumer"),
        pytest.param({"consumers": ("transfer",)}, {"require_consumer": True}, Decision.COMPACT, "", id="a consumer"),
        pytest.param({"relocation": Relocation.OFF}, {}, Decision.RELOCATE, "allows relocating", id="relocation first"),
        pytest.param(
            {"relocation": Relocation.OFF}, {"relocation": False}, Decision.COMPACT, "", id="relocation not wanted"
        ),
        pytest.param({"relocation": Relocation.ON}, {}, Decision.HOLD_RELOCATING, "for 20 of 60 s", id="it is on"),
        pytest.param(
            {"relocation": Relocation.ON},
            {"relocation_settle_seconds": 15},
            Decision.COMPACT,
            "",
            id="relocation is not enough",
        ),
    ],
)
def test_decide(changes: dict[str, object], rules: dict[str, float], decision: Decision, reason: str) -> None:
    pool = Pool(CompactionPolicy(replace(RULES, **rules)))  # type: ignore[arg-type]
    pool.tick(0, **changes)
    verdict = pool.tick(20)
    assert verdict.decision is decision
    assert reason in verdict.reason
    assert verdict.reason
    assert (verdict.moves > 0) == (verdict.max_moves > 0) == (decision is Decision.COMPACT)
    assert decision.acts == (decision in (Decision.COMPACT, Decision.RELOCATE))


@pytest.mark.parametrize(
    ("plan", "decision"),
    [
        pytest.param(PlannedMoves(0, 0.9), Decision.HOLD_NO_GAIN, id="nothing to move"),
        pytest.param(PlannedMoves(500, 0.86), Decision.HOLD_NO_GAIN, id="hardly anything to gain"),
        pytest.param(PlannedMoves(500, 0.85), Decision.COMPACT, id="enough to gain"),
    ],
)
def test_a_plan_must_gain(plan: PlannedMoves, decision: Decision) -> None:
    pool = Pool(plan=plan)
    pool.tick(0)
    assert pool.tick(20).decision is decision


def test_without_a_plan_it_holds_and_says_so() -> None:
    policy = CompactionPolicy(RULES)
    state, _ = policy.decide(PolicyState(), SEEN, 0.0)
    _, verdict = policy.decide(state, SEEN, 20.0)
    assert verdict.decision is Decision.HOLD_NO_PLAN


def test_an_episode_lasts_until_the_exit() -> None:
    pool = Pool()
    assert pool.tick().decision is Decision.HOLD_BRIEF
    # A dip that stays above the exit does not start the time anew, but nothing is done during it.
    assert pool.tick(6, fragmentation=0.25).decision is Decision.HOLD_BRIEF
    assert pool.tick(6, fragmentation=0.25).decision is Decision.HOLD_EASED
    assert pool.tick(1, fragmentation=0.35).decision is Decision.COMPACT
    pool = Pool()
    pool.tick()
    assert pool.tick(9, fragmentation=0.20).decision is Decision.HOLD_HEALTHY
    assert pool.tick(9, fragmentation=0.29).decision is Decision.HOLD_HEALTHY
    assert pool.tick(9, fragmentation=0.31).decision is Decision.HOLD_BRIEF
    assert pool.tick(9.9).decision is Decision.HOLD_BRIEF
    assert pool.tick(0.1).decision is Decision.COMPACT
    # An engine that was away has no episode that goes on.
    pool = Pool()
    pool.tick()
    pool.tick(live=False)
    assert pool.tick(20, live=True).decision is Decision.HOLD_BRIEF


def test_a_policy_that_starts_anew_has_no_second_allowance() -> None:
    """An agent that is started again and again must not move a plan's worth each time."""
    first = Pool(CompactionPolicy(replace(RULES, written_share=0.01)))
    first.until(Decision.COMPACT)
    first.run_ends(after=0.9)
    moved = {"moved_bytes": 100 * BLOCK, "written_bytes": 1_000_000}
    again = Pool(seen=replace(SEEN, **moved))  # type: ignore[arg-type]
    verdict = again.until(Decision.HOLD_BUDGET)
    assert "cost 100000 bytes; 10000 are left" in verdict.reason
    # What writing has earned since is not owed any more.
    amortised = Pool(seen=replace(SEEN, moved_bytes=100 * BLOCK, written_bytes=100 * 100 * BLOCK))
    assert amortised.until(Decision.COMPACT).moves == 100


def test_it_acts_within_its_time_and_waits_for_the_run() -> None:
    pool = Pool()
    began = pool.now
    verdict = pool.until(Decision.COMPACT)
    assert pool.now - began <= RULES.for_seconds + 2
    assert (verdict.moves, verdict.max_moves) == (100, 100)
    assert pool.tick().decision is Decision.HOLD_RUNNING
    pool.run_ends()
    assert pool.tick().decision is Decision.HOLD_HEALTHY
    # It lasted, so that the next episode is met as the first was.
    pool.tick(100, written_bytes=SEEN.written_bytes + 100_000_000)
    pool.tick(1, fragmentation=0.5)
    assert pool.tick(11).decision is Decision.COMPACT


def test_the_cooldown_holds_where_the_run_was_of_use() -> None:
    pool = Pool(CompactionPolicy(replace(RULES, cooldown_seconds=200)))
    pool.until(Decision.COMPACT)
    pool.run_ends()
    pool.tick(100, written_bytes=SEEN.written_bytes + 100_000_000)
    pool.tick(1, fragmentation=0.5)
    verdict = pool.tick(12)
    assert verdict.decision is Decision.HOLD_COOLDOWN
    assert "in 87 s" in verdict.reason


def test_where_f_springs_back_it_backs_off_and_says_who_undoes_it() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.run_ends()
    pool.tick(1, fragmentation=0.95)  # may be a sample from before the end of the run
    assert pool.state.undone == 0
    pool.tick(4, written_bytes=SEEN.written_bytes + 10**9)
    verdict = pool.until(Decision.HOLD_BACKOFF)
    assert "1 run did not last: F was back at 0.95 5 s after the last run" in verdict.reason
    assert "the allocation policy 'vllm' undoes it" in verdict.reason
    since = pool.now
    pool.until(Decision.COMPACT)
    assert pool.now - since >= RULES.backoff_seconds - 15
    # One that lasts sets the back-off to its start again.
    pool.run_ends()
    pool.tick(RULES.lasting_seconds + 1)
    assert (pool.state.undone, pool.state.undone_reason) == (0, "")


def test_the_back_off_grows_up_to_its_bound() -> None:
    pool = Pool(CompactionPolicy(replace(RULES, written_share=1.0)))
    pool.tick()
    waits = []
    for _ in range(8):
        pool.seen = replace(pool.seen, written_bytes=pool.seen.written_bytes + 10**9)
        pool.until(Decision.COMPACT)
        pool.run_ends()
        pool.tick(3, fragmentation=0.95)
        before = pool.now
        pool.until(Decision.HOLD_BACKOFF)
        assert pool.state.hold_until is not None
        waits.append(round(pool.state.hold_until - before))
    assert waits == [100, 200, 400, 800, 1000, 1000, 1000, 1000]
    assert pool.verdicts[-1].reason.startswith("settled: 8 runs in a row did not last")
    assert not any("settled" in verdict.reason for verdict in pool.verdicts[:300])


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        pytest.param(
            {"failed": True, "after": None, "reason": "copy broke"}, "the last run failed: copy broke", id="failed"
        ),
        pytest.param({"after": 0.6, "reason": "pins"}, "left F at 0.60: pins", id="no use"),
    ],
)
def test_a_run_that_fails_or_is_of_no_use_backs_off(ends: dict[str, object], reason: str) -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.run_ends(moved=0, **ends)  # type: ignore[arg-type]
    verdict = pool.tick(31)
    assert verdict.decision is Decision.HOLD_BACKOFF
    assert reason in verdict.reason


def test_a_run_that_is_not_heard_of_again_counts_as_spent() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    verdict = pool.tick(RULES.run_timeout_seconds + 1)
    assert verdict.decision is Decision.HOLD_BACKOFF
    assert "not heard of again" in verdict.reason
    assert pool.state.spent_bytes == 100 * BLOCK


def test_the_first_plan_is_free_and_later_ones_are_earned_by_writing() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.run_ends()
    pool.tick(61)
    pool.tick(1, fragmentation=0.8)
    verdict = pool.tick(60)
    assert verdict.decision is Decision.HOLD_BUDGET
    assert "cost 100000 bytes; 0 are left" in verdict.reason
    # One percent of 10 MB is one plan.
    written = SEEN.written_bytes + 9_999_000
    assert pool.tick(1, written_bytes=written).decision is Decision.HOLD_BUDGET
    assert pool.tick(1, written_bytes=written + 1000).decision is Decision.COMPACT
    # A smaller first plan is a smaller allowance; a run may move twice its plan where it can pay for that.
    pool = Pool(plan=PlannedMoves(10, 0.1))
    pool.tick()
    pool.tick(written_bytes=SEEN.written_bytes + 100_000_000)
    verdict = pool.until(Decision.COMPACT)
    assert verdict.max_moves == 20
    pool.run_ends(moved=verdict.max_moves)
    assert pool.policy.budget_bytes(pool.state, pool.seen) == 10 * BLOCK + 1_000_000 - 20 * BLOCK


def test_a_budget_that_is_spent_says_who_undid_it() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.run_ends()
    pool.tick(5, fragmentation=0.97)
    verdict = pool.until(Decision.HOLD_BUDGET)
    assert "the allocation policy 'vllm' undoes it" in verdict.reason
    assert sum(verdict.decision is Decision.COMPACT for verdict in pool.verdicts) == 1


# Relocation


def test_relocation_comes_first_and_live_moves_where_it_is_not_enough() -> None:
    pool = Pool(seen=replace(SEEN, relocation=Relocation.OFF))
    pool.until(Decision.RELOCATE)
    assert pool.tick().decision is Decision.HOLD_RELOCATING
    assert pool.tick(relocation=Relocation.ON).decision is Decision.HOLD_RELOCATING
    assert pool.tick(59).decision is Decision.HOLD_RELOCATING
    assert pool.tick(1).decision is Decision.COMPACT


def test_relocation_that_is_enough_is_left_on() -> None:
    pool = Pool(seen=replace(SEEN, relocation=Relocation.OFF))
    pool.until(Decision.RELOCATE)
    pool.tick(relocation=Relocation.ON)
    assert pool.tick(10, fragmentation=0.15).decision is Decision.HOLD_HEALTHY
    assert pool.tick(1000).decision is Decision.HOLD_HEALTHY


def test_relocation_over_its_budget_is_switched_off_and_barred() -> None:
    pool = Pool(seen=replace(SEEN, relocation=Relocation.OFF))
    pool.until(Decision.RELOCATE)
    pool.tick(relocation=Relocation.ON)
    few = {"blocks_allocated": SEEN.blocks_allocated + 999, "relocation_copies": 5000}
    assert pool.tick(1, **few).decision is Decision.HOLD_RELOCATING  # too few to judge
    fair = {"blocks_allocated": SEEN.blocks_allocated + 2500, "relocation_copies": 5000}
    assert pool.tick(1, **fair).decision is Decision.HOLD_RELOCATING  # two copies each are allowed
    verdict = pool.tick(1, relocation_copies=5001)
    assert verdict.decision is Decision.STOP_RELOCATING
    assert verdict.reason == "5001 copies for 2500 allocated blocks, more than 2 each"
    assert pool.tick(1).decision is Decision.HOLD_RELOCATING  # asked once, then again if it stays on
    assert pool.tick(10).decision is Decision.STOP_RELOCATING
    assert pool.tick(1, relocation=Relocation.OFF).decision is Decision.COMPACT  # barred, so that blocks are moved
    pool.run_ends()
    pool.tick(RULES.relocation_retry_seconds, fragmentation=0.1)
    pool.tick(1, fragmentation=0.9)
    assert pool.tick(10).decision is Decision.RELOCATE


def test_relocation_that_its_operator_switched_on_is_not_switched_off() -> None:
    pool = Pool(seen=replace(SEEN, relocation=Relocation.ON, fragmentation=0.1))
    pool.tick()
    verdict = pool.tick(1, blocks_allocated=SEEN.blocks_allocated + 5000, relocation_copies=50_000)
    assert verdict.decision is Decision.HOLD_HEALTHY


def test_relocation_that_does_not_come_on_is_not_waited_for() -> None:
    pool = Pool(seen=replace(SEEN, relocation=Relocation.OFF))
    pool.until(Decision.RELOCATE)
    assert pool.tick(10).decision is Decision.HOLD_RELOCATING
    assert pool.tick(1).decision is Decision.COMPACT


def test_a_new_incarnation_starts_with_nothing_spent_and_nothing_earned() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    assert pool.tick(1, incarnation=8, written_bytes=0).decision is Decision.HOLD_BRIEF
    assert pool.until(Decision.COMPACT).max_moves == 100


def overspends(policy: CompactionPolicy, seed: int) -> bool:
    """Take a pool through a random history: was more moved than the first plan and the share of what was written?"""
    dice = random.Random(seed)
    pool = Pool(policy, seen=replace(SEEN, relocation=dice.choice(list(Relocation))))
    first_plan = moved = 0
    usual = dice.choice((0.95, 0.1, None))
    for _ in range(300):
        pool.plan = PlannedMoves(dice.randrange(1, 200), 0.1)
        verdict = pool.tick(
            dice.choice((0.5, 1, 5, 40, 400)),
            fragmentation=dice.random() if usual is None or dice.random() < 0.2 else usual,
            written_bytes=pool.seen.written_bytes + dice.randrange(3_000_000),
            relocation=dice.choice(list(Relocation)) if dice.random() < 0.1 else pool.seen.relocation,
        )
        if verdict.decision is Decision.COMPACT:
            first_plan = first_plan or verdict.moves
            now_moved = dice.randrange(verdict.max_moves + 1)
            moved += now_moved
            if dice.random() < 0.9:  # else it is not heard of again
                pool.tick(dice.random() * 10)
                pool.run_ends(now_moved, dice.choice((0.1, 0.5, None)), dice.random() < 0.1)
        earned = RULES.written_share * (pool.seen.written_bytes - SEEN.written_bytes)
        if moved * BLOCK > first_plan * BLOCK + earned:
            return True
    return False


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_no_history_takes_live_moves_over_their_budget(seed: int) -> None:
    assert not overspends(CompactionPolicy(RULES), seed)


def test_a_policy_that_forgets_what_it_spent_is_seen_to_overspend() -> None:
    class Forgetful(CompactionPolicy):
        def budget_bytes(self, state: PolicyState, seen: Observation) -> int:
            return super().budget_bytes(replace(state, spent_bytes=0), seen)

    assert any(overspends(Forgetful(RULES), seed) for seed in range(10))


# What others do


def test_moves_that_others_asked_for_are_spent_too() -> None:
    """The command moves blocks without the agent, and so does a second agent."""
    pool = Pool(seen=replace(SEEN, moved_bytes=7 * BLOCK))  # a control: what was moved before is owed, not spent twice
    pool.tick()
    owed = pool.state.owed_bytes
    pool.until(Decision.COMPACT)
    pool.run_ends()
    pool.tick(61, moved_bytes=107 * BLOCK)  # the counter has the run that was asked for; it is not counted twice
    assert pool.policy.spent_bytes(pool.state, pool.seen) == owed + 100 * BLOCK
    left = pool.policy.budget_bytes(pool.state, pool.seen)
    pool.tick(1, moved_bytes=5107 * BLOCK)
    assert pool.policy.budget_bytes(pool.state, pool.seen) == left - 5000 * BLOCK
    pool.tick(1, fragmentation=0.8, written_bytes=SEEN.written_bytes + 100 * 5000 * BLOCK)
    assert pool.tick(11).decision is Decision.HOLD_BUDGET
    pool.tick(1, written_bytes=SEEN.written_bytes + 100 * 5200 * BLOCK)
    assert pool.until(Decision.COMPACT).moves == 100


def test_a_lost_run_stays_spent_whatever_the_counter_says() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.tick(RULES.run_timeout_seconds + 1, moved_bytes=3 * BLOCK)
    assert pool.policy.spent_bytes(pool.state, pool.seen) == 100 * BLOCK


def test_runs_of_others_make_it_wait_and_prove_nothing() -> None:
    """A person's run of one move leaves F where it was: the policy may do better, and says nothing of that run."""
    pool = Pool()
    pool.tick()
    for _ in range(3):
        pool.tick()
        pool.state = pool.policy.after_run_of_others(pool.state, BLOCK, pool.now)
    assert pool.tick(15).decision is Decision.HOLD_COOLDOWN
    assert (pool.state.undone, pool.state.undone_reason) == (0, "")
    pool.tick(written_bytes=SEEN.written_bytes + 10**9)
    assert pool.until(Decision.COMPACT)
    assert pool.state.spent_bytes == 3 * BLOCK


def test_a_run_of_others_ends_no_back_off() -> None:
    pool = Pool()
    pool.until(Decision.COMPACT)
    pool.run_ends(moved=0, after=0.6, reason="pins")
    until = pool.state.hold_until
    pool.state = pool.policy.after_run_of_others(pool.state, BLOCK, pool.now)
    assert pool.state.hold_until == until
    assert pool.state.undone == 1


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"enter": 0.1}, "exit=0.2 and enter=0.1"),
        ({"enter": 1.5}, "enter=1.5"),
        ({"for_seconds": -1}, "for_seconds=-1"),
        ({"backoff_seconds": float("nan")}, "backoff_seconds=nan"),
    ],
)
def test_settings_that_contradict_are_refused(rules: dict[str, float], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        PolicySettings(**rules)  # type: ignore[arg-type]
