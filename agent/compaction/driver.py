"""Drives the compaction policy: feeds it samples, lets engines be asked for what it decides, and keeps account.

Nothing here runs on the sampler's thread: `notice` takes a view, a thread of the driver's own decides, and engines are
asked on others. What people ask for over the API goes through here too, so that the policy knows of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from agent.compaction.audit import Asker, AuditEntry, AuditLog, AuditValue
from agent.compaction.compactor import CompactionPolicy
from agent.compaction.control_client import EngineControl
from agent.compaction.model import Decision, Observation, PlannedMoves, Verdict
from agent.compaction.record import NEVER, PoolRecord, PoolStanding, known_ns
from agent.compaction.requests import POLICY, Control, Requests, as_kind
from agent.compaction.settings import DriverSettings
from agent.compaction.tally import Tally
from agent.log import EventLog
from agent.sampling.crew import Crew
from agent.sampling.model import EMPTY_VIEW, NANOSECONDS, AgentView, Clock, PoolSample
from engine_shim.compaction.planning import plan_moves
from engine_shim.control.messages import CompactRequest, PlanRequest, RunReply, SwitchReply
from engine_shim.errors import ControlRefused, KvatlasError

LOOK_SECONDS = 2.0  # for an engine to say how it stands, while somebody waits for a page


class CompactionDriver:
    """`notice` and what people ask for may come from any thread; `run` is one thread's, or `tick` is called instead."""

    def __init__(
        self,
        settings: DriverSettings,
        audit: AuditLog,
        *,
        control_of: Callable[[Path], Control] = EngineControl,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.settings, self.audit = settings, audit
        self._control_of = control_of
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.compaction"))
        self._policy = CompactionPolicy(settings.policy)
        self._off = CompactionPolicy(replace(settings.policy, enabled=False))
        self._lock = threading.Lock()
        self._requests = Requests(self._policy, audit, self._lock, control_of, self._clock)
        self._crew = Crew(settings.workers)
        self._pools: dict[str, PoolRecord] = {}
        self._view = EMPTY_VIEW
        self._news = threading.Event()
        self._stopping = False

    # Deciding

    def notice(self, view: AgentView) -> None:
        """There are new samples; returns at once."""
        self._view = view
        self._news.set()

    def run(self) -> None:
        """Decide after each new view, until `stop`."""
        while True:
            self._news.wait()
            self._news.clear()
            if self._stopping:
                return
            self.tick(self._view)

    def stop(self) -> None:
        """End `run` soon. A run that an engine is at ends by itself, within its own budgets."""
        self._stopping = True
        self._news.set()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no engine is being asked for anything that the policy wants; False where that takes longer."""
        return self._crew.wait_idle(timeout_seconds)

    def tick(self, view: AgentView) -> None:
        """Decide about every pool of a view, once."""
        present = {id: sample for id, sample in view.samples.items() if sample.state != "gone"}
        with self._lock:
            for id in [id for id, pool in self._pools.items() if id not in present and not pool.runner]:
                del self._pools[id]
        for id, sample in present.items():
            try:
                self._decide(sample)
                self._log.on_change("compaction", id, "ok", quiet_first="ok")
            except Exception as error:  # noqa: BLE001 - a fault with one pool must not keep the others from their turn
                self._log.on_change("compaction", id, f"{type(error).__name__}: {error}", level=logging.ERROR)

    def _decide(self, sample: PoolSample) -> None:
        pool = self._record_of(sample)
        why_not = self.settings.scope.why_not(sample.identity)
        policy = self._off if why_not else self._policy
        now, now_unix = self._clock.monotonic(), self._clock.wall()
        with self._lock:
            # What was published before the end of a run says nothing about what the run left. Of a clock that was set
            # back since, that end would be in the future.
            pool.not_before_ns = min(pool.not_before_ns, int(now_unix * NANOSECONDS))
            if pool.asking or known_ns(sample) <= pool.not_before_ns or not self._crew.free:
                return
            seen, state = pool.observe(sample, self.settings.consumers, POLICY.route), pool.state
        if policy.wants_plan(state, seen, now):
            seen = replace(seen, plan=self._plan(pool, sample, now))
        with self._lock:
            if pool.state is not state:  # somebody's run has ended in between: the next sample will tell
                return
            pool.state, verdict = policy.decide(state, seen, now)
            if why_not and verdict.decision is Decision.HOLD_OFF:
                verdict = replace(verdict, reason=why_not)  # nobody switched anything off: say who may switch it on
            pool.seen = seen
            news = pool.take_verdict(verdict, now_unix)
            if verdict.decision is Decision.COMPACT:
                pool.runner = POLICY.route
            elif verdict.decision.acts or self._wants_status(pool, policy, seen, now):
                pool.asking = True
        if news:
            self.audit.record(_entry(pool.id, verdict, seen, now_unix))
        self._act(pool, Path(sample.snapshot.path), verdict)

    def _act(self, pool: PoolRecord, path: Path, verdict: Verdict) -> None:
        requests, decision = self._requests, verdict.decision
        if decision is Decision.COMPACT:
            request = CompactRequest(
                target=self.settings.target, max_moves=verdict.max_moves, max_seconds=self.settings.run_seconds
            )
            self._start(pool, lambda: requests.run(pool, path, request, POLICY))
        elif decision.acts:
            self._start(pool, lambda: requests.relocate(pool, path, decision is Decision.RELOCATE))
        elif pool.asking:
            self._start(pool, lambda: requests.status(pool, path))

    def _start(self, pool: PoolRecord, ask: Callable[[], object]) -> None:
        def work() -> None:
            try:
                ask()
            except KvatlasError:
                pass  # it is in the audit log already
            except Exception as error:  # noqa: BLE001 - on a thread of its own nobody else would hear of it
                self._log.on_change(
                    "compaction request", pool.id, f"{type(error).__name__}: {error}", level=logging.ERROR
                )

        if not self._crew.start(work, "compaction-request"):
            with self._lock:  # as if it had not been decided: the next sample decides anew
                pool.asking = False
                if pool.runner == POLICY.route:
                    pool.runner, pool.state = "", self._policy.not_begun(pool.state, self._clock.monotonic())

    def _record_of(self, sample: PoolSample) -> PoolRecord:
        """The record of a pool; of an engine that started anew only its counts go on."""
        with self._lock:
            pool = self._pools.get(sample.id)
            if pool is None or pool.incarnation != sample.identity.incarnation:
                tally = pool.tally if pool is not None else Tally()
                pool = self._pools[sample.id] = PoolRecord(sample.id, sample.identity.incarnation, tally=tally)
            return pool

    def _plan(self, pool: PoolRecord, sample: PoolSample, now: float) -> PlannedMoves:
        """From the sample, so that it costs the engine nothing; the last plan where another would take too much."""
        snapshot = sample.snapshot
        due = pool.planned_at + pool.plan_seconds / self.settings.planning_share
        of_now = pool.plan_sequence == snapshot.sequence or now < due
        if pool.plan is not None and of_now and pool.planned_after_ns == pool.not_before_ns:
            return pool.plan
        began, pool.planned_after_ns = self._clock.monotonic(), pool.not_before_ns
        made = plan_moves(
            snapshot.states, target=self.settings.target, owners=snapshot.owner, positions=snapshot.position
        )
        after = made.fragmentation_after if made.fragmentation_after is not None else 1.0
        pool.plan = PlannedMoves(len(made.moves), after)
        pool.planned_at, pool.plan_sequence = now, snapshot.sequence
        pool.plan_seconds = self._clock.monotonic() - began
        return pool.plan

    def _wants_status(self, pool: PoolRecord, policy: CompactionPolicy, seen: Observation, now: float) -> bool:
        """Is it time to ask the engine how it stands? Once, and then while F is up, or while a check that failed keeps
        its moves off: else nothing depends on it."""
        answer = pool.answer
        up = seen.fragmentation is not None and seen.fragmentation > policy.settings.exit
        failed = answer.status is not None and bool(answer.status.details.get("moving_failed"))
        pause = self.settings.status_seconds if answer.status is not None else self.settings.retry_seconds
        due = answer.asked_at == NEVER or ((up or failed) and now - answer.asked_at >= pause)
        return policy.settings.enabled and seen.live and due and not pool.runner

    # What people ask for

    def compact(self, sample: PoolSample, request: CompactRequest, asker: Asker) -> RunReply:
        """A run, waited for. It is not held to the policy's budget, and counts towards it.

        Raises as EngineControl.request does; ControlRefused with `busy` while another run is under way.
        """
        pool = self._record_of(sample)
        with self._lock:
            if pool.runner:
                raise ControlRefused(f"a run asked for by {pool.runner} is under way; wait for its end", error="busy")
            pool.runner = asker.route
        return self._requests.run(pool, Path(sample.snapshot.path), request, asker)

    def plan(self, sample: PoolSample, request: PlanRequest) -> RunReply:
        """What the engine would set out to do. Raises as EngineControl.request does."""
        return as_kind(RunReply, self._control_of(Path(sample.snapshot.path)).request(request))

    def look(self, sample: PoolSample) -> None:
        """Ask the engine how it stands now; what hinders that becomes part of the account."""
        self._requests.status(self._record_of(sample), Path(sample.snapshot.path), timeout_seconds=LOOK_SECONDS)

    def switch_off(self, sample: PoolSample, asker: Asker) -> SwitchReply:
        """Forbid moves of live blocks and end a run under way. The policy does nothing here until they are allowed
        again. Raises as EngineControl.request does."""
        return self._requests.switch_off(self._record_of(sample), Path(sample.snapshot.path), asker)

    def switch_relocation(self, sample: PoolSample, on: bool, asker: Asker) -> SwitchReply:
        """Switch relocating allocation. The policy does not switch it on again after it was switched off here, until
        the engine or the agent starts anew. Raises as EngineControl.request does."""
        return self._requests.switch_relocation(self._record_of(sample), Path(sample.snapshot.path), on, asker)

    # The account

    def standing(self, sample: PoolSample) -> PoolStanding:
        """How a pool stands now."""
        pool = self._record_of(sample)
        with self._lock:
            return self._describe(pool, sample)

    def standing_if_known(self, sample: PoolSample) -> PoolStanding | None:
        """The same, or None for a pool, or an incarnation of its engine, that nothing was decided about: for who looks
        on, perhaps at a sample that is an old one by now, and must not begin a record."""
        with self._lock:
            pool = self._pools.get(sample.id)
            if pool is None or pool.incarnation != sample.identity.incarnation:
                return None
            return self._describe(pool, sample)

    def _describe(self, pool: PoolRecord, sample: PoolSample) -> PoolStanding:
        policy, seen, state = self._policy, pool.seen, pool.state
        known = seen is not None and state.allowance_bytes is not None
        hold = None if state.hold_until is None else state.hold_until - self._clock.monotonic()
        return PoolStanding(
            why_not=self.settings.scope.why_not(sample.identity) or pool.stopped,
            running=bool(pool.runner),
            state=state,
            spent_bytes=policy.spent_bytes(state, seen) if seen else state.spent_bytes,
            budget_bytes=policy.budget_bytes(state, seen) if known and seen else None,
            answer=pool.answer,
            verdicts=tuple(pool.verdicts),
            last_run=pool.last_run,
            consumers=seen.consumers if seen else self.settings.consumers,
            hold_seconds=hold if hold is not None and hold > 0 else None,
            relocation_held=pool.relocation_held,
        )

    def tallies(self) -> Mapping[str, Tally]:
        """Counts by pool id; copies."""
        with self._lock:
            return {id: pool.tally.copy() for id, pool in self._pools.items()}


def _entry(engine: str, verdict: Verdict, seen: Observation, now_unix: float) -> AuditEntry:
    parameters: dict[str, AuditValue] = {
        "fragmentation_rate": seen.fragmentation,
        "allocatable_blocks": seen.allocatable_blocks,
    }
    if verdict.decision is Decision.COMPACT:
        parameters |= {"moves": verdict.moves, "max_moves": verdict.max_moves}
    return AuditEntry(
        time_unix=now_unix,
        asker=POLICY,
        action="decide" if verdict.decision.acts else "hold",
        engine=engine,
        parameters=parameters,
        outcome=verdict.decision.name.lower(),
        reason=verdict.reason,
    )
