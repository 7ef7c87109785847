"""Every view in a real browser: what must hold of all of them, and what the address says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from dashboard.header import VIEWS

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def world(shared_stage: Any) -> dict[str, Any]:
    """Two pools that serve, an agent and a dashboard."""
    small, large = shared_stage.pool("alpha", 2500), shared_stage.pool("beta", 40_000)
    for pool in (small, large):
        pool.send("churn 120")
        pool.send("run")
    agent_url, _ = shared_stage.agent(interval_seconds="0.5")
    dashboard_url, _ = shared_stage.dashboard(agent_url)
    return {"small": small, "large": large, "agent": agent_url, "dashboard": dashboard_url}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_header_and_the_pool_are_for_every_reader(
    scheme: str, world: dict[str, Any], window: Callable[..., Any]
) -> None:
    opened = window(world["dashboard"], color_scheme=scheme)
    page = opened.open(world["large"].id)
    opened.after_refreshes(1)
    opened.check()
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.after_refreshes(2)
    opened.check()


def test_the_checks_do_see(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id)
    opened.after_refreshes(1)
    page.evaluate(
        """() => document.querySelector(".stApp").insertAdjacentHTML("afterbegin", `
        <p style="width: 3em; overflow: hidden; white-space: nowrap">This is too long to be seen</p>
        <p style="color: #999">This is too faint</p><p style="opacity: 0.5">So is this</p>
        <button tabindex="-1">Nobody reaches this</button>`)"""
    )
    for check, seen in (("clipped", "too long"), ("faint", "too faint"), ("faint", "So is"), ("unreached", "Nobody")):
        assert any(seen in found for found in opened._found(f"{check}()")), check


def test_views_keep_the_pool_and_links_lead_to_them(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id, time="1700000000", filter="request")
    opened.after_refreshes(1)
    for view in VIEWS:
        opened.to_view(view)
        page.wait_for_url(lambda url, view=view: (f"view={view}" in url) != (view == "pool"))
        assert f"pool={world['small'].id}" in page.url
        assert "time=1700000000" in page.url
        assert "filter=request" in page.url
        expect(page.locator('[data-testid="stException"]')).to_have_count(0)
    page.goto(f"{opened.home}?view=requests&pool={world['large'].id}")
    page.locator(".st-key-view_requests").wait_for()
    expect(page.get_by_role("combobox", name="Pool")).to_have_value(world["large"].id)
