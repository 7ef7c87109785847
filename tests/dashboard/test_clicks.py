"""A click counts once, also where the page begins anew before it comes to the button; and nothing is typed twice.

The page begins anew when somebody chooses another pool, or when the pools that there are change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from agent.client import AgentClient
from agent.wire.plan import LiveAdvice
from dashboard import header
from dashboard.source import SLOW_REFRESH_SECONDS

APP = Path(dashboard.__file__).parent / "app.py"
TOKEN = "the-operators-secret-token"


@pytest.fixture(scope="module")
def watched(shared_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Address of an agent with a token, and a pool at rest."""
    token = tmp_path_factory.mktemp("secrets") / "token"
    token.write_text(TOKEN)
    pool = shared_stage.pool("first", 600)
    pool.send("churn 30")
    url, _ = shared_stage.agent(interval_seconds="0.2", token_file=str(token))
    pool.send("hold")
    return url, pool.id


@pytest.fixture
def writer(watched: tuple[str, str]) -> Iterator[AgentClient]:
    with AgentClient(watched[0], TOKEN, timeout_seconds=60) as client:
        yield client


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, watched: tuple[str, str]) -> Iterator[Callable[..., AppTest]]:
    """A function that gives a view as it is first seen."""

    def start(view: str) -> AppTest:
        monkeypatch.setenv("KVATLAS_AGENT_URL", watched[0])
        monkeypatch.setattr(AgentClient.__init__, "__defaults__", ("http://127.0.0.1:9", None, 60.0))
        st.cache_resource.clear()
        test = AppTest.from_file(str(APP), default_timeout=120)
        test.query_params["view"], test.query_params["pool"] = view, watched[1]
        return test.run()

    yield start
    st.cache_resource.clear()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[AppTest, str], None]:
    """Presses a button in a run that ends before the view, and then has the page run whole."""

    def press_it(test: AppTest, label: str) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(header, "show_header", st.stop)
            press(test, label)
        test.run()
        assert not test.exception

    return press_it


def press(test: AppTest, label: str) -> None:
    next(button for button in test.button if button.label == label).click().run()
    assert not test.exception


def labels_of(test: AppTest) -> list[str]:
    return [button.label for button in test.button]


def type_token(test: AppTest, token: str) -> None:
    next(one for one in test.text_input if "token" in one.label).set_value(token)


def with_token(test: AppTest) -> AppTest:
    type_token(test, TOKEN)
    press(test, "Use it")
    return test


def forms_that_empty_themselves(test: AppTest) -> list[str]:
    """The browser empties these as it sends them, whatever the answer is. AppTest does not do that."""
    found: list[str] = []
    blocks: list[Any] = [test.main]
    while blocks:
        block = blocks.pop()
        blocks += [one for one in block.children.values() if hasattr(one, "children")]
        if (form := getattr(block.proto, "form", None)) is not None and form.clear_on_submit:
            found.append(form.form_id)
    return found


def fill_mute(test: AppTest, rule: str) -> None:
    test.selectbox(key="mute_rule").select(rule)
    test.text_input(key="mute_author").set_value("ann")
    test.text_input(key="mute_comment").set_value("a drill")


def test_a_token_is_used_and_forgotten_by_one_click(
    app: Callable[..., AppTest], interrupted: Callable[[AppTest, str], None]
) -> None:
    test = app("alerts")
    assert forms_that_empty_themselves(test) == []
    type_token(test, TOKEN)
    interrupted(test, "Use it")
    assert "Forget it" in labels_of(test)
    interrupted(test, "Forget it")
    assert "Use it" in labels_of(test)


def test_what_cannot_be_a_token_is_said_and_the_field_is_empty(app: Callable[..., AppTest]) -> None:
    test = app("alerts")
    type_token(test, "two words")
    press(test, "Use it")
    assert any("That cannot be a token" in one.value for one in test.error)
    assert next(one for one in test.text_input if "token" in one.label).value == ""
    assert not any("That cannot be a token" in one.value for one in with_token(test).error)
    press(test, "Forget it")
    assert not test.error


def test_a_mute_is_made_and_ended_by_one_click_each(
    app: Callable[..., AppTest], interrupted: Callable[[AppTest, str], None], writer: AgentClient
) -> None:
    test = with_token(app("alerts"))
    fill_mute(test, "tail-waste")
    interrupted(test, "Mute")
    (made,) = writer.alerts().mutes
    assert (made.rule, made.engine, made.author, made.comment) == ("tail-waste", None, "ann", "a drill")
    assert made.expires_unix - made.created_unix == 3600
    interrupted(test, "End it")
    assert writer.alerts().mutes == []


def test_a_mute_that_is_refused_need_not_be_typed_anew(app: Callable[..., AppTest], writer: AgentClient) -> None:
    test = with_token(app("alerts"))
    assert forms_that_empty_themselves(test) == []
    fill_mute(test, "any")  # nor an engine: the agent mutes not everything
    press(test, "Mute")
    assert any("The agent refused" in one.value for one in test.error)
    assert [test.text_input(key=key).value for key in ("mute_author", "mute_comment")] == ["ann", "a drill"]
    test.selectbox(key="mute_rule").select("tail-waste")
    press(test, "Mute")
    assert not test.error
    assert any("Muted" in one.value for one in test.success)
    assert [test.text_input(key=key).value for key in ("mute_author", "mute_comment")] == ["", ""]
    test.run()
    assert not test.success  # it was said once
    press(test, "End it")
    assert writer.alerts().mutes == []


def test_a_mute_that_is_gone_already_is_said(app: Callable[..., AppTest], writer: AgentClient) -> None:
    test = with_token(app("alerts"))
    fill_mute(test, "tail-waste")
    press(test, "Mute")
    writer.unmute(writer.alerts().mutes[0].id)
    press(test, "End it")
    assert any("no mute" in one.value for one in test.error)


def test_a_test_message_is_sent_by_one_click(
    app: Callable[..., AppTest], interrupted: Callable[[AppTest, str], None]
) -> None:
    test = with_token(app("alerts"))
    interrupted(test, "Send it")
    assert any("log took the message" in one.value.replace("\\", "") for one in test.success)
    test.run()
    assert not test.success


def test_what_changes_by_itself_is_refreshed(app: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice for the pool that runs stands beside a form which must not be; AppTest refreshes nothing by itself."""
    drawn: dict[str, float | None] = {}
    fragment = st.fragment

    def noted(part: Any, run_every: float | None = None) -> Any:
        def asked(*given: Any) -> None:
            before = len(advised)
            part(*given)
            if len(advised) > before:
                drawn["advice"] = run_every

        return fragment(asked, run_every=run_every)

    advised: list[str] = []
    ask = AgentClient.advice

    def advice(client: AgentClient, id: str) -> LiveAdvice:
        advised.append(id)
        return ask(client, id)

    monkeypatch.setattr(AgentClient, "advice", advice)
    monkeypatch.setattr(st, "fragment", noted)
    test = app("memory")
    assert len(advised) == 1
    assert drawn == {"advice": SLOW_REFRESH_SECONDS}
    test.toggle(key="pause_switch").set_value(True).run()
    assert drawn == {"advice": None}
