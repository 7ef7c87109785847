"""Banners: stopped, killed and sleeping engines, a stopped agent, a dead dashboard, seen in a real browser."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


# In each frame of the browser: does the banner stand while the lower page still shows what it showed before?
WATCH_FOR_OLD_NUMBERS = """history => {
    window.framesBefore = window.framesWithBanner = window.oldSeen = 0;
    const seen = selector => [...document.querySelectorAll(selector)].some(node => node.checkVisibility());
    const look = () => {
        const banner = document.querySelector(".st-key-banners")?.textContent.includes("Agent unreachable");
        const lower = seen(history) && seen(".st-key-lower .kv-table");
        if (!banner && lower) window.framesBefore += 1;
        if (banner) window.framesWithBanner += 1;
        if (banner && (seen(history) || seen(".st-key-lower .kv-table"))) window.oldSeen += 1;
        requestAnimationFrame(look);
    };
    look();
}"""


def test_banners_of_an_engine(stage: Any, window: Callable[..., Any]) -> None:
    pool = stage.pool("gamma", 300)
    pool.send("churn 5")
    agent_url, _ = stage.agent(interval_seconds="0.2", stall_seconds="1", stale_seconds="2")
    home, _ = stage.dashboard(agent_url)
    opened = window(home)
    page = opened.open(pool.id)
    alerts, figure = page.locator(opened.ALERTS), page.locator(opened.MAP)

    pool.send("stall")
    expect(alerts).to_contain_text("Stalled")
    expect(alerts).to_contain_text(f"py-spy dump --pid {pool.process.pid}")
    os.kill(pool.process.pid, signal.SIGSTOP)
    expect(alerts).to_contain_text(f"kill -CONT {pool.process.pid}")
    os.kill(pool.process.pid, signal.SIGCONT)
    expect(alerts).to_contain_text("py-spy dump")
    expect(page.locator(".st-key-map_box .kv-note")).to_contain_text("stalled, not the present")
    pool.send("hold")
    expect(alerts).to_have_count(0)

    os.kill(pool.process.pid, signal.SIGSTOP)
    expect(alerts).to_contain_text("Stale")
    os.kill(pool.process.pid, signal.SIGCONT)
    expect(alerts).to_have_count(0)

    pool.send("sleep")
    expect(alerts).to_contain_text("Sleeping")
    expect(figure).to_have_count(0)
    pool.send("wake")
    expect(alerts).to_have_count(0)
    expect(figure).to_have_count(1)

    pool.process.kill()
    expect(alerts).to_contain_text("Engine gone")
    expect(figure).to_have_count(0)


def test_a_stopped_agent_leaves_no_old_chart(stage: Any, window: Callable[..., Any]) -> None:
    home_agent = stage.agent(interval_seconds="0.2")
    home, _ = stage.dashboard(home_agent[0])
    opened = window(home)
    page = opened.open()
    alerts = page.locator(opened.ALERTS)
    expect(alerts).to_contain_text("No engine found")
    stage.pool("delta", 300).send("run")
    expect(alerts).to_have_count(0)
    expect(page.locator(opened.MAP)).to_have_count(1)
    expect(page.locator(opened.HISTORY)).to_be_visible()
    page.evaluate(WATCH_FOR_OLD_NUMBERS, opened.HISTORY)
    page.wait_for_function("() => window.framesBefore > 0")  # the watch does see them
    home_agent[1].terminate()
    expect(alerts).to_contain_text("Agent unreachable")
    page.wait_for_function("() => window.framesWithBanner > 3")
    assert page.evaluate("() => window.oldSeen") == 0
    expect(page.locator(opened.MAP)).to_have_count(0)
    expect(page.locator(opened.HISTORY)).to_have_count(0)
    stage.agent(port=httpx.URL(home_agent[0]).port, interval_seconds="0.2")
    expect(alerts).to_have_count(0)
    expect(page.locator(opened.MAP)).to_have_count(1)


def test_an_open_page_marks_its_charts_when_the_server_dies(stage: Any, window: Callable[..., Any]) -> None:
    pool = stage.pool("epsilon", 300)
    agent_url, _ = stage.agent()
    home, process = stage.dashboard(agent_url)
    opened = window(home, calm=False)  # the console tells of the lost connection
    opened.open(pool.id)
    opened.after_refreshes(1)
    process.kill()
    expect(opened.page.locator(f"{opened.MAP}.kvatlas-late .kvatlas-notice")).to_be_visible()
