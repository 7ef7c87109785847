"""Alerts and mutes over HTTP, and as metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from agent.alerting.families import alert_families
from agent.exporter import Exporter, render_text
from agent.history import MemoryHistory
from agent.web.api import ApiContext, create_app
from agent.web.security import WriteGuard
from agent.wire import alerts as wire
from alerts.model import ChangeKind
from alerts.sinks.log import LogSink
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.webhook import WebhookSink

MakeScene = Callable[..., Any]
TOKEN = {"Authorization": "Bearer secret"}


class World:
    """A pool that is full for as long as it is told to be, and the API of the agent that watches it."""

    def __init__(self, scene: Any) -> None:
        self.scene = scene
        self.served = scene.engine(headroom=0.0)
        context = ApiContext(
            view=lambda: scene.view,
            exporter=Exporter(lambda: scene.view, clock=scene.clock),
            history=MemoryHistory(),
            guard=WriteGuard(token="secret", listens_on_loopback=True),
            compaction=scene.driver,
            version="1.2.3",
            interval_seconds=1.0,
            threshold=0.3,
            started_unix=0.0,
            clock=scene.clock,
            alerting=scene.alerting,
        )
        self.client = TestClient(create_app(context))
        self.held: list[int] = []

    def fill(self, blocks: int = 125) -> None:
        self.held = list(self.served.engine.pool.allocate(blocks).blocks)

    def empty(self) -> None:
        self.served.engine.pool.release(self.held)

    def alerts(self) -> wire.AlertList:
        response = self.client.get("/v1/alerts")
        assert response.status_code == 200, response.text
        return wire.AlertList.model_validate_json(response.content)

    def mute(self, **order: Any) -> Any:
        given = {"rule": "pool-nearly-full", "seconds": 60, "author": "ann"} | order
        return self.client.post("/v1/mutes", json=given, headers=TOKEN)


@pytest.fixture
def world(scene: MakeScene) -> Iterator[World]:
    made = World(scene(sinks=[LogSink("log")]))
    with made.client:
        yield made


def test_an_alert_from_pending_to_over(world: World) -> None:
    world.scene.tick(2)
    assert world.alerts().open == []
    world.fill()
    world.scene.tick(2)
    states = {one.rule: one.state for one in world.alerts().open}
    assert set(states.values()) == {"pending"}
    assert {"pool-nearly-full", "leak-suspected"} <= set(states)
    world.scene.fires("pool-nearly-full")
    (alert,) = [one for one in world.alerts().open if one.state == "firing"]
    assert alert.labels == {"engine_id": "engine", "model": "org/model", "pool": "kv", "rank": "dp0.tp0.pp0"}
    assert (alert.severity, alert.value_text, alert.held) == ("warning", "98 %", "")
    assert alert.link == "https://dashboard.example/?pool=engine.dp0.tp0.pp0.kv"
    world.empty()
    world.scene.ends("pool-nearly-full")
    found = world.alerts()
    assert [one for one in found.open if one.state == "firing"] == []
    (over,) = found.recent
    assert (over.state, over.reason, over.ended_unix) == ("resolved", "it is at 0 % now", world.scene.now)
    assert [sink.name for sink in found.sinks] == ["log"]
    assert not found.kept
    assert "engine-gone" in found.rules


def test_the_worst_comes_first(world: World) -> None:
    world.served.ask(16, 100)
    world.scene.tick()
    world.fill(121)
    world.scene.fires("pool-nearly-full")
    world.served.steps = 0
    world.scene.fires("engine-stalled")
    assert [one.rule for one in world.alerts().open][:1] == ["engine-stalled"]


def test_a_mute_and_its_end(world: World) -> None:
    made = world.mute(comment="drill").json()
    assert made["expires_unix"] == made["created_unix"] + 60
    world.fill()
    assert "pool-nearly-full" not in {change.alert.rule for change in world.scene.tick(40)}
    (muted,) = [one for one in world.alerts().open if one.rule == "pool-nearly-full"]
    assert muted.state == "muted"
    assert [one.comment for one in world.alerts().mutes] == ["drill"]
    assert world.client.get("/v1/mutes").json()["mutes"][0]["id"] == made["id"]
    gone = world.client.delete(f"/v1/mutes/{made['id']}", headers=TOKEN)
    assert (gone.status_code, gone.json()["mutes"]) == (200, [])
    told = [(change.alert.rule, change.kind) for change in world.scene.tick()]
    assert told == [("pool-nearly-full", ChangeKind.FIRED)]


def test_a_mute_ends_by_itself(world: World) -> None:
    world.mute(rule=None, engine="engine", seconds=45)
    world.fill()
    assert world.scene.tick(44) == []
    assert "pool-nearly-full" in {change.alert.rule for change in world.scene.tick(2)}
    assert world.client.get("/v1/mutes").json()["mutes"] == []


@pytest.mark.parametrize(
    ("order", "part"),
    [
        ({"rule": "pool-nearly-ful"}, "did you mean pool-nearly-full?"),
        ({"rule": None}, "choose a rule or an engine"),
        ({"author": " "}, "has an author"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1e9}, "at most 30 days"),
        ({"engine": "x" * 300}, "engine is longer"),
        ({"engine": "vllm-*"}, "no pattern"),
        ({"engine": "\x00"}, "engine holds a character that cannot be shown"),
        ({"author": "a\u202eb"}, "author holds a character that cannot be shown"),
        ({"comment": "\x1b[2J"}, "comment holds a character that cannot be shown"),
        ({"until": 5}, "until"),
    ],
)
def test_what_is_no_mute_is_refused_with_what_to_do(world: World, order: dict[str, Any], part: str) -> None:
    response = world.mute(**order)
    assert response.status_code == 400
    assert part in response.json()["message"] + response.json()["action"]


@pytest.mark.parametrize("name", ["engine", "author", "comment"])
def test_half_a_character_makes_no_list_unreadable(world: World, name: str) -> None:
    """JSON can hold it and UTF-8 cannot: kept, it would fail every answer for as long as the mute lasts."""
    order = {"rule": "tail-waste", "seconds": 60, "author": "ann"} | {name: "HALF"}
    body = json.dumps(order).replace("HALF", "\\ud800")
    response = world.client.post("/v1/mutes", content=body, headers=TOKEN | {"Content-Type": "application/json"})
    assert response.status_code == 400
    assert world.client.get("/v1/mutes").json()["mutes"] == []
    assert world.client.get("/v1/alerts").status_code == 200


def test_an_author_may_have_any_name(world: World) -> None:
    assert world.mute(author="Ζωή 👩\u200d💻").status_code == 200
    assert world.client.get("/v1/mutes").json()["mutes"][0]["author"] == "Ζωή 👩\u200d💻"


def test_only_who_may_change_things_mutes(world: World) -> None:
    order = {"rule": "tail-waste", "seconds": 60, "author": "ann"}
    assert world.client.post("/v1/mutes", json=order).status_code == 401
    assert world.client.delete("/v1/mutes/1").status_code == 401
    missing = world.client.delete("/v1/mutes/1", headers=TOKEN)
    assert (missing.status_code, missing.json()["error"]) == (404, "not_found")
    assert "kvatlas alerts mutes" in missing.json()["action"]


def test_there_are_only_so_many_mutes(world: World) -> None:
    for number in range(200):
        assert world.mute(rule=None, engine=f"engine-{number}").status_code == 200
    assert world.mute().status_code == 400


def test_metrics_count_open_alerts_and_messages(world: World) -> None:
    def lines() -> set[str]:
        alerting = world.scene.alerting
        text = render_text(alert_families(alerting.counts(), alerting.outcomes(), "kvatlas_")).decode()
        return set(text.splitlines())

    assert 'kvatlas_alerts{severity="warning",state="firing"} 0.0' in lines()
    assert 'kvatlas_notifications_total{sink="log",outcome="sent"} 0.0' in lines()
    world.fill()
    world.scene.fires("pool-nearly-full")
    assert 'kvatlas_alerts{severity="warning",state="firing"} 1.0' in lines()


def test_a_test_message_says_whether_it_arrives(scene: MakeScene) -> None:
    nobody = WebhookSink("webhook", SecretUrl("http://127.0.0.1:1/secret-path", what="webhook_url"), proxy="none")
    world = World(scene(sinks=[LogSink("log"), nobody]))
    with world.client:

        def trial(sink: str, **more: Any) -> Any:
            return world.client.post("/v1/alerts/test", json={"sink": sink, **more}, headers=TOKEN)

        arrived = wire.SinkTrial.model_validate_json(trial("log", author="ann").content)
        assert (arrived.sent, arrived.reason, arrived.status, arrived.then) == (True, "", None, "")
        lost = trial("webhook")
        failed = wire.SinkTrial.model_validate_json(lost.content)
        assert (failed.sent, failed.reason, failed.then) == (False, "unreachable", "the agent would try again")
        assert "secret-path" not in lost.text
        assert world.alerts().open == []  # it is no alert, and nothing waits to be sent
        assert [sink.waiting for sink in world.alerts().sinks] == [0, 0]
        unknown = trial("http://hooks.example/secret")
        assert unknown.status_code == 404
        assert "secret" not in unknown.text
        assert unknown.json()["action"] == "give one that is set up: log, webhook"
        half = b'{"sink": "log", "author": "\\ud800"}'
        headers = TOKEN | {"Content-Type": "application/json"}
        assert world.client.post("/v1/alerts/test", content=half, headers=headers).status_code in (200, 400)
        assert world.client.post("/v1/alerts/test", json={"sink": "log"}).status_code == 401
