"""The view of alerts in a real browser, beside the API: one engine is gone, another was and is back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from agent.alerting.rule_files import default_rules
from agent.client import AgentClient
from agent.wire.alerts import AlertList

pytestmark = pytest.mark.browser

TOKEN = "the-operators-secret-token"
CARDS = ".st-key-view_alerts .kv-alert"


@pytest.fixture(scope="module")
def world(
    shared_stage: Any, tmp_path_factory: pytest.TempPathFactory, eventually: Callable[..., Any]
) -> dict[str, Any]:
    """An agent with a token, a receiver that works and one that nobody answers for, and a dashboard."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "token").write_text(TOKEN)
    (folder / "webhook").write_text("http://127.0.0.1:1/nobody")
    others = [rule.name for rule in default_rules() if rule.name not in ("engine-gone", "tail-waste")]
    (folder / "rules.yaml").write_text(f"disable: [{', '.join(others)}]\n")  # so that nothing else fires meanwhile
    steady = shared_stage.pool("llama-a", 2500)
    steady.send("churn 40")
    steady.send("run")
    gone, back = shared_stage.pool("llama-b", 500), shared_stage.pool("llama-c", 500)
    agent_url, _ = shared_stage.agent(
        interval_seconds="0.2",
        gone_seconds="3600",
        token_file=str(folder / "token"),
        webhook_url_file=str(folder / "webhook"),
        alert_rules=str(folder / "rules.yaml"),
    )
    client = AgentClient(agent_url, timeout_seconds=60.0)

    def alerts() -> AlertList:
        return client.alerts()

    eventually(lambda: len(client.engines().engines) == 3, "the agent sees the engines")
    for pool in (gone, back):
        pool.process.kill()
        pool.process.wait()
    eventually(lambda: [one.state for one in alerts().open].count("firing") == 2, "both are said to be gone")
    shared_stage.pool("llama-c", 500)
    eventually(lambda: [one.labels["engine_id"] for one in alerts().recent] == ["llama-c"], "one of them is over")
    dashboard_url, _ = shared_stage.dashboard(agent_url)
    return {"steady": steady, "agent": agent_url, "dashboard": dashboard_url, "alerts": alerts}


def facts_of(card: Any) -> dict[str, str]:
    names, values = card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_says_what_the_api_says(
    scheme: str, world: dict[str, Any], window: Callable[..., Any], repository_root: Path, tmp_path: Path
) -> None:
    opened = window(world["dashboard"], color_scheme=scheme)
    page = opened.open(world["steady"].id, view="alerts")
    found: AlertList = world["alerts"]()
    (firing,) = [one for one in found.open if one.state == "firing"]
    card = page.locator(CARDS).filter(has_text=firing.summary)
    expect(card).to_have_count(1)
    facts = facts_of(card)
    assert facts["where"] == "llama-b.dp0.tp0.pp0.kv · model example-8b"
    assert facts["how bad"].startswith(firing.value_text)
    assert (facts["what it means"], facts["what to do"]) == (firing.meaning, firing.action)
    expect(card.locator("dd").nth(1)).to_contain_text(" UTC, ")
    expect(page.get_by_role("link", name="Open llama-b.dp0.tp0.pp0.kv")).to_be_visible()
    (over,) = found.recent
    row = page.locator(".st-key-view_alerts tr").filter(has_text=over.summary)
    expect(row).to_contain_text(over.reason)
    tiles = page.locator(".st-key-view_alerts .kv-tile")
    expect(tiles.nth(0).locator(".kv-value")).to_have_text("1")
    expect(tiles.nth(3).locator(".kv-value")).to_have_text("1")
    expect(page.locator(".st-key-view_alerts tr").filter(has_text="webhook")).to_contain_text("fails for")
    opened.check()
    age = card.locator("dd").nth(1).inner_text()
    expect(card.locator("dd").nth(1)).not_to_have_text(age)  # it has been refreshed, and is whole
    if scheme == "light":
        update = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
        folder = repository_root / "docs" / "images" if update else tmp_path
        page.screenshot(path=folder / "dashboard-alerts.png")
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    expect(card).to_be_visible()
    opened.check()


def test_every_view_says_that_an_alert_fires(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id)
    line = page.locator(".st-key-banners .kv-firing")
    expect(line).to_contain_text("1 alert fires · critical: Engine llama-b is gone")
    page.get_by_role("link", name="what to do").click()
    page.locator(CARDS).first.wait_for()
    assert f"pool={world['steady'].id}" in page.url
    expect(line).to_have_count(0)  # the view itself says it


def test_nothing_is_changed_without_the_token(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="alerts")
    expect(page.get_by_role("button", name="Use it")).to_be_visible()
    expect(page.get_by_role("button", name="Mute")).to_have_count(0)
    type_token(page, "not-the-token")
    page.get_by_role("button", name="Send it").click()
    expect(page.get_by_text("The agent refused: the bearer token is missing or wrong")).to_be_visible()
    assert world["alerts"]().mutes == []


def test_mutes_and_test_messages_with_the_token(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="alerts")
    type_token(page, TOKEN)
    page.get_by_role("textbox", name="Your name").fill("ann *bold*")
    page.get_by_role("textbox", name="Why").fill("a drill")
    choose(page, "Rule", "tail-waste")
    choose(page, "Engine", "llama-a")
    page.get_by_role("button", name="Mute").click()
    (made,) = wait_for(page, lambda: world["alerts"]().mutes)
    assert (made.rule, made.engine, made.author, made.comment) == ("tail-waste", "llama-a", "ann *bold*", "a drill")
    assert made.expires_unix - made.created_unix == 3600
    listed = page.locator(f".st-key-mute_{made.id}")
    expect(listed).to_contain_text("tail-waste at llama-a, for ")
    expect(listed).to_contain_text("by ann *bold*: a drill")
    opened.check()
    listed.get_by_role("button", name="End it").click()
    expect(page.get_by_text("Nothing is muted.")).to_be_visible()
    assert world["alerts"]().mutes == []

    choose(page, "Receiver", "log")
    page.get_by_role("button", name="Send it").click()
    expect(page.get_by_text("log took the message in")).to_be_visible()
    choose(page, "Receiver", "webhook")
    page.get_by_role("button", name="Send it").click()
    expect(
        page.get_by_text("webhook did not take the message (unreachable); the agent would try again")
    ).to_be_visible()

    assert TOKEN not in page.content()
    assert TOKEN not in page.url
    assert page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])").find(TOKEN) == -1
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("button", name="Use it")).to_be_visible()
    expect(page.get_by_role("button", name="Send it")).to_have_count(0)


def test_what_is_refused_need_not_be_typed_anew(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="alerts")
    page.locator("input[type=password]").fill("two words")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_text("That cannot be a token")).to_be_visible()
    expect(page.locator("input[type=password]")).to_have_value("")
    type_token(page, TOKEN)
    name, why = (page.get_by_role("textbox", name=name) for name in ("Your name", "Why"))
    name.fill("ann")
    why.fill("a drill")
    page.get_by_role("button", name="Mute").click()  # of no rule and no engine
    expect(page.get_by_text("The agent refused")).to_be_visible()
    expect(name).to_have_value("ann")
    expect(why).to_have_value("a drill")
    choose(page, "Rule", "tail-waste")
    page.get_by_role("button", name="Mute").click()
    expect(page.get_by_text("Muted: tail-waste")).to_be_visible()
    expect(name).to_have_value("")
    expect(why).to_have_value("")
    (made,) = world["alerts"]().mutes
    assert (made.author, made.comment) == ("ann", "a drill")
    page.locator(f".st-key-mute_{made.id}").get_by_role("button", name="End it").click()
    expect(page.get_by_text("Nothing is muted.")).to_be_visible()


def test_what_is_shown_can_be_taken_along(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="alerts")
    page.locator(CARDS).first.wait_for()
    with page.expect_download() as download:
        page.locator(".st-key-export_alerts").get_by_role("button", name="JSON").click()
    rows = json.loads(Path(download.value.path()).read_text())["rows"]
    found: AlertList = world["alerts"]()
    assert {row["fingerprint"] for row in rows} >= {one.fingerprint for one in found.recent}
    assert [row["label_engine_id"] for row in rows if row["state"] == "firing"] == ["llama-b"]


def test_without_an_answer_it_says_so(shared_stage: Any, window: Callable[..., Any]) -> None:
    agent_url, process = shared_stage.agent()
    dashboard_url, _ = shared_stage.dashboard(agent_url)
    opened = window(dashboard_url)
    page = opened.open(view="alerts")
    expect(page.get_by_text("No alert has ended since the agent started.")).to_be_visible()
    process.kill()
    process.wait()
    assert httpx.get(dashboard_url, timeout=60.0, trust_env=False).status_code == 200
    expect(page.locator(opened.ALERTS)).to_contain_text("Agent unreachable")
    expect(page.get_by_text("No alert has ended")).not_to_be_visible()


def type_token(page: Page, token: str) -> None:
    page.locator("input[type=password]").fill(token)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("button", name="Forget it")).to_be_visible()


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_role("combobox", name=label, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()


def wait_for(page: Page, condition: Callable[[], Any]) -> Any:
    """Ask until the answer is true, letting the page go on meanwhile."""
    for _ in range(600):
        if answer := condition():
            return answer
        page.wait_for_timeout(100)
    raise AssertionError("it did not come about in time")
