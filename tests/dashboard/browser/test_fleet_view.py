"""The Fleet view: pools of several agents, and the way from a card to its pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from agent.client import AgentClient

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def world(shared_stage: Any) -> dict[str, Any]:
    """Pools at rest, two agents that see them, one that does not answer, and a dashboard of all three."""
    pools = [shared_stage.pool("first", 600), shared_stage.pool("second", 9000, "lowest-free")]
    for pool in pools:
        pool.send("churn 60")
        pool.send("hold")
    urls = [shared_stage.agent(interval_seconds="0.2")[0] for _ in range(2)]
    home, _ = shared_stage.dashboard(",".join([*urls, "http://127.0.0.1:9"]))
    return {"pools": pools, "agents": urls, "dashboard": home}


def test_a_card_leads_to_its_pool(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(view="fleet")
    cards = page.locator(".kv-card")
    expect(cards).to_have_count(4)
    with AgentClient(world["agents"][1], timeout_seconds=60) as client:
        engines = {engine.id: engine for engine in client.engines().engines}
    rates = {id: engine.fragmentation.rate or 0.0 for id, engine in engines.items()}
    worst = max(rates, key=lambda id: rates[id])
    expect(cards.first).to_contain_text(worst)  # at rest, the most fragmented
    expect(cards.first).to_contain_text(f"F {rates[worst]:.3f}")
    expect(page.locator(".st-key-view_fleet [data-testid=stAlert]")).to_contain_text("1 of 3 sources does not answer")
    opened.check()
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.check()
    second = world["pools"][1]
    mine = page.locator(f'.kv-card[data-choice="2 {second.id}"]')
    mine.focus()
    page.keyboard.press("Enter")
    page.locator(".st-key-view_pool").wait_for()
    opened.after_refreshes(1)
    expect(page.locator(".kv-identity")).to_contain_text("9,000 blocks")
    page.wait_for_url(lambda url: f"pool={second.id}" in url and "agent=2" in url and "view=" not in url)
    expect(page.locator(".st-key-banners [data-testid=stAlert]")).to_have_count(0)


def test_a_picture_of_the_fleet(
    world: dict[str, Any],
    window: Callable[..., Any],
    eventually: Callable[..., Any],
    tmp_path: Path,
    repository_root: Path,
) -> None:
    """With KVATLAS_UPDATE_SCREENSHOTS=1 it is the one in docs, once the lines have some minutes."""
    update = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
    opened = window(world["dashboard"], viewport={"width": 1280, "height": 400})
    page = opened.open(view="fleet")
    expect(page.locator(".kv-card")).to_have_count(4)
    if update:
        for pool in world["pools"]:
            pool.send("run")
        lines = "[...document.querySelectorAll('.kv-spark polyline')].map(one => one.points.length)"
        eventually(lambda: min(page.evaluate(lines), default=0) > 12, "lines have some minutes", 600)
        for pool in world["pools"]:
            pool.send("hold")
    folder = repository_root / "docs" / "images" if update else tmp_path
    page.screenshot(path=folder / "dashboard-fleet.png")


def test_the_filter_is_in_the_address(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"], color_scheme="dark")
    page = opened.open(view="fleet")
    expect(page.locator(".kv-card")).to_have_count(4)
    page.locator(".st-key-pools_filter input").fill("second")
    page.keyboard.press("Enter")
    expect(page.locator(".kv-card")).to_have_count(2)
    page.wait_for_url("**pools=second*")
    opened.check()
    page.reload()
    expect(page.locator(".kv-card")).to_have_count(2)
