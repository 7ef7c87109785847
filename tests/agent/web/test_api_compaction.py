"""The routes of compaction: what they show, who may use them, and how an engine's refusals come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from agent import wire
from agent.client import AgentRefused
from agent.compaction.audit import AuditLog
from agent.compaction.control_client import EngineControl
from agent.compaction.driver import CompactionDriver
from agent.compaction.model import Decision, PolicySettings
from agent.compaction.settings import DriverSettings, Scope
from agent.exporter import Exporter
from agent.history import MemoryHistory
from agent.sampling.model import AgentView, Clock
from agent.web.api import ApiContext, create_app
from agent.web.security import WriteGuard
from agent.wire import compaction as wire_compaction
from engine_shim.control.messages import ControlRequest, MovingRequest
from engine_shim.errors import ControlMalformed, ControlRefused, ControlTimeout, ControlUnavailable, KvatlasError

Start = Callable[..., Any]
TOKEN = {"Authorization": "Bearer secret"}


def serve(view: Callable[[], AgentView], driver: CompactionDriver) -> TestClient:
    context = ApiContext(
        view=view,
        exporter=Exporter(view, clock=Clock(), tallies=driver.tallies),
        history=MemoryHistory(),
        guard=WriteGuard(token="secret", listens_on_loopback=True),
        compaction=driver,
        version="1.2.3",
        interval_seconds=1.0,
        threshold=0.3,
        started_unix=0.0,
    )
    return TestClient(create_app(context))


class World:
    """An engine in another process, and an application that serves what is seen of it."""

    def __init__(self, pool: Any, watch: Any) -> None:
        self.pool, self.watch = pool, watch
        watch.tick()
        self.client = serve(lambda: watch.sampler.view, watch.driver)
        self.path = f"/v1/engines/{pool.id}/compaction"

    def state(self, **query: Any) -> wire_compaction.CompactionState:
        response = self.client.get(self.path, params=query)
        assert response.status_code == 200, response.text
        return wire_compaction.CompactionState.model_validate_json(response.content)

    def run(self, **order: Any) -> wire_compaction.CompactionRun:
        response = self.client.post(self.path, json=order, headers=TOKEN)
        assert response.status_code == 200, response.text
        return wire_compaction.CompactionRun.model_validate_json(response.content)

    def entries(self, **query: Any) -> list[wire_compaction.AuditRecord]:
        response = self.client.get("/v1/compactions", params=query)
        return wire_compaction.CompactionList.model_validate_json(response.content).entries


@pytest.fixture
def world(start_pool: Start, watch: Start) -> Iterator[World]:
    settings = DriverSettings(scope=Scope.parse("all"), policy=PolicySettings(for_seconds=2))
    made = World(start_pool(policy="lowest-any", churn=10), watch(settings))
    with made.client:
        yield made


def error_of(response: Any, status: int) -> wire.ErrorBody:
    assert response.status_code == status, response.text
    body = wire.ErrorBody.model_validate_json(response.content)
    assert body.message
    assert body.action
    return body


def test_the_state_before_and_after_a_run(world: World) -> None:
    state = world.state()
    assert (state.decision, state.automatic, state.plan, state.last_run) == ("hold_brief", True, None, None)
    assert state.fragmentation_rate is not None
    assert state.fragmentation_rate > state.enter == 0.3
    assert state.budget.allowance_bytes is None
    assert (state.engine.asked, state.engine.moving) == (True, True)
    world.watch.until(world.pool.id, Decision.COMPACT)
    state = world.state()
    assert state.decision == "compact"
    assert state.last_run is not None
    assert state.last_run.asked_by == "policy"
    run = state.last_run.run
    assert run.decision == "reached"
    assert state.budget.moved_bytes == run.moved_bytes == run.moved_blocks << 20
    assert state.budget.allowance_bytes is not None
    assert state.budget.left_bytes is not None
    assert state.budget.left_bytes < state.budget.allowance_bytes
    assert [one.decision for one in state.verdicts] == ["compact", "hold_brief"]
    # Predicted beside realised.
    assert run.predicted.moves == run.planned_moves
    assert run.predicted.fragmentation_rate is not None
    assert run.predicted.fragmentation_rate <= 0.10
    assert run.realised.moves == run.moved_blocks
    assert run.realised.fragmentation_rate == run.fragmentation_rate_after
    assert run.details["chunks"] >= 1


def test_a_plan_on_demand_moves_nothing_and_asks_nobody(world: World) -> None:
    plan = world.state(plan=True, target=0.5).plan
    assert plan is not None
    assert plan.target == 0.5
    assert plan.moves > 0
    assert plan.bytes == plan.moves << 20
    assert plan.fragmentation_rate_after is not None
    assert plan.fragmentation_rate_after <= 0.5
    assert plan.cached_blocks_lost == 0  # as the engine keeps what is in the way
    few = world.state(plan=True, max_moves=1).plan
    assert few is not None
    assert few.limited
    assert world.watch.tick().samples[world.pool.id].snapshot.counters["live_moves"] == 0
    assert "compact" not in {entry.action for entry in world.entries()}


def test_a_run_on_demand(world: World) -> None:
    planned = world.run(dry_run=True)
    assert (planned.decision, planned.moved_blocks, planned.realised.moves) == ("planned", 0, 0)
    assert planned.predicted.moves == planned.planned_moves > 0
    few = world.run(max_moves=3)
    assert few.moved_blocks <= 3
    done = world.run()
    assert done.decision == "reached"
    assert done.fragmentation_rate_after is not None
    assert done.fragmentation_rate_after <= 0.10
    newest = world.entries(limit=1)[0]
    assert (newest.action, newest.outcome, newest.access) == ("compact", "reached", "token")
    assert newest.route == "POST /v1/engines/{id}/compaction"
    assert newest.address == "testclient"
    assert newest.result["moved_blocks"] == done.moved_blocks
    assert newest.parameters == {"target": 0.1, "max_moves": None}
    text = world.client.get("/metrics").text
    assert f'outcome="reached"}} {2.0 if few.decision == "reached" else 1.0}' in text
    assert 'outcome="timeout"} 0.0' in text
    # Without a body it is a run as well.
    assert world.client.post(world.path, headers=TOKEN).status_code == 200


def test_the_kill_switch(world: World) -> None:
    response = world.client.delete(world.path, headers=TOKEN)
    assert wire_compaction.CompactionSwitch.model_validate_json(response.content).moving is False
    refused = error_of(world.client.post(world.path, json={}, headers=TOKEN), 403)
    assert refused.error == "refused"
    assert "switched off" in refused.message
    state = world.state()
    assert not state.automatic
    assert "switched off by DELETE" in state.automatic_reason
    assert state.engine.moving is False
    assert [entry.outcome for entry in world.entries() if entry.action == "moving"] == ["off"]


def test_relocation_is_switched_by_hand_and_stays_as_it_was_switched(start_pool: Start, watch: Start) -> None:
    """The policy would have it on: off holds all the same, until it is switched on by hand."""
    settings = DriverSettings(scope=Scope.parse("all"), policy=PolicySettings(for_seconds=2))
    world = World(start_pool(policy="vllm", live=0.45, churn=300, relocation=True), watch(settings))
    path = f"/v1/engines/{world.pool.id}/relocation"

    def switch(on: bool) -> wire_compaction.RelocationSwitch:
        response = world.client.post(path, json={"on": on}, headers=TOKEN)
        assert response.status_code == 200, response.text
        return wire_compaction.RelocationSwitch.model_validate_json(response.content)

    with world.client:
        assert world.state().engine.relocation is False
        assert not switch(False).relocation
        state = world.state()
        assert "switched off by POST" in state.relocation_held
        for _ in range(8):
            world.watch.tick()
        assert Decision.RELOCATE not in {one.decision for one in standing(world).verdicts}
        assert world.state().engine.relocation is False
        assert switch(True).relocation
        state = world.state()
        assert (state.engine.relocation, state.relocation_held) == (True, "")
        switch(False)
        outcomes = [one.outcome for one in world.entries() if one.action == "relocation"]
        assert outcomes == ["off", "on", "off"]
        for body in ({}, {"on": 1}, {"on": True, "more": 1}):
            assert error_of(world.client.post(path, json=body, headers=TOKEN), 400).error == "bad_request"
        assert error_of(world.client.post(path, json={"on": True}), 401).error == "unauthorized"
        assert error_of(world.client.post("/v1/engines/none/relocation", json={"on": True}, headers=TOKEN), 404)


def test_without_a_hand_the_policy_switches_relocation_on(start_pool: Start, watch: Start) -> None:
    """The negative control of the test above."""
    settings = DriverSettings(scope=Scope.parse("all"), policy=PolicySettings(for_seconds=2))
    world = World(start_pool(policy="vllm", live=0.45, churn=300, relocation=True), watch(settings))
    with world.client:
        world.watch.until(world.pool.id, Decision.RELOCATE)
        assert world.state().engine.relocation is True


def test_relocation_where_there_is_none(world: World) -> None:
    response = world.client.post(f"/v1/engines/{world.pool.id}/relocation", json={"on": True}, headers=TOKEN)
    assert error_of(response, 403).error == "refused"


def test_the_state_tells_consumers_and_pauses(start_pool: Start, watch: Start) -> None:
    settings = DriverSettings(
        scope=Scope.parse("all"), policy=PolicySettings(for_seconds=2, require_consumer=True), consumers=("offload",)
    )
    world = World(start_pool(policy="lowest-any", churn=10, consumer="transfer"), watch(settings))
    with world.client:
        before = world.state()
        assert (before.require_consumer, before.next_run_seconds, before.undone_reason) == (True, None, "")
        world.watch.until(world.pool.id, Decision.COMPACT)
        after = world.state()
        assert after.consumers == ["offload", "transfer"]
        assert after.next_run_seconds is not None
        assert 0 < after.next_run_seconds <= settings.policy.cooldown_seconds


def standing(world: World) -> Any:
    return world.watch.driver.standing(world.watch.sample(world.pool.id))


def test_the_state_is_the_engine_s_of_now_whoever_switched_it(world: World) -> None:
    assert world.state().engine.moving is True
    by_hand = EngineControl(world.pool.path)
    by_hand.request(MovingRequest(on=False))
    assert world.state().engine.moving is False
    by_hand.request(MovingRequest(on=True))
    assert world.state().engine.moving is True


def test_entries_by_engine(world: World) -> None:
    entries = world.entries(engine=world.pool.id)
    assert entries
    assert world.entries(engine=world.pool.id.partition(".")[0]) == entries
    assert world.entries(engine="another") == []
    assert error_of(world.client.get("/v1/compactions?limit=0"), 400).error == "bad_request"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_changes_need_the_token(world: World, method: str) -> None:
    assert error_of(world.client.request(method, world.path), 401).error == "unauthorized"
    assert world.state().engine.moving is True


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"target": 1.5}, "target=1.5"),
        ({"target": "0.1"}, "target='0.1'"),
        ({"max_moves": -1}, "max_moves=-1"),
        ({"max_moves": 2**60}, "max_moves"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"max_seconds": 601}, "max_seconds=601"),
        ({"verify": 1}, "verify=1"),
        ({"targets": 0.1}, "targets"),
        ([], "body"),
    ],
)
def test_wrong_orders(world: World, body: Any, words: str) -> None:
    error = error_of(world.client.post(world.path, json=body, headers=TOKEN), 400)
    assert error.error == "bad_request"
    assert words in error.message


def test_unknown_pools(world: World) -> None:
    for method in ("GET", "POST", "DELETE"):
        response = world.client.request(method, "/v1/engines/none/compaction", headers=TOKEN)
        assert error_of(response, 404).error == "not_found"


def test_an_engine_without_control(start_pool: Start, watch: Start) -> None:
    world = World(start_pool(control=False), watch())
    assert error_of(world.client.post(world.path, headers=TOKEN), 503).error == "unavailable"
    body = error_of(world.client.delete(world.path, headers=TOKEN), 503)
    assert "offers no control" in body.message
    assert world.state().plan is None
    assert world.state(plan=True).plan is not None  # a plan needs no control


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (ControlTimeout("no reply in time"), 504, "timeout"),
        (ControlUnavailable("it has ended"), 503, "unavailable"),
        (ControlRefused("a run is in progress", error="busy"), 409, "busy"),
        (ControlRefused("uid 7 may not", error="refused"), 403, "refused"),
        (ControlRefused("target is 2", error="bad_request", field="target"), 400, "bad_request"),
        (ControlRefused("what", error="unsupported"), 400, "unsupported"),
        (ControlMalformed("the message is not JSON"), 502, "malformed"),
    ],
)
def test_errors_of_engines_by_status(
    start_pool: Start, watch: Start, error: KvatlasError, status: int, word: str
) -> None:
    class Failing:
        def request(self, request: ControlRequest, *, timeout_seconds: float | None = None) -> Any:
            raise error

    pool, watching = start_pool(), watch()
    watching.tick()
    driver = CompactionDriver(DriverSettings(), AuditLog(None), control_of=lambda path: Failing())
    client = serve(lambda: watching.sampler.view, driver)
    for response in (
        client.post(f"/v1/engines/{pool.id}/compaction", headers=TOKEN),
        client.post(f"/v1/engines/{pool.id}/compaction", json={"dry_run": True}, headers=TOKEN),
        client.delete(f"/v1/engines/{pool.id}/compaction", headers=TOKEN),
    ):
        body = error_of(response, status)
        assert body.error == word
        assert str(error) in body.message
    if isinstance(error, ControlRefused) and error.field:
        assert body.message.startswith("target: ")


def test_through_the_client_of_a_real_agent(
    start_pool: Start, start_agent: Start, client_of: Start, wait_until: Start
) -> None:
    pool = start_pool(churn=10)
    client = client_of(start_agent("--compaction", "off"))
    wait_until(lambda: any(engine.id == pool.id for engine in client.engines().engines))
    wait_until(lambda: client.compaction(pool.id).decision)
    state = client.compaction(pool.id, plan=True, target=0.2)
    assert (state.decision, state.automatic, state.automatic_reason) == (
        "hold_off",
        False,
        "this agent was told to leave every engine alone (setting compaction: off)",
    )
    assert state.plan is not None
    assert client.compact(pool.id, wire_compaction.CompactionOrder(max_moves=4)).moved_blocks <= 4
    assert client.compact(pool.id).decision == "reached"
    assert not client.switch_moving_off(pool.id).moving
    assert [entry.action for entry in client.compactions(pool.id, limit=2).entries] == ["moving", "compact"]
    with pytest.raises(AgentRefused) as caught:
        client.compact("none")
    assert caught.value.status == 404
