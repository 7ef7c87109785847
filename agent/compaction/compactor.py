"""Decides when a pool is compacted, and by which means: pure, one pool at a time, each answer with its reason.

Relocating allocation comes first where the engine allows it, since it keeps fragmentation down; moving live blocks once
helps only until the allocator scatters them again. Both have budgets, and a pool on which runs do not last is left
alone for longer and longer.
"""

from __future__ import annotations

from dataclasses import replace

from agent.compaction.model import (
    Decision,
    Observation,
    PolicySettings,
    PolicyState,
    Relocation,
    RunResult,
    Verdict,
)

_NO_STATE = PolicyState()


class CompactionPolicy:
    """The rules under one set of settings. Holds nothing of a pool: its state goes in and comes out.

    `now` is seconds of a monotonic clock, the same for all calls.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()

    def decide(self, state: PolicyState, seen: Observation, now: float) -> tuple[PolicyState, Verdict]:
        """What to do about one pool now. A COMPACT verdict counts as asked for: tell `after_run` how it ended."""
        state = self._follow(state, seen, now)
        verdict = self._judge(state, seen, now)
        return self._remember(state, verdict, seen, now), verdict

    def wants_plan(self, state: PolicyState, seen: Observation, now: float) -> bool:
        """Would a plan, which costs time to make, change the decision? Then make one and decide with it."""
        plan_free = replace(seen, plan=None)
        return self._judge(self._follow(state, plan_free, now), plan_free, now).decision is Decision.HOLD_NO_PLAN

    def after_run(self, state: PolicyState, result: RunResult, now: float) -> PolicyState:
        """Take in how the run ended that a COMPACT verdict asked for."""
        state = replace(
            state,
            run_since=None,
            reserved_bytes=0,
            spent_bytes=state.spent_bytes + result.moved_bytes,
            last_run_ended=now,
            hold_until=now + self.settings.cooldown_seconds,
            watched_until=now + self.settings.lasting_seconds,
        )
        if result.failed:
            return self._did_not_last(state, f"the last run failed: {result.reason}", now, failed=True)
        after = result.fragmentation_after
        if after is not None and after > self.settings.enter:
            return self._did_not_last(state, f"the last run left F at {after:.2f}: {result.reason}", now)
        return state

    def after_run_of_others(self, state: PolicyState, moved_bytes: int, now: float) -> PolicyState:
        """Take in a run that somebody else asked for: it has moved bytes, and the next one may wait. What it was to
        bring, and whether that lasts, is for them to judge: it may have been allowed one move only."""
        until = max(now + self.settings.cooldown_seconds, state.hold_until or now)
        return replace(state, spent_bytes=state.spent_bytes + moved_bytes, hold_until=until)

    def not_begun(self, state: PolicyState, now: float) -> PolicyState:
        """The run that was asked for has not begun, since the engine was at somebody else's: ask again later."""
        until = max(now + self.settings.cooldown_seconds, state.hold_until or now)
        return replace(state, run_since=None, reserved_bytes=0, hold_until=until)

    def budget_bytes(self, state: PolicyState, seen: Observation) -> int:
        """Bytes that live moves may still amount to, besides those of a run under way."""
        written = max(0, seen.written_bytes - state.written_start)
        earned = int(self.settings.written_share * written) + (state.allowance_bytes or 0)
        return earned - self.spent_bytes(state, seen) - state.reserved_bytes

    def spent_bytes(self, state: PolicyState, seen: Observation) -> int:
        """What live moves have cost, whoever asked for them: people without an agent, another agent.

        The engine's counter knows of all moves, this account also of runs that were lost, and of those that ended since
        the observation was made.
        """
        return max(state.spent_bytes, state.owed_bytes + max(0, seen.moved_bytes - state.moved_start))

    # Following the pool

    def _follow(self, state: PolicyState, seen: Observation, now: float) -> PolicyState:
        """The state with what this observation shows, before anything is decided."""
        if seen.incarnation != state.incarnation:
            # What was moved before, and is not earned by what was written before, is owed: else an agent that starts
            # anew would have another allowance each time.
            owed = max(0, seen.moved_bytes - int(self.settings.written_share * seen.written_bytes))
            state = replace(
                _NO_STATE,
                incarnation=seen.incarnation,
                written_start=seen.written_bytes,
                moved_start=seen.moved_bytes,
                owed_bytes=owed,
                spent_bytes=owed,
            )
        state = self._follow_relocation(state, seen, now)
        if state.run_since is not None and now - state.run_since > self.settings.run_timeout_seconds:
            lost = RunResult(state.reserved_bytes, None, failed=True, reason="it was not heard of again")
            state = self.after_run(state, lost, now)
        fragmentation = seen.fragmentation
        if not seen.live or fragmentation is None or fragmentation <= self.settings.exit:
            state = replace(state, episode_since=None)
        elif fragmentation > self.settings.enter and state.episode_since is None:
            state = replace(state, episode_since=now)
        if state.watched_until is None or fragmentation is None or not seen.live:
            return state
        if now > state.watched_until:
            return replace(state, watched_until=None, undone=0, undone_reason="")
        ended = state.last_run_ended if state.last_run_ended is not None else now
        if fragmentation > self.settings.enter and now - ended >= self.settings.fresh_seconds:
            policy = f"the allocation policy {seen.allocation_policy!r}" if seen.allocation_policy else "the allocator"
            how = f"F was back at {fragmentation:.2f} {now - ended:.0f} s after the last run: {policy} undoes it"
            return self._did_not_last(state, how, now)
        return state

    def _follow_relocation(self, state: PolicyState, seen: Observation, now: float) -> PolicyState:
        if seen.relocation is Relocation.ON:
            if state.relocation_on_since is None:
                state = replace(
                    state,
                    relocation_on_since=now,
                    relocation_ours=state.relocation_asked is not None,
                    relocation_asked=None,
                    copies_start=seen.relocation_copies,
                    allocated_start=seen.blocks_allocated,
                )
            return state
        state = replace(state, relocation_on_since=None, relocation_ours=False, relocation_stop_asked=None)
        asked = state.relocation_asked
        if asked is not None and now - asked > self.settings.relocation_answer_seconds:
            barred = now + self.settings.relocation_retry_seconds
            state = replace(state, relocation_asked=None, relocation_barred_until=barred)
        return state

    def _did_not_last(self, state: PolicyState, reason: str, now: float, *, failed: bool = False) -> PolicyState:
        undone = state.undone + 1
        # The exponent is bounded, since 2.0 ** 1024 is an error and not a long time.
        seconds = min(self.settings.max_backoff_seconds, self.settings.backoff_seconds * 2.0 ** min(undone - 1, 60))
        return replace(
            state,
            undone=undone,
            undone_reason=reason,
            undone_failed=failed,
            watched_until=None,
            hold_until=max(now + seconds, state.hold_until or now),
        )

    # Deciding

    def _judge(self, state: PolicyState, seen: Observation, now: float) -> Verdict:
        settings, fragmentation = self.settings, seen.fragmentation
        if not settings.enabled:
            return _say(Decision.HOLD_OFF)
        if not seen.live:
            return _say(Decision.HOLD_NOT_LIVE)
        if over := self._relocation_overspent(state, seen, now):
            return Verdict(Decision.STOP_RELOCATING, over)
        if fragmentation is None:
            return _say(Decision.HOLD_UNDEFINED)
        if seen.allocatable_blocks < settings.min_allocatable_blocks:
            few = f"{seen.allocatable_blocks} allocatable blocks, {settings.min_allocatable_blocks} are the minimum"
            return Verdict(Decision.HOLD_SMALL, few)
        if state.episode_since is None:
            return Verdict(Decision.HOLD_HEALTHY, f"F {fragmentation:.2f} is not above {settings.enter:.2f}")
        lasted = now - state.episode_since
        if lasted < settings.for_seconds:
            brief = f"F {fragmentation:.2f}, above {settings.enter:.2f} for {lasted:.0f} of {settings.for_seconds:g} s"
            return Verdict(Decision.HOLD_BRIEF, brief)
        if state.run_since is not None:
            return Verdict(Decision.HOLD_RUNNING, f"a run was asked for {now - state.run_since:.0f} s ago")
        if fragmentation <= settings.enter:
            eased = f"F {fragmentation:.2f} lies between {settings.exit:.2f} and {settings.enter:.2f}"
            return Verdict(Decision.HOLD_EASED, eased)
        if settings.require_consumer and not seen.consumers:
            return _say(Decision.HOLD_NO_CONSUMER)
        return self._judge_relocation(state, seen, now) or self._judge_live_moves(state, seen, fragmentation, now)

    def _judge_relocation(self, state: PolicyState, seen: Observation, now: float) -> Verdict | None:
        """The part of relocation in an episode; None where it is none, or has shown what it can do."""
        settle = self.settings.relocation_settle_seconds
        if seen.relocation is Relocation.ON and state.relocation_on_since is not None:
            on_for = now - state.relocation_on_since
            if on_for < settle:
                return Verdict(Decision.HOLD_RELOCATING, f"relocation is on for {on_for:.0f} of {settle:g} s")
            return None
        if state.relocation_asked is not None:
            return Verdict(Decision.HOLD_RELOCATING, "relocation was asked for and is not on yet")
        barred = state.relocation_barred_until
        if seen.relocation is not Relocation.OFF or not self.settings.relocation:
            return None
        if barred is not None and now < barred:
            return None
        return Verdict(Decision.RELOCATE, f"F {seen.fragmentation:.2f}, and the engine allows relocating allocation")

    def _relocation_overspent(self, state: PolicyState, seen: Observation, now: float) -> str:
        """Why relocation, where we switched it on, costs more than it may; "" where it does not."""
        if seen.relocation is not Relocation.ON or not state.relocation_ours:
            return ""
        asked = state.relocation_stop_asked
        if asked is not None and now - asked < self.settings.relocation_answer_seconds:
            return ""
        allocated = seen.blocks_allocated - state.allocated_start
        copies = seen.relocation_copies - state.copies_start
        allowed = self.settings.relocation_copies_per_block
        if allocated < self.settings.relocation_min_blocks or copies <= allowed * allocated:
            return ""
        return f"{copies} copies for {allocated} allocated blocks, more than {allowed:g} each"

    def _judge_live_moves(self, state: PolicyState, seen: Observation, fragmentation: float, now: float) -> Verdict:
        settings = self.settings
        if seen.refusal:
            return Verdict(Decision.HOLD_REFUSED, seen.refusal)
        if state.hold_until is not None and now < state.hold_until:
            left = state.hold_until - now
            if not state.undone:
                return Verdict(Decision.HOLD_COOLDOWN, f"the next run is allowed in {left:.0f} s")
            text = _undone(state)
            if state.undone >= settings.settled_after:
                text = f"settled: {text}"
                if seen.allocation_policy and not state.undone_failed and "undoes it" not in text:
                    text += f"; the allocation policy {seen.allocation_policy!r} undoes what runs bring"
            return Verdict(Decision.HOLD_BACKOFF, f"{text}; the next one in {left:.0f} s")
        plan = seen.plan
        if plan is None:
            return _say(Decision.HOLD_NO_PLAN)
        gain = f"{plan.moves} moves would bring F from {fragmentation:.2f} to {plan.fragmentation_after:.2f}"
        if plan.moves == 0 or fragmentation - plan.fragmentation_after < settings.min_gain:
            return Verdict(Decision.HOLD_NO_GAIN, gain)
        cost = plan.moves * seen.block_bytes
        if state.allowance_bytes is None:
            state = replace(state, allowance_bytes=cost)
        budget = self.budget_bytes(state, seen)
        if cost > budget:
            text = (
                f"{gain} and cost {cost} bytes; {max(0, budget)} are left of the first plan's "
                f"and {settings.written_share:.1%} of the KV bytes written"
            )
            return Verdict(Decision.HOLD_BUDGET, f"{text}; {_undone(state)}" if state.undone else text)
        most = min(budget // max(1, seen.block_bytes), int(settings.max_overrun * plan.moves))
        return Verdict(Decision.COMPACT, gain, plan.moves, max(plan.moves, most))

    def _remember(self, state: PolicyState, verdict: Verdict, seen: Observation, now: float) -> PolicyState:
        """The state after the decision is carried out."""
        if verdict.decision is Decision.RELOCATE:
            return replace(state, relocation_asked=now)
        if verdict.decision is Decision.STOP_RELOCATING:
            barred = now + self.settings.relocation_retry_seconds
            return replace(state, relocation_barred_until=barred, relocation_stop_asked=now)
        if verdict.decision is Decision.COMPACT:
            cost = verdict.moves * seen.block_bytes
            allowance = cost if state.allowance_bytes is None else state.allowance_bytes
            reserved = verdict.max_moves * seen.block_bytes
            return replace(state, run_since=now, allowance_bytes=allowance, reserved_bytes=reserved)
        return state


def _undone(state: PolicyState) -> str:
    times = "1 run" if state.undone == 1 else f"{state.undone} runs in a row"
    return f"{times} did not last: {state.undone_reason}"


def _say(decision: Decision) -> Verdict:
    """A decision whose meaning is all there is to say."""
    return Verdict(decision, decision.value)
