"""The views of time, compaction and requests where there is little to show: each says why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from agent.client import AgentClient, AgentUnavailable
from agent.wire.blackbox import BoxList

APP = Path(dashboard.__file__).parent / "app.py"
VIEWS = ("time", "compaction", "requests")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AppTest]]:
    """A function that gives a view as it is first seen, for an agent's address."""

    def start(agent_url: str, **query: str) -> AppTest:
        monkeypatch.setenv("KVATLAS_AGENT_URL", agent_url)
        st.cache_resource.clear()
        test = AppTest.from_file(str(APP), default_timeout=60)
        for name, value in query.items():
            test.query_params[name] = value
        return test.run()

    yield start
    st.cache_resource.clear()


@pytest.fixture(scope="module")
def watched(shared_stage: Any) -> tuple[str, Any]:
    """An agent without a state folder and without a token, and a pool at rest."""
    pool = shared_stage.pool("first", 600)
    pool.send("churn 40")
    url, _ = shared_stage.agent(interval_seconds="0.2", compaction="off")
    pool.send("hold")
    return url, pool


def text_of(test: AppTest) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


@pytest.mark.parametrize("view", VIEWS)
def test_no_agent_is_no_exception(view: str, app: Callable[..., AppTest]) -> None:
    test = app("http://127.0.0.1:9", view=view, pool="some.dp0.tp0.pp0.kv", at="1700000000")
    assert not test.exception
    assert "Agent unreachable" in test.error[0].value


@pytest.mark.parametrize("view", VIEWS)
def test_a_pool_that_is_not_listed_is_no_exception(
    view: str, app: Callable[..., AppTest], watched: tuple[str, Any]
) -> None:
    test = app(watched[0], view=view, pool="other.dp0.tp0.pp0.kv", box="none.tar.gz", sort="nothing", span="eternity")
    assert not test.exception
    assert "no longer lists" in test.warning[0].value


@pytest.mark.parametrize("at", ["", "1700000000", "soon", "nan", "1e99", "-5"])
def test_without_a_state_folder_there_are_metrics_and_what_to_set(
    at: str, app: Callable[..., AppTest], watched: tuple[str, Any]
) -> None:
    url, pool = watched
    test = app(url, view="time", pool=pool.id, at=at)
    assert not test.exception
    assert text_of(test).count("KVATLAS_STATE_DIR") == 2  # for the marks, and for black boxes
    assert len(test.get("bidi_component")) == 1  # the metrics, which memory has
    assert test.button(key="time_earlier").disabled
    assert not test.get("slider")


def test_nobody_changes_anything_who_is_not_known_to_be_on_this_machine(
    app: Callable[..., AppTest], watched: tuple[str, Any]
) -> None:
    """The agent takes changes without a token from its own machine, where this dashboard runs too; who looks at the
    page need not be there."""
    url, pool = watched
    test = app(url, view="compaction", pool=pool.id)
    assert not test.exception
    keys = {button.key for button in test.button}
    assert "compaction_plan_button" in keys
    assert not keys & {"compaction_run_button", "compaction_kill_button", "compaction_relocation_button"}
    assert any("token" in field.label for field in test.text_input)
    test.button(key="compaction_plan_button").click().run()
    assert "F \N{LESS-THAN OR EQUAL TO} 0.10" in text_of(test)
    # The negative control: with something for a token the actions are there, and the agent has its say.
    next(field for field in test.text_input if "token" in field.label).set_value("x")
    next(button for button in test.button if button.label == "Use it").click().run()
    assert test.button(key="compaction_run_button")


def test_sequences_are_filtered_as_the_link_says(app: Callable[..., AppTest], watched: tuple[str, Any]) -> None:
    url, pool = watched
    with AgentClient(url) as client:
        wanted = [one.request_id for one in client.requests(pool.id).requests]
    test = app(url, view="requests", pool=pool.id, filter=wanted[-1])
    assert not test.exception
    assert test.text_input(key="requests_filter").value == wanted[-1]
    html = text_of(test)
    assert wanted[-1] in html
    assert wanted[0] not in html
    assert f"of {len(wanted)} in the pool" in html
    test.text_input(key="requests_filter").set_value("").run()
    assert wanted[0] in text_of(test)


@pytest.fixture(scope="module")
def kept(
    shared_stage: Any, tmp_path_factory: pytest.TempPathFactory, eventually: Callable[..., Any]
) -> tuple[str, Any, list[float]]:
    """An agent that keeps the past, a pool that serves, and the instants of some frames."""
    pool = shared_stage.pool("kept", 600)
    pool.send("run")
    url, _ = shared_stage.agent(interval_seconds="0.2", state_dir=str(tmp_path_factory.mktemp("state")))
    with AgentClient(url, timeout_seconds=60.0) as client:
        times = eventually(
            lambda: found if len(found := client.frame_times(pool.id, 0, 1e10).times_unix) >= 8 else None, "frames"
        )
    return url, pool, times


def instant_of(test: AppTest) -> float:
    named = test.query_params["at"]
    return float(named if isinstance(named, str) else named[0])


def test_it_plays_and_stops(app: Callable[..., AppTest], kept: tuple[str, Any, list[float]]) -> None:
    """Each run is one refresh here: none comes by itself."""
    url, pool, times = kept
    test = app(url, view="time", pool=pool.id, at=f"{times[0]:.3f}")
    assert test.button(key="time_earlier").disabled
    assert test.button(key="time_play").label == "Play"
    test.button(key="time_play").click().run()
    assert test.button(key="time_play").label == "Stop"
    test.run()
    test.button(key="time_play").click().run()
    assert test.button(key="time_play").label == "Play"
    at = instant_of(test)
    assert at in times[1:-1]
    test.run()
    assert instant_of(test) == at
    test.button(key="time_later").click().run()
    assert instant_of(test) == times[times.index(at) + 1]
    test.button(key="time_live").click().run()
    assert "at" not in test.query_params
    assert not test.exception


def test_an_instant_before_all_frames_is_said(app: Callable[..., AppTest], kept: tuple[str, Any, list[float]]) -> None:
    url, pool, times = kept
    test = app(url, view="time", pool=pool.id, at=f"{times[0] - 100:.3f}")
    assert not test.exception
    assert "No frame of this pool is kept of that time. The oldest frame is of " in text_of(test)


def test_an_agent_that_was_too_slow_is_asked_for_its_boxes_again(
    app: Callable[..., AppTest], kept: tuple[str, Any, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    ask = AgentClient.black_boxes

    def late(client: AgentClient, engine: str | None = None, limit: int = 100) -> BoxList:
        asked.append(True)
        if len(asked) == 1:
            raise AgentUnavailable("no answer within 2 s")
        return ask(client, engine, limit)

    monkeypatch.setattr(AgentClient, "black_boxes", late)
    url, pool, instants = kept
    test = app(url, view="time", pool=pool.id, at=f"{instants[-1]:.3f}")
    assert not test.exception
    assert len(asked) == 1
    test.run()  # as the part itself is, every few seconds
    assert not test.exception
    assert "no engine has ended since this agent keeps them" in text_of(test)
