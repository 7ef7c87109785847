"""A dashboard of two agents: what belongs to one of them neither reaches the other nor is shown as its own.

Both agents see the same pools, so that ids tell nothing apart. Each stands behind a server that writes down what it is
asked.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from agent.client import AgentClient, AgentUnavailable
from agent.wire import compaction as wire_compaction
from agent.wire.devices import DeviceList
from dashboard import exports
from dashboard.context import Context
from dashboard.palette import LIGHT
from dashboard.views import black_boxes

APP = Path(dashboard.__file__).parent / "app.py"
PATIENCE_SECONDS = 60.0


@dataclass
class Watched:
    """An agent, by the address of the server in front of it, and what that was asked with."""

    url: str
    token: str
    authorizations: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")


def in_front_of(agent_url: str, token: str) -> tuple[Watched, http.server.ThreadingHTTPServer]:
    """A server that hands everything on, and keeps each Authorization that it was given."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            if given is not None:
                watched.authorizations.append(given)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kept = {name: text for name, text in self.headers.items() if name in ("Authorization", "Content-Type")}
            url = agent_url + self.path
            answer = httpx.request(self.command, url, content=body, headers=kept, timeout=60, trust_env=False)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    watched = Watched(f"http://127.0.0.1:{server.server_port}", token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return watched, server


@dataclass
class World:
    first: Watched
    second: Watched
    pools: list[str]


@pytest.fixture(scope="module")
def agents(shared_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, str]], list[str]]:
    """Addresses and tokens of two agents that watch the same two pools, at rest."""
    pools = [shared_stage.pool("first", 600), shared_stage.pool("second", 900, "lowest-free")]
    for pool in pools:
        pool.send("churn 30")
    started = []
    for name in ("one", "two"):
        token = tmp_path_factory.mktemp(name) / "token"
        token.write_text(f"the-token-of-agent-{name}")
        url, _ = shared_stage.agent(interval_seconds="0.2", compaction="off", token_file=str(token))
        started.append((url, token.read_text()))
    for pool in pools:
        pool.send("hold")
    return started, [pool.id for pool in pools]


@pytest.fixture
def world(agents: tuple[list[tuple[str, str]], list[str]]) -> Iterator[World]:
    made = [in_front_of(url, token) for url, token in agents[0]]
    yield World(made[0][0], made[1][0], agents[1])
    for _, server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, world: World) -> Iterator[Callable[..., AppTest]]:
    """A function that gives a view of the first agent's first pool, as it is first seen."""

    def start(view: str) -> AppTest:
        monkeypatch.setenv("KVATLAS_AGENT_URL", f"{world.first.url},{world.second.url}")
        monkeypatch.setattr(AgentClient.__init__, "__defaults__", ("http://127.0.0.1:9", None, PATIENCE_SECONDS))
        st.cache_resource.clear()
        test = AppTest.from_file(str(APP), default_timeout=120)
        test.query_params["view"], test.query_params["pool"] = view, world.pools[0]
        return test.run()

    yield start
    st.cache_resource.clear()


def text_of(test: AppTest) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


def look_at(test: AppTest, agent: Watched, pool: str) -> None:
    picker = test.selectbox(key="pool_picker")
    (wanted,) = [one for one in picker.options if one.startswith(pool) and one.endswith(agent.name)]
    picker.select(wanted).run()
    assert not test.exception


def labels_of(test: AppTest) -> list[str]:
    return [button.label for button in test.button]


def press(test: AppTest, label: str) -> None:
    next(button for button in test.button if button.label == label).click().run()
    assert not test.exception


def use_token(test: AppTest, token: str) -> None:
    next(one for one in test.text_input if "token" in one.label).set_value(token)
    press(test, "Use it")
    assert "Forget it" in labels_of(test)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_goes_to_the_agent_that_it_was_typed_in_for_and_to_no_other(
    app: Callable[..., AppTest], world: World
) -> None:
    """The planner asks as soon as it is looked at, without a click."""
    test = app("memory")
    use_token(test, world.first.token)
    assert set(world.first.authorizations) == {f"Bearer {world.first.token}"}
    look_at(test, world.second, world.pools[0])
    assert test.query_params["agent"] in ("2", ["2"])
    assert world.second.authorizations == []
    assert "Use it" in labels_of(test)  # it asks for a token of its own, by name
    assert any(world.second.name in one.label.replace("\\", "") for one in test.text_input)
    use_token(test, world.second.token)
    look_at(test, world.first, world.pools[1])
    assert "Forget it" in labels_of(test)
    assert set(world.first.authorizations) == {f"Bearer {world.first.token}"}
    assert set(world.second.authorizations) == {f"Bearer {world.second.token}"}


def test_a_token_that_one_agent_refuses_is_that_agent_s_alone(app: Callable[..., AppTest], world: World) -> None:
    test = app("memory")
    use_token(test, world.first.token)
    look_at(test, world.second, world.pools[0])
    use_token(test, "not-the-token")
    test.run()
    assert "Use it" in labels_of(test)
    look_at(test, world.first, world.pools[0])
    assert "Forget it" in labels_of(test)
    press(test, "Forget it")
    assert "Use it" in labels_of(test)


# ---- what came of changes --------------------------------------------------------------------------------------------


@pytest.fixture
def slow_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Runs of compaction take until the event is set; then the agent is asked."""
    go_on = threading.Event()
    ask = AgentClient.compact

    def compact(
        client: AgentClient, id: str, order: wire_compaction.CompactionOrder | None = None
    ) -> wire_compaction.CompactionRun:
        assert go_on.wait(PATIENCE_SECONDS)
        return ask(client, id, order)

    monkeypatch.setattr(AgentClient, "compact", compact)
    yield go_on
    go_on.set()


def test_a_plan_is_of_the_agent_that_made_it(app: Callable[..., AppTest], world: World) -> None:
    test = app("compaction")
    press(test, "Preview the plan")
    plan = "F \N{LESS-THAN OR EQUAL TO} 0.10"
    assert plan in text_of(test)
    look_at(test, world.second, world.pools[0])
    assert plan not in text_of(test)
    look_at(test, world.first, world.pools[0])
    assert plan in text_of(test)


def test_a_run_in_one_pool_hinders_nothing_in_another(
    app: Callable[..., AppTest], world: World, slow_run: threading.Event, eventually: Callable[..., Any]
) -> None:
    test = app("compaction")
    use_token(test, world.first.token)
    press(test, "Run it now")
    assert test.button(key="compaction_run_button").disabled
    assert any("under way" in one.value for one in test.info)
    look_at(test, world.first, world.pools[1])
    assert not test.button(key="compaction_run_button").disabled
    look_at(test, world.second, world.pools[0])  # of the same id
    assert not any("under way" in one.value for one in test.info)
    slow_run.set()

    def refused() -> bool:
        look_at(test, world.first, world.pools[0])
        return any("The agent refused" in one.value for one in test.error)

    eventually(refused, "the pool has no engine that can be asked, which is said where it was asked for")
    assert not test.button(key="compaction_run_button").disabled
    look_at(test, world.first, world.pools[1])
    assert not test.error


def test_a_token_that_is_refused_while_another_pool_is_shown_is_forgotten(
    app: Callable[..., AppTest], world: World, slow_run: threading.Event, eventually: Callable[..., Any]
) -> None:
    test = app("compaction")
    use_token(test, "not-the-token")
    press(test, "Run it now")
    look_at(test, world.first, world.pools[1])
    assert "Forget it" in labels_of(test)
    slow_run.set()

    def forgotten() -> bool:
        test.run()
        return "Use it" in labels_of(test)

    eventually(forgotten, "the token is gone")


def test_what_is_meant_for_one_pool_arms_nothing_for_another(app: Callable[..., AppTest], world: World) -> None:
    test = app("compaction")
    use_token(test, world.first.token)
    next(one for one in test.checkbox if one.label == "I mean it:").check().run()
    assert not test.button(key="compaction_kill_button").disabled
    look_at(test, world.first, world.pools[1])
    assert test.button(key="compaction_kill_button").disabled


# ---- what was read ---------------------------------------------------------------------------------------------------


def test_a_black_box_is_of_the_agent_that_it_was_asked_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes are named after engines, and two agents may have engines of one name."""

    def looking_at(agent: str) -> Context:
        def black_box(name: str, cells: int) -> Any:
            return SimpleNamespace(summary=SimpleNamespace(name=name), agent=agent)

        client: Any = SimpleNamespace(url=agent, black_box=black_box)
        return Context(theme=LIGHT, paused=False, pool="p", client=client)

    monkeypatch.setattr(st, "session_state", {})
    opened: list[Any] = [black_boxes._opened(looking_at(agent), "a.tar.gz") for agent in ("one", "two", "one")]
    assert [box.agent for box in opened] == ["one", "two", "one"]
    assert black_boxes._opened(looking_at("one"), "a.tar.gz") is opened[2]  # fetched once


def test_a_file_has_no_row_of_another_agent(
    app: Callable[..., AppTest], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: dict[str, Callable[[], exports.Rows]] = {}
    ask = AgentClient.devices

    def devices(client: AgentClient) -> DeviceList:
        if client.url == world.second.url:
            raise AgentUnavailable("no answer within 2 s")
        return ask(client)

    monkeypatch.setattr(AgentClient, "devices", devices)
    monkeypatch.setattr(exports, "offer", lambda name, rows, **_: offered.update({name: rows}))
    test = app("memory")
    assert offered["memory"]()
    look_at(test, world.second, world.pools[0])
    assert "No data: no answer within 2 s" in text_of(test)
    assert not offered["memory"]()


def test_a_button_of_before_gives_what_it_was_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser may still have one of before another agent was looked at, whose pool has the same id."""
    drawn: list[Callable[[], str]] = []
    monkeypatch.setattr(st, "session_state", {})
    monkeypatch.setattr(st, "download_button", lambda _, make, **__: drawn.append(make))
    for agent in (1, 2):
        monkeypatch.setattr(exports, "chosen_agent", partial(int, agent), raising=False)
        rows: exports.Rows = [{"agent": agent}]
        exports.offer("map", partial(list, rows), pool="one.dp0.tp0.pp0.kv")
    assert [make() for make in drawn[::2]] == ["agent\n1\n", "agent\n2\n"]
