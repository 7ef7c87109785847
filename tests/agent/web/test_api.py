"""The HTTP API in process: every path, every refusal in the one error shape, and nothing that JSON does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from agent import wire
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.compaction.settings import DriverSettings
from agent.exporter import Exporter
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.history import METRICS, MemoryHistory
from agent.sampling.model import EMPTY_VIEW, AgentView, Clock, PoolSample, measure_waste
from agent.web.api import ApiContext, create_app, require_writer
from agent.web.security import WriteGuard
from engine_shim.snapshot import MapSnapshot, OwnerEntry

NOW = 1_700_000_101.0
ID = "engine.dp0.tp0.pp0.kv"
Make = Callable[..., MapSnapshot]


class World:
    """An application, and what it serves from."""

    def __init__(self, snapshot: MapSnapshot) -> None:
        self.now, self.passed = NOW, 50.0  # by the wall, and by a clock that is never set
        self.history = MemoryHistory()
        self.sample = PoolSample(
            id=ID,
            state="live",
            reason="",
            snapshot=snapshot,
            report=analyze(snapshot.states),
            fragmentation_known=True,
            waste=measure_waste(snapshot),
            oldest_pinned_seconds=None,
            forecast=ExhaustionForecast(None, "no trend"),
            tokens_per_second=None,
            torn_reads=0,
            read_seconds=0.001,
        )
        self.view = AgentView(3, NOW, MappingProxyType({ID: self.sample}), ("/x: not a map",), ("/maps",), 0.002, 50.0)
        clock = Clock(wall=lambda: self.now, monotonic=lambda: self.passed)
        self.context = ApiContext(
            view=lambda: self.view,
            exporter=Exporter(lambda: self.view, clock=clock),
            history=self.history,
            guard=WriteGuard(token="secret", listens_on_loopback=True),
            compaction=CompactionDriver(DriverSettings(), AuditLog(None), clock=clock),
            version="1.2.3",
            interval_seconds=1.0,
            threshold=0.3,
            started_unix=NOW - 50,
            clock=clock,
        )
        self.app = create_app(self.context)
        self.client = TestClient(self.app)


@pytest.fixture
def world(make_snapshot: Make) -> Iterator[World]:
    owners = (OwnerEntry(5, "request-5", "", "", 40, 3, int((NOW - 2) * 1e9)),)
    snapshot = make_snapshot(
        [4, 2, 2, 3, 1, 0, 0, 2],
        owner=[0, 5, 5, 5, 0, 0, 0, 0],
        references=[0, 1, 1, 1, 0, 0, 0, 1],
        tokens=[0, 16, 16, 8, 16, 0, 0, 4],
        owners=owners,
        running_requests=1,
    )
    made = World(snapshot)
    with made.client:
        yield made


def parse_strictly(text: str) -> Any:
    """JSON as its standard has it: NaN and Infinity are errors."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def error_of(response: Any, status: int) -> wire.ErrorBody:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = wire.ErrorBody.model_validate_json(response.content)
    assert body.message
    assert body.action
    return body


def test_engines(world: World) -> None:
    response = world.client.get("/v1/engines")
    assert parse_strictly(response.text)["schema"] == "kvatlas.engines/v1"
    listed = wire.EngineList.model_validate_json(response.content)
    assert listed.now_unix == NOW
    assert listed.agent.unreadable == ["/x: not a map"]
    assert listed.agent.threshold == 0.3
    assert listed.agent.writes_enabled
    (engine,) = listed.engines
    assert engine == wire.EngineSummary.model_validate_json(world.client.get(f"/v1/engines/{ID}").content)
    assert sum(dict(engine.blocks).values()) == engine.total_blocks == 8
    assert engine.usable_blocks == 7
    assert engine.snapshot_age_seconds == pytest.approx(1.0)


def test_map_and_blocks_agree(world: World) -> None:
    cells = wire.MapCells.model_validate_json(world.client.get(f"/v1/engines/{ID}/map?cells=8").content)
    page = wire.BlockPage.model_validate_json(world.client.get(f"/v1/engines/{ID}/blocks?start=0&count=8").content)
    assert cells.blocks_per_cell == 1
    assert [wire.STATE_NAMES[state] for state in cells.state] == [block.state for block in page.blocks]
    assert cells.references == [block.references for block in page.blocks]
    assert cells.owner is not None
    assert [cells.owners[i] if i >= 0 else None for i in cells.owner] == [block.owner for block in page.blocks]
    assert cells.sequence == page.sequence


def test_where_a_request_s_blocks_are_and_how_blocks_live(world: World) -> None:
    url = f"/v1/engines/{ID}/map?cells=4"
    assert world.client.get(url).json()["requested"] is None
    assert world.client.get(f"{url}&request=request-5").json()["requested"] == [1, 2, 0, 0]
    profile = parse_strictly(world.client.get(f"/v1/engines/{ID}/profile?page_bytes=1").text)
    assert profile["schema"] == "kvatlas.profile/v1"
    assert (profile["pages"]["pages"], profile["pages"]["free_pages"]) == (8, 2)
    error_of(world.client.get(f"/v1/engines/{ID}/profile?page_bytes=0"), 400)


def test_requests(world: World) -> None:
    page = wire.RequestPage.model_validate_json(world.client.get(f"/v1/engines/{ID}/requests").content)
    assert [one.request_id for one in page.requests] == ["request-5"]
    assert page.requests[0].runs == 1
    assert page.requests[0].tail_waste_tokens == 8


def test_history(world: World) -> None:
    for second in range(10):
        world.history.append(ID, NOW - 10 + second, {"free": float(second), "fragmentation": None})
    query = {"metric": "free", "from": NOW - 10, "to": NOW, "step": 5}
    history = wire.History.model_validate_json(world.client.get(f"/v1/engines/{ID}/history", params=query).content)
    values = [(p.minimum, p.maximum) for p in history.points if p.mean is not None]
    assert (min(low for low, _ in values if low is not None), max(high for _, high in values if high is not None)) == (
        0,
        9,
    )
    undefined = world.client.get(f"/v1/engines/{ID}/history?metric=fragmentation")
    assert all(point["mean"] is None for point in parse_strictly(undefined.text)["points"])
    assert 600 <= len(parse_strictly(undefined.text)["points"]) <= 601


def test_history_of_a_pool_without_samples_is_empty(world: World) -> None:
    response = world.client.get(f"/v1/engines/{ID}/history?metric=used")
    assert wire.History.model_validate_json(response.content).points == []


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_has_a_history(world: World, metric: str) -> None:
    world.history.append(ID, NOW, {metric: 1.5})
    response = world.client.get(f"/v1/engines/{ID}/history?metric={metric}&from={NOW - 5}&to={NOW + 1}&step=1")
    assert wire.History.model_validate_json(response.content).points[-1].mean == 1.5


@pytest.mark.parametrize(
    ("path", "status", "error", "words"),
    [
        ("/v1/engines/none", 404, "not_found", "no pool 'none'"),
        ("/v1/engines/none/map", 404, "not_found", "no pool 'none'"),
        ("/v1/engines/none/history?metric=free", 404, "not_found", "no pool 'none'"),
        ("/nowhere", 404, "not_found", "/nowhere"),
        (f"/v1/engines/{ID}/map?cells=0", 400, "bad_request", "cells='0'"),
        (f"/v1/engines/{ID}/map?cells=4097", 400, "bad_request", "4096"),
        (f"/v1/engines/{ID}/map?cells=many", 400, "bad_request", "cells='many'"),
        (f"/v1/engines/{ID}/blocks?start=-1", 400, "bad_request", "start='-1'"),
        (f"/v1/engines/{ID}/blocks?start=8", 400, "bad_request", "pool of 8 blocks"),
        (f"/v1/engines/{ID}/blocks?count=5000", 400, "bad_request", "count='5000'"),
        (f"/v1/engines/{ID}/requests?limit=0", 400, "bad_request", "limit='0'"),
        (f"/v1/engines/{ID}/history", 400, "bad_request", "metric"),
        (f"/v1/engines/{ID}/history?metric=nonsense", 400, "bad_request", "nonsense"),
        (f"/v1/engines/{ID}/history?metric=free&from=9&to=1", 400, "bad_request", "end after it starts"),
        (f"/v1/engines/{ID}/history?metric=free&from=nan", 400, "bad_request", "end after it starts"),
        (f"/v1/engines/{ID}/history?metric=free&to=inf", 400, "bad_request", "end after it starts"),
        (f"/v1/engines/{ID}/history?metric=free&step=0", 400, "bad_request", "step"),
        (f"/v1/engines/{ID}/history?metric=free&step=1e-9", 400, "bad_request", "raise the step"),
    ],
)
def test_refusals_have_one_shape(world: World, path: str, status: int, error: str, words: str) -> None:
    world.history.append(ID, NOW, {"free": 1.0})
    body = error_of(world.client.get(path), status)
    assert body.error == error
    assert words in body.message


def test_a_body_of_megabytes_is_refused_before_it_is_read(world: World) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    reply = world.client.post("/v1/plan", content=b" " * (5 << 20), headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


def test_an_engine_of_one_pool_goes_by_its_own_id(world: World) -> None:
    world.history.append(ID, NOW, {"free": 1.0})
    for route in ("", "/map", "/blocks", "/requests", "/history?metric=free"):
        answer = world.client.get(f"/v1/engines/engine{route}")
        assert answer.status_code == 200, route
        assert answer.json()["id"] == ID, route
    assert world.client.get("/v1/engines/engine/history?metric=free").json()["points"]


def test_an_engine_of_several_pools_does_not(world: World) -> None:
    other = replace(world.sample, id="engine.dp0.tp1.pp0.kv")
    world.view = replace(world.view, samples=MappingProxyType({ID: world.sample, other.id: other}))
    body = error_of(world.client.get("/v1/engines/engine"), 404)
    assert body.message == "engine 'engine' has 2 pools"
    assert ID in body.action
    assert other.id in body.action


def test_an_unknown_metric_is_told_which_there_are_once(world: World) -> None:
    body = error_of(world.client.get(f"/v1/engines/{ID}/history?metric=nonsense"), 400)
    assert (body.message + body.action).count("strict_fragmentation") == 1
    body = error_of(world.client.get(f"/v1/engines/{ID}/history?metric=free&from=9&to=1"), 400)
    assert "strict_fragmentation" not in body.message + body.action


def test_a_method_that_is_not_there(world: World) -> None:
    assert (
        error_of(world.client.post("/v1/engines", headers={"Authorization": "Bearer secret"}), 405).error
        == "method_not_allowed"
    )


def test_a_fault_of_ours_has_the_same_shape_and_is_logged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent.web.api.map_cells", lambda *_: 1 / 0)
    for _ in range(3):
        assert error_of(world.client.get(f"/v1/engines/{ID}/map"), 500).error == "internal"
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.getMessage() == "request failed"
    assert "ZeroDivisionError" in str(record.__dict__["fields"])


def test_nan_never_gets_into_json(world: World) -> None:
    """A model refuses it when it is made, so that it fails here and not in somebody's parser."""
    world.sample = replace(world.sample, oldest_pinned_seconds=float("nan"))
    world.view = replace(world.view, samples=MappingProxyType({ID: world.sample}))
    assert error_of(world.client.get(f"/v1/engines/{ID}"), 500).error == "internal"
    undefined = replace(world.sample, report=analyze([2, 2]), oldest_pinned_seconds=None)
    world.view = replace(world.view, samples=MappingProxyType({ID: undefined}))
    assert parse_strictly(world.client.get("/v1/engines").text)["engines"][0]["fragmentation"]["rate"] is None


def test_probes(world: World) -> None:
    assert world.client.get("/healthz").text == "ok\n"
    assert world.client.get("/readyz").text == "ready\n"
    world.now = NOW + 3600  # the clock was set
    assert world.client.get("/healthz").text == "ok\n"
    world.passed = 61.0  # the sampler hangs
    assert error_of(world.client.get("/healthz"), 503).error == "unavailable"
    assert world.client.get("/readyz").status_code == 200
    world.passed, world.view = 100.0, EMPTY_VIEW
    assert error_of(world.client.get("/readyz"), 503).error == "unavailable"
    assert error_of(world.client.get("/healthz"), 503).message == "no sample for 50 s"


def test_metrics(world: World) -> None:
    response = world.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'kvatlas_pool_blocks{engine_id="engine"' in response.text


def test_docs_list_every_path_and_fetch_nothing(world: World) -> None:
    page = world.client.get("/docs").text
    schema = world.client.get("/openapi.json").json()
    assert {"/metrics", "/healthz", "/readyz", "/v1/engines", "/v1/engines/{id}/history"} <= set(schema["paths"])
    assert "HTTPValidationError" not in json.dumps(schema)
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page
    assert not re.search(r"https?://|src=|@import|url\(", page)


def test_two_applications_in_one_process(world: World) -> None:
    other = World(world.sample.snapshot).client
    assert other.get("/metrics").text == world.client.get("/metrics").text


def test_changes_need_the_token(world: World) -> None:
    app = create_app(world.context)

    @app.post("/change", dependencies=[Depends(require_writer(world.context))])
    async def change() -> dict[str, bool]:
        return {"changed": True}

    client = TestClient(app)
    refused = client.post("/change")
    assert error_of(refused, 401).error == "unauthorized"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert error_of(client.post("/change", headers={"Authorization": "Bearer wrong"}), 401)
    assert client.post("/change", headers={"Authorization": "Bearer secret"}).json() == {"changed": True}


@pytest.mark.parametrize(
    ("peer", "loopback", "status"), [("127.0.0.1", True, 200), ("192.0.2.7", True, 403), ("127.0.0.1", False, 403)]
)
def test_without_a_token_only_loopback_may_change(world: World, peer: str, loopback: bool, status: int) -> None:
    context = replace(world.context, guard=WriteGuard(token=None, listens_on_loopback=loopback))
    app: FastAPI = create_app(context)

    @app.delete("/change", dependencies=[Depends(require_writer(context))])
    async def change() -> dict[str, bool]:
        return {"changed": True}

    assert TestClient(app, client=(peer, 50_000)).delete("/change").status_code == status


def test_a_pool_that_cannot_be_told_costs_the_others_nothing(world: World) -> None:
    bad = replace(world.sample, id="bad", oldest_pinned_seconds=float("nan"))
    world.view = replace(world.view, samples=MappingProxyType({"bad": bad, ID: world.sample}))
    listed = wire.EngineList.model_validate_json(world.client.get("/v1/engines").text)
    assert [one.id for one in listed.engines] == [ID]
    assert listed.agent.unreadable == ["/x: not a map", "bad: its numbers cannot be told; see the agent's log"]


def test_faults_are_told_apart_by_their_route(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Paths are the client's to choose, without number."""
    monkeypatch.setattr("agent.web.api.presenter.summarize", lambda *_: dict[str, int]()["x"])
    names = [f"pool{index}" for index in range(20)]
    world.view = replace(world.view, samples=MappingProxyType(dict.fromkeys(names, world.sample)))
    for name in names:
        assert error_of(world.client.get(f"/v1/engines/{name}"), 500).error == "internal"
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert str(record.__dict__["fields"]["subject"]).startswith("/v1/engines/{id} ")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_may_ask_for_the_head_alone(world: World, path: str) -> None:
    answer = world.client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert path in world.client.get("/openapi.json").json()["paths"]
    assert "head" not in world.client.get("/openapi.json").json()["paths"][path]


@pytest.mark.parametrize("path", ["/v1/engines/", "/v1/engines//", "/healthz/"])
def test_a_path_too_long_by_a_slash_is_not_there(world: World, path: str) -> None:
    answer = world.client.get(path, headers={"Host": "[::1"}, follow_redirects=False)
    assert error_of(answer, 404).error == "not_found"
