"""Asks engines for what the policy or a person wants of them, and keeps who asked and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.compaction.audit import Asker, AuditEntry, AuditLog, AuditValue
from agent.compaction.compactor import CompactionPolicy
from agent.compaction.model import RunResult
from agent.compaction.record import NEVER, Answer, DatedRun, PoolRecord
from agent.compaction.tally import outcome_of
from agent.sampling.model import NANOSECONDS, Clock
from engine_shim.compaction.report import Outcome
from engine_shim.control.messages import (
    CompactRequest,
    ControlRequest,
    MovingRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
)
from engine_shim.errors import ControlMalformed, KvatlasError

POLICY = Asker(route="policy", access="agent")
USELESS = frozenset(one.value for one in (Outcome.ABORTED, Outcome.REFUSED, Outcome.FAILED))

Reply = RunReply | SwitchReply | StatusReply
One = TypeVar("One", RunReply, SwitchReply, StatusReply)


class Control(Protocol):
    """One engine's control socket; raises as EngineControl does."""

    def request(self, request: ControlRequest, *, timeout_seconds: float | None = None) -> Reply: ...


class Requests:
    """Every method waits for the engine, and raises as EngineControl.request does. `lock` guards the records."""

    def __init__(
        self,
        policy: CompactionPolicy,
        audit: AuditLog,
        lock: threading.Lock,
        control_of: Callable[[Path], Control],
        clock: Clock,
    ) -> None:
        self._policy, self._audit, self._lock, self._control_of, self._clock = policy, audit, lock, control_of, clock

    def run(self, pool: PoolRecord, path: Path, request: CompactRequest, asker: Asker) -> RunReply:
        """A run, until its report is there. `pool.runner` is the asker's by now, and is given up in the end."""
        parameters = {"target": request.target, "max_moves": request.max_moves}
        began = self._clock.monotonic()
        reply, outcome, reason = None, "failed", "the agent failed"
        try:
            reply = as_kind(RunReply, self.ask(pool.id, path, request, asker, "compact", parameters))
            outcome, reason = reply.decision, reply.reason
        except KvatlasError as error:
            outcome, reason = outcome_of(error), str(error)
            raise
        finally:
            self._run_ended(pool, asker, outcome, reason, reply, self._clock.monotonic() - began)
        return reply

    def relocate(self, pool: PoolRecord, path: Path, on: bool) -> None:
        """Switch relocating allocation for the policy, and look what became of it."""
        try:
            self.ask(pool.id, path, RelocationRequest(on=on), POLICY, "relocation", {"on": on})
        finally:
            self.status(pool, path)

    def switch_relocation(self, pool: PoolRecord, path: Path, on: bool, asker: Asker) -> SwitchReply:
        """Relocation as a person wants it. Off holds for the policy at once, whatever the engine answers, until
        somebody has it switched on again."""
        if not on:
            with self._lock:
                pool.relocation_held = f"relocation was switched off by {asker.route}"
        request = RelocationRequest(on=on)
        reply = as_kind(SwitchReply, self.ask(pool.id, path, request, asker, "relocation", {"on": on}))
        with self._lock:
            if reply.on:
                pool.relocation_held = ""
            pool.answer = replace(pool.answer, asked_at=NEVER)
        return reply

    def switch_off(self, pool: PoolRecord, path: Path, asker: Asker) -> SwitchReply:
        """The kill switch. It holds for the policy at once, whatever the engine answers, until that allows moves again
        after it did not."""
        with self._lock:
            pool.stopped, pool.off_seen = f"moving was switched off by {asker.route}", False
        reply = as_kind(SwitchReply, self.ask(pool.id, path, MovingRequest(on=False), asker, "moving", {"on": False}))
        with self._lock:
            pool.answer, pool.off_seen = replace(pool.answer, asked_at=NEVER), not reply.on
        return reply

    def status(self, pool: PoolRecord, path: Path, timeout_seconds: float | None = None) -> None:
        """Ask how the engine stands; what hinders that is kept as the answer instead of raised."""
        asked_at = self._clock.monotonic()
        answer = Answer(asked_at, error="the agent failed")
        try:
            reply = self._control_of(path).request(StatusRequest(), timeout_seconds=timeout_seconds)
            answer = Answer(asked_at, as_kind(StatusReply, reply), "")
        except KvatlasError as error:
            answer = Answer(asked_at, error=str(error))
        finally:
            with self._lock:
                pool.take_answer(answer)

    def ask(
        self,
        engine: str,
        path: Path,
        request: ControlRequest,
        asker: Asker,
        action: str,
        parameters: Mapping[str, AuditValue],
    ) -> Reply:
        """Ask for anything, with an entry in the audit log."""
        began = self._clock.monotonic()
        outcome, reason = "failed", "the agent failed"
        result: dict[str, Any] = {}
        try:
            reply = self._control_of(path).request(request)
            if isinstance(reply, RunReply):
                outcome, reason, result = reply.decision, reply.reason, figures_of(reply)
            elif isinstance(reply, SwitchReply):
                outcome, reason = ("on" if reply.on else "off"), reply.reason
        except KvatlasError as error:
            outcome, reason = outcome_of(error), str(error)
            raise
        finally:
            self._audit.record(
                AuditEntry(
                    time_unix=self._clock.wall(),
                    asker=asker,
                    action=action,
                    engine=engine,
                    parameters=dict(parameters),
                    outcome=outcome,
                    reason=reason,
                    seconds=self._clock.monotonic() - began,
                    result=result,
                )
            )
        return reply

    def _run_ended(
        self, pool: PoolRecord, asker: Asker, outcome: str, reason: str, reply: RunReply | None, seconds: float
    ) -> None:
        now, now_unix = self._clock.monotonic(), self._clock.wall()
        if reply is not None and isinstance(told := reply.details.get("seconds"), int | float):
            seconds = float(told)
        with self._lock:
            if reply is not None:
                pool.last_run = DatedRun(now_unix, asker.route, reply)
            if asker is not POLICY:
                moved = reply.moved_bytes if reply is not None else 0  # without one the engine's counter tells
                if reply is not None or outcome == "timeout":
                    pool.state = self._policy.after_run_of_others(pool.state, moved, now)
            elif reply is not None:
                useless, how = outcome in USELESS, f"{outcome}, {reason}" if reason else outcome
                result = RunResult(reply.moved_bytes, reply.fragmentation_rate_after, useless, how)
                pool.state = self._policy.after_run(pool.state, result, now)
            elif outcome == "busy":
                pool.state = self._policy.not_begun(pool.state, now)
            else:
                # Without a reply in time the run may have done all that it was allowed to.
                moved = pool.state.reserved_bytes if outcome == "timeout" else 0
                pool.state = self._policy.after_run(pool.state, RunResult(moved, None, True, reason), now)
            pool.runner = ""
            pool.not_before_ns = int(now_unix * NANOSECONDS)
            pool.answer = replace(pool.answer, asked_at=NEVER)
            pool.tally.run_ended(outcome, reply.moved_blocks if reply is not None else 0, seconds)


def as_kind(kind: type[One], reply: Reply) -> One:
    """The reply, which must be of this kind. Raises ControlMalformed."""
    if isinstance(reply, kind):
        return reply
    raise ControlMalformed(f"the engine answered {reply.kind!r}, not {kind.kind!r}; run one version of KVAtlas")


def figures_of(reply: RunReply) -> dict[str, Any]:
    """A run's or a plan's figures by the names that the command, the API and the audit log share."""
    return {
        "planned_moves": reply.planned_moves,
        "moved_blocks": reply.moved_blocks,
        "moved_bytes": reply.moved_bytes,
        "fragmentation_rate_before": reply.fragmentation_rate_before,
        "fragmentation_rate_after": reply.fragmentation_rate_after,
        "largest_allocatable_run_before": reply.largest_allocatable_run_before,
        "largest_allocatable_run_after": reply.largest_allocatable_run_after,
        "details": dict(reply.details),
    }
