"""The driver of the policy with real engines in other processes, each with a real pool, map and control socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agent.compaction.audit import Asker, AuditLog, read_entries
from agent.compaction.control_client import EngineControl
from agent.compaction.driver import CompactionDriver
from agent.compaction.model import Decision, PolicySettings
from agent.compaction.requests import POLICY, Reply
from agent.compaction.settings import DriverSettings, Scope
from agent.compaction.tally import OUTCOMES
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.crew import Crew
from agent.sampling.model import AgentView, Clock, PoolSample
from engine_shim.control.messages import (
    CompactRequest,
    ControlRequest,
    MovingRequest,
    RunReply,
    StatusReply,
    StatusRequest,
)
from engine_shim.errors import ControlMalformed, ControlRefused, ControlTimeout, ControlUnavailable, KvatlasError
from engine_shim.snapshot import MapSnapshot

Start = Callable[..., Any]
Make = Callable[..., MapSnapshot]
ALL = DriverSettings(scope=Scope.parse("all"))
SOMEBODY = Asker(route="POST /v1/engines/{id}/compaction", access="loopback")


def rules(**changes: Any) -> DriverSettings:
    return replace(ALL, policy=replace(ALL.policy, **changes))


def decisions(watch: Any, id: str) -> list[Decision]:
    return [one.decision for one in watch.driver.standing(watch.sample(id)).verdicts]


def status_of(path: Path) -> StatusReply:
    reply = EngineControl(path).request(StatusRequest())
    assert isinstance(reply, StatusReply)
    return reply


def test_an_ordered_engine_is_brought_down(start_pool: Start, watch: Start, tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    pool = start_pool(policy="lowest-any", live=0.65, churn=20, blocks=2048)
    watching = watch(audit=audit)
    watching.tick()
    assert pool.live >= 0.6
    before = watching.sample(pool.id).report.fragmentation_rate
    assert before is not None
    assert before > 0.30
    began = watching.now
    watching.until(pool.id, Decision.COMPACT)
    assert watching.now - began <= ALL.policy.for_seconds + 2
    watching.until(pool.id, Decision.HOLD_HEALTHY)
    after = watching.sample(pool.id).report.fragmentation_rate
    assert after is not None
    assert after <= 0.12
    standing = watching.driver.standing(watching.sample(pool.id))
    run = standing.last_run.report
    assert run.decision == "reached"
    counters = watching.sample(pool.id).snapshot.counters
    assert run.moved_blocks == counters["live_moves"] > 0
    assert standing.state.spent_bytes == run.moved_bytes == counters["live_move_bytes"]
    assert decisions(watching, pool.id) == [Decision.HOLD_BRIEF, Decision.COMPACT, Decision.HOLD_HEALTHY]
    # The log has each decision once, and who asked for the run.
    told = [(entry.action, entry.outcome) for entry in read_entries(tmp_path / "audit.jsonl")]
    assert told == [("hold", "hold_brief"), ("decide", "compact"), ("compact", "reached"), ("hold", "hold_healthy")]
    tally = watching.driver.tallies()[pool.id]
    assert (tally.outcomes["reached"], tally.moved_blocks) == (1, run.moved_blocks)
    assert sum(tally.decisions.values()) > len(told)
    assert sum(tally.seconds_counts) == 1


def test_where_the_allocation_policy_undoes_it_the_driver_settles(start_pool: Start, watch: Start) -> None:
    """At least one run before the back-off, all moved bytes within what they may be, and a reason for each hold."""
    share = 0.5  # so that three runs are earned in seconds, not minutes
    pool = start_pool(policy="vllm", live=0.65, churn=40)
    watching = watch(rules(written_share=share, lasting_seconds=1000))  # the policy's clock is faster than the pool
    watching.tick()
    began, start = watching.now, watching.sample(pool.id).snapshot
    watching.until(pool.id, Decision.COMPACT)
    assert watching.now - began <= ALL.policy.for_seconds + 2
    for _ in range(3000):
        watching.tick()
        verdict = watching.last(pool.id)
        if verdict.reason.startswith("settled"):
            break
    assert verdict.decision is Decision.HOLD_BACKOFF
    assert "3 runs in a row did not last" in verdict.reason
    assert "the allocation policy 'vllm' undoes" in verdict.reason
    made = decisions(watching, pool.id)
    assert made.index(Decision.COMPACT) < made.index(Decision.HOLD_BACKOFF)
    standing, snapshot = watching.driver.standing(watching.sample(pool.id)), watching.sample(pool.id).snapshot
    tokens = snapshot.counters["tokens_written"] - start.counters["tokens_written"]
    written = tokens // snapshot.identity.block_tokens * snapshot.identity.block_bytes
    assert snapshot.counters["live_move_bytes"] == standing.state.spent_bytes
    assert standing.state.spent_bytes <= standing.state.allowance_bytes + share * written
    assert all(entry.reason for entry in watching.audit.recent(1000))


def test_a_spent_allowance_holds_with_its_figures(start_pool: Start, watch: Start) -> None:
    pool = start_pool(policy="vllm", live=0.65, churn=300)
    watching = watch(rules(written_share=0.0))
    verdict = watching.until(pool.id, Decision.HOLD_BUDGET)
    assert "bytes; " in verdict.reason
    assert watching.driver.tallies()[pool.id].outcomes.total() == 1
    standing = watching.driver.standing(watching.sample(pool.id))
    assert 0 < standing.state.spent_bytes <= standing.state.allowance_bytes


def test_relocation_comes_first_and_stays_within_its_budget(start_pool: Start, watch: Start) -> None:
    pool = start_pool(policy="vllm", live=0.45, churn=300, relocation=True)
    watching = watch()
    watching.until(pool.id, Decision.RELOCATE)
    view = watching.tick()
    assert view.samples[pool.id].snapshot.flags.relocating
    assert watching.last(pool.id).decision is Decision.HOLD_RELOCATING
    watching.until(pool.id, Decision.HOLD_HEALTHY, most=3000)
    assert Decision.COMPACT not in decisions(watching, pool.id)
    (entry,) = [entry for entry in watching.audit.recent(100) if entry.action == "relocation"]
    assert (entry.outcome, entry.asker) == ("on", POLICY)
    counters = watching.sample(pool.id).snapshot.counters
    assert 0 < counters["relocation_copies"] <= 2 * counters["blocks_allocated"]


def test_an_idle_engine_is_compacted_too(start_pool: Start, watch: Start) -> None:
    pool = start_pool(churn=0)
    watching = watch(rules(for_seconds=2))
    watching.until(pool.id, Decision.HOLD_HEALTHY)
    assert watching.sample(pool.id).snapshot.counters["live_moves"] > 0


def test_engines_of_others_are_left_alone_until_they_are_named(start_pool: Start, watch: Start) -> None:
    pool = start_pool(kind="vllm", engine_id="theirs", chunk=8)
    watching = watch(DriverSettings(scope=Scope.parse("reference"), policy=PolicySettings(for_seconds=1)))
    for _ in range(5):
        watching.tick()
    assert decisions(watching, pool.id) == [Decision.HOLD_OFF]
    standing = watching.driver.standing(watching.sample(pool.id))
    assert standing.answer.error == "the engine was not asked yet"
    assert "'theirs' of kind 'vllm' is not among them" in standing.why_not
    assert standing.verdicts[-1].decision is Decision.HOLD_OFF
    assert standing.verdicts[-1].reason == standing.why_not
    named = watch(DriverSettings(scope=Scope.parse("other, theirs"), policy=PolicySettings(for_seconds=1)))
    named.until(pool.id, Decision.COMPACT)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({"control": False}, "this engine offers no control", id="no socket"),
        pytest.param({"moving": False}, "this engine does not allow moving", id="not allowed"),
    ],
)
def test_an_engine_that_cannot_is_left_alone_with_the_reason(
    start_pool: Start, watch: Start, options: dict[str, Any], reason: str
) -> None:
    pool = start_pool(churn=1, **options)
    watching = watch(rules(for_seconds=1))
    assert reason in watching.until(pool.id, Decision.HOLD_REFUSED).reason
    for _ in range(30):
        watching.tick()
    assert Decision.COMPACT not in decisions(watching, pool.id)


def test_a_consumer_may_be_required(start_pool: Start, watch: Start) -> None:
    alone, useful = start_pool(engine_id="alone"), start_pool(engine_id="useful", consumer="elastic")
    watching = watch(rules(require_consumer=True, for_seconds=1))
    watching.until(useful.id, Decision.COMPACT)
    assert watching.last(alone.id).decision is Decision.HOLD_NO_CONSUMER
    declared = watch(replace(rules(require_consumer=True, for_seconds=1), consumers=("transfer",)))
    declared.until(alone.id, Decision.COMPACT)


def test_the_kill_switch_holds_until_it_is_undone(start_pool: Start, watch: Start) -> None:
    pool = start_pool(churn=5, policy="vllm", relocation=True)
    watching = watch(rules(for_seconds=1, relocation=False))
    watching.tick()
    reply = watching.driver.switch_off(watching.sample(pool.id), SOMEBODY)
    assert not reply.on
    verdict = watching.until(pool.id, Decision.HOLD_REFUSED)
    assert "switched off by POST" in verdict.reason
    for _ in range(20):
        watching.tick()
    assert watching.last(pool.id).decision is Decision.HOLD_REFUSED
    EngineControl(pool.path).request(MovingRequest(on=True))
    watching.until(pool.id, Decision.COMPACT)
    entry = next(entry for entry in watching.audit.recent(100) if entry.action == "moving")
    assert (entry.asker, entry.outcome) == (SOMEBODY, "off")


def test_a_switch_used_behind_its_back_is_respected(start_pool: Start, watch: Start) -> None:
    """Nor is relocation switched on then, which the engine itself would do."""
    pool = start_pool(policy="vllm", relocation=True, churn=1)
    watching = watch(rules(for_seconds=20))
    watching.tick()
    EngineControl(pool.path).request(MovingRequest(on=False))
    watching.until(pool.id, Decision.HOLD_REFUSED)
    assert Decision.RELOCATE not in decisions(watching, pool.id)
    assert not status_of(pool.path).relocation


def test_an_agent_that_starts_anew_respects_a_switch_that_was_used_before(start_pool: Start, watch: Start) -> None:
    pool = start_pool(policy="vllm", relocation=True, churn=1)
    EngineControl(pool.path).request(MovingRequest(on=False))
    watching = watch(rules(for_seconds=0))
    watching.until(pool.id, Decision.HOLD_REFUSED)
    for _ in range(20):
        watching.tick()
    assert watching.last(pool.id).decision is Decision.HOLD_REFUSED
    assert not status_of(pool.path).relocation
    EngineControl(pool.path).request(MovingRequest(on=True))
    watching.until(pool.id, Decision.RELOCATE)


def test_an_engine_that_was_started_with_moves_off_may_relocate_all_the_same(start_pool: Start, watch: Start) -> None:
    pool = start_pool(policy="vllm", relocation=True, churn=1, moving=False)
    watching = watch(rules(for_seconds=0))
    watching.until(pool.id, Decision.RELOCATE)


def test_what_people_ask_for_counts_too(start_pool: Start, watch: Start) -> None:
    pool = start_pool()
    watching = watch()
    watching.tick()
    report = watching.driver.compact(watching.sample(pool.id), CompactRequest(max_moves=5), SOMEBODY)
    assert report.moved_blocks <= 5
    standing = watching.driver.standing(watching.sample(pool.id))
    assert standing.state.spent_bytes == report.moved_bytes > 0
    assert standing.last_run.route == SOMEBODY.route
    assert watching.audit.recent(1)[0].asker == SOMEBODY


def test_runs_of_people_put_the_policy_into_no_back_off(start_pool: Start, watch: Start) -> None:
    pool = start_pool()
    watching = watch()
    watching.tick()
    for _ in range(4):
        reply = watching.driver.compact(watching.sample(pool.id), CompactRequest(max_moves=1), SOMEBODY)
        assert reply.fragmentation_rate_after > ALL.policy.enter  # a control: as the policy's own it would not count
        watching.tick()
    assert watching.driver.standing(watching.sample(pool.id)).state.undone == 0
    watching.until(pool.id, Decision.HOLD_BUDGET)  # their four moves are missing from the allowance of one plan
    assert Decision.HOLD_BACKOFF not in decisions(watching, pool.id)


def test_what_is_moved_without_the_agent_is_spent(start_pool: Start, watch: Start) -> None:
    pool = start_pool(churn=1)
    watching = watch(rules(for_seconds=10_000))
    watching.tick()
    reply = EngineControl(pool.path).request(CompactRequest(max_moves=5))
    assert isinstance(reply, RunReply)
    assert reply.moved_bytes > 0
    while watching.driver.standing(watching.sample(pool.id)).spent_bytes != reply.moved_bytes:
        watching.tick()
    assert watching.driver.standing(watching.sample(pool.id)).state.spent_bytes == 0


def test_an_agent_killed_while_it_waits(
    start_pool: Start, start_agent: Start, client_of: Start, wait_until: Start
) -> None:
    pool = start_pool(blocks=4096, chunk=1)
    first = start_agent("--interval-seconds", "0.1", "--compaction-for-seconds", "0")
    wait_until(lambda: status_of(pool.path).running)
    first.process.kill()
    first.process.wait()
    report = wait_until(lambda: status_of(pool.path).last_report)  # the engine goes on with its run
    assert report.decision == "reached"
    second = start_agent("--compaction", "off")
    client = client_of(second)
    wait_until(lambda: any(engine.id == pool.id for engine in client.engines().engines))
    assert client.compact(pool.id).decision == "reached"


def test_an_agent_that_ends_does_not_wait_for_a_run(
    start_pool: Start, start_agent: Start, wait_until: Start, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    pool = start_pool(hold=str(hold))
    agent = start_agent("--interval-seconds", "0.1", "--compaction-for-seconds", "0")
    wait_until(lambda: status_of(pool.path).running)
    assert agent.stop() == 0
    assert status_of(pool.path).running  # a control: the run was still under way
    hold.unlink()
    assert wait_until(lambda: status_of(pool.path).last_report).decision == "reached"


# With an engine that is the test's own


class Scripted:
    """Answers as told: replies and errors by the kind of request, or waits for `gate`."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []
        self.error: KvatlasError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def request(self, request: ControlRequest, *, timeout_seconds: float | None = None) -> Reply:
        self.asked.append(request)
        if isinstance(request, StatusRequest):
            return StatusReply(moving=True, relocation=None, running=False, policy="vllm", reason="")
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return RunReply(
            decision="reached",
            reason="",
            planned_moves=2,
            moved_blocks=2,
            moved_bytes=2 * 4096,
            fragmentation_rate_before=0.9,
            fragmentation_rate_after=0.1,
            largest_allocatable_run_before=1,
            largest_allocatable_run_after=9,
        )


class Desk:
    """A driver of one scripted engine whose map shows every other block in use."""

    def __init__(self, make_snapshot: Make) -> None:
        self.now, self.wall = 100.0, 1_700_000_100.0
        self.engine = Scripted()
        self.audit = AuditLog(None)
        clock = Clock(wall=lambda: self.wall, monotonic=lambda: self.now)
        self.driver = CompactionDriver(ALL, self.audit, control_of=lambda path: self.engine, clock=clock)
        snapshot = make_snapshot([0, 2] * 200, running_requests=1)
        self.sample = PoolSample(
            id="engine.dp0.tp0.pp0.kv",
            state="live",
            reason="",
            snapshot=snapshot,
            report=analyze(snapshot.states),
            fragmentation_known=True,
            waste=None,
            oldest_pinned_seconds=None,
            forecast=ExhaustionForecast(None, ""),
            tokens_per_second=None,
            torn_reads=0,
            read_seconds=0.0,
        )

    def tick(self, seconds: float = 1.0, *, publish: bool = True, wait: bool = True) -> None:
        self.now, self.wall = self.now + seconds, self.wall + seconds
        if publish:
            snapshot = replace(self.sample.snapshot, published_unix_ns=int(self.wall * 1e9))
            self.sample = replace(self.sample, snapshot=snapshot)
        self.driver.tick(AgentView(1, self.wall, MappingProxyType({self.sample.id: self.sample}), (), (), 0.0))
        if wait:
            assert self.driver.wait_idle(30)

    def decided(self) -> int:
        return self.driver.tallies()[self.sample.id].decisions.total()


@pytest.fixture
def desk(make_snapshot: Make) -> Desk:
    return Desk(make_snapshot)


def test_no_sample_from_before_the_end_of_a_run_is_decided_on(desk: Desk) -> None:
    while not desk.driver.standing(desk.sample).last_run:
        desk.tick()
    count = desk.decided()
    for _ in range(5):
        desk.tick(publish=False)
    assert desk.decided() == count
    desk.tick()
    assert desk.decided() == count + 1


def test_sampling_and_deciding_never_wait_for_an_engine(desk: Desk) -> None:
    desk.engine.gate.clear()
    for _ in range(15):
        desk.tick(wait=False)
        if not desk.driver.standing(desk.sample).running:
            assert desk.driver.wait_idle(30)
    standing = desk.driver.standing(desk.sample)
    assert standing.running
    assert standing.verdicts[-1].decision is Decision.HOLD_RUNNING
    with pytest.raises(ControlRefused) as caught:
        desk.driver.compact(desk.sample, CompactRequest(), SOMEBODY)
    assert caught.value.error == "busy"
    desk.engine.gate.set()
    assert desk.driver.wait_idle(30)
    assert not desk.driver.standing(desk.sample).running


@pytest.mark.parametrize(
    ("error", "outcome", "spent", "undone"),
    [
        pytest.param(ControlRefused("a run", error="busy"), "busy", False, 0, id="busy"),
        pytest.param(ControlRefused("no", error="refused"), "refused", False, 1, id="refused"),
        pytest.param(ControlRefused("what", error="bad_request"), "rejected", False, 1, id="rejected"),
        pytest.param(ControlUnavailable("gone"), "unavailable", False, 1, id="gone"),
        pytest.param(ControlTimeout("silent"), "timeout", True, 1, id="silent"),
        pytest.param(ControlMalformed("what"), "rejected", False, 1, id="another version"),
    ],
)
def test_what_becomes_of_a_run_that_has_no_report(
    desk: Desk, error: KvatlasError, outcome: str, spent: bool, undone: int
) -> None:
    desk.engine.error = error
    for _ in range(12):
        desk.tick()
    assert outcome in OUTCOMES
    assert desk.driver.tallies()[desk.sample.id].outcomes == {outcome: 1}
    state = desk.driver.standing(desk.sample).state
    assert (state.spent_bytes > 0) is spent
    assert (state.undone, state.run_since, state.reserved_bytes) == (undone, None, 0)
    entry = next(entry for entry in desk.audit.recent(100) if entry.action == "compact")
    assert (entry.outcome, entry.reason) == (outcome, str(error))


def test_where_no_thread_can_be_started_it_is_decided_anew(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the question how the engine stands, the other a run."""
    for seconds in (0, 10):
        for _ in range(seconds):
            desk.tick()
        with monkeypatch.context() as limited:
            limited.setattr(Crew, "start", lambda *_: False)
            desk.tick()
        assert not desk.driver.standing(desk.sample).running
    for _ in range(100):
        desk.tick()
    assert {type(one) for one in desk.engine.asked} == {StatusRequest, CompactRequest}
    assert desk.driver.standing(desk.sample).last_run is not None


def test_a_clock_that_is_set_back_does_not_end_deciding(desk: Desk) -> None:
    while not desk.driver.standing(desk.sample).last_run:
        desk.tick()
    desk.wall -= 7200
    count = desk.decided()
    for _ in range(3):
        desk.tick()
    assert desk.decided() >= count + 2


def test_a_hold_is_recorded_when_its_reason_changes(desk: Desk) -> None:
    for _ in range(9):
        desk.tick()
    assert [entry.outcome for entry in desk.audit.recent()] == ["hold_brief"]
    assert desk.decided() == 9
    assert desk.driver.standing(desk.sample).verdicts[-1].reason.endswith("for 8 of 10 s")


def test_an_engine_that_starts_anew_is_met_anew(desk: Desk) -> None:
    for _ in range(12):
        desk.tick()
    identity = replace(desk.sample.identity, incarnation=8)
    desk.sample = replace(desk.sample, snapshot=replace(desk.sample.snapshot, identity=identity))
    desk.tick()
    standing = desk.driver.standing(desk.sample)
    assert (standing.state.spent_bytes, standing.last_run) == (0, None)
    assert desk.driver.tallies()[desk.sample.id].outcomes["reached"] == 1  # what was counted goes on


def test_a_fault_with_one_pool_is_logged_and_not_more(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(desk.sample, id="broken", snapshot=None)  # type: ignore[arg-type]
    view = AgentView(1, desk.wall, MappingProxyType({"broken": broken, desk.sample.id: desk.sample}), (), (), 0.0)
    for _ in range(3):
        desk.driver.tick(view)
    assert desk.driver.wait_idle(30)
    assert desk.decided() == 3
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


@pytest.mark.parametrize("text", ["", "a,,b", "off,a", "all, a"])
def test_a_scope_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="off, reference, all, or engine ids"):
        Scope.parse(text)
