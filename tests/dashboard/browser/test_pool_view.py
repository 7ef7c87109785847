"""The Pool view's choices: colours, whose blocks are lit, files, and how blocks live, against the agent's answers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from agent.client import AgentClient

pytestmark = pytest.mark.browser

NOTE = ".st-key-map_box .kv-note"


@pytest.fixture(scope="module")
def world(shared_stage: Any) -> dict[str, Any]:
    """A pool at rest, an agent and a dashboard: the agent's answers stay the same."""
    pool = shared_stage.pool("alpha", 9000)
    pool.send("churn 150")
    pool.send("hold")
    agent_url, _ = shared_stage.agent(interval_seconds="0.2")
    dashboard_url, _ = shared_stage.dashboard(agent_url)
    return {"pool": pool, "agent": agent_url, "dashboard": dashboard_url}


@pytest.fixture
def client(world: dict[str, Any]) -> Iterator[AgentClient]:
    with AgentClient(world["agent"], timeout_seconds=60) as made:
        yield made


def test_a_chosen_request_lights_its_blocks(
    world: dict[str, Any], window: Callable[..., Any], client: AgentClient
) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["pool"].id)
    opened.after_refreshes(1)
    plain = opened.picture()
    largest = client.requests(world["pool"].id).requests[0]
    cells = client.map(world["pool"].id, request=largest.request_id)
    assert cells.requested is not None
    page.locator(".kv-holders button").first.click()
    expect(page.locator(NOTE)).to_contain_text(
        f"lit: {sum(cells.requested):,} blocks that {largest.request_id} was first to hold, "
        f"in {sum(map(bool, cells.requested)):,} cells"
    )
    assert sum(cells.requested) == largest.exclusive_blocks  # of this pool: nothing is shared
    page.wait_for_url(f"**request={largest.request_id}*")
    opened.await_other_picture(plain)
    lit = opened.picture()
    chosen = page.locator(".kv-holders tr.kv-chosen")
    expect(chosen).to_have_count(1)
    expect(chosen.locator("button")).to_have_attribute("aria-pressed", "true")
    opened.check()
    # A link shows the same, and the keyboard gives it up.
    opened.open(world["pool"].id, request=largest.request_id)
    page.wait_for_function(
        f"lit => document.querySelector('{opened.PLOT}')?.layout?.images?.[0].source === lit", arg=lit
    )
    page.locator(".kv-give-up").focus()
    page.keyboard.press("Enter")
    expect(page.locator(NOTE)).not_to_contain_text("lit:")
    page.wait_for_function(
        f"plain => document.querySelector('{opened.PLOT}').layout.images[0].source === plain", arg=plain
    )
    assert "request=" not in page.url


def test_colours_are_chosen_and_kept(world: dict[str, Any], window: Callable[..., Any], client: AgentClient) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["pool"].id)
    opened.after_refreshes(1)
    box = page.locator(".st-key-colour_picker")
    for colour, words in (("References", "2"), ("Age", "< 1 min"), ("Owner", "others")):
        before = opened.picture()
        box.get_by_text(colour, exact=True).click()
        expect(page.locator(".kv-legend")).to_contain_text(words)
        opened.await_other_picture(before)
        page.wait_for_url(f"**colour={colour.lower()}*")
    cells = client.map(world["pool"].id)
    assert cells.owner is not None
    shown = page.locator(".kv-legend span").evaluate_all("all => all.map(one => one.title)")
    most = max(set(cells.owner) - {-1}, key=cells.owner.count)
    assert cells.owners[most] in shown
    opened.check()
    page.reload()
    expect(page.locator(".kv-legend")).to_contain_text("others")
    opened.after_refreshes(1)
    opened.check_keyboard()
    opened.to_view("time")
    expect(page.locator(".st-key-view_time")).not_to_be_empty()
    opened.to_view("pool")
    opened.after_refreshes(2)
    expect(page.locator(".kv-legend")).to_contain_text("others")
    assert "colour=owner" in page.url


def test_files_hold_what_is_shown(world: dict[str, Any], window: Callable[..., Any], client: AgentClient) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["pool"].id)
    opened.after_refreshes(1)
    cells = client.map(world["pool"].id)
    texts = {}
    for kind in ("CSV", "JSON"):
        with page.expect_download() as waiting:
            page.locator(".st-key-map_head").get_by_role("button", name=kind).click()
        texts[kind] = Path(waiting.value.path()).read_text(encoding="utf-8")
    rows = list(csv.DictReader(texts["CSV"].splitlines()))
    assert len(rows) == cells.cells
    for name, column in cells.counts.items():
        assert [int(row[name]) for row in rows] == column
    assert [int(row["first_block"]) for row in rows] == [i * cells.blocks_per_cell for i in range(cells.cells)]
    assert int(rows[-1]["last_block"]) == cells.total_blocks - 1
    whole = json.loads(texts["JSON"])
    assert whole["pool"] == world["pool"].id
    assert [row["references"] for row in whole["rows"]] == cells.references
    page.get_by_text("Pause", exact=True).click()
    expect(page.locator(opened.ALERTS).first).to_contain_text("Paused")
    with page.expect_download() as waiting:
        page.locator(f"{opened.MAP} .modebar-btn[aria-label*=PNG i]").click()
    assert waiting.value.suggested_filename == "kvatlas.png"
    assert Path(waiting.value.path()).read_bytes().startswith(b"\x89PNG")


def test_how_blocks_live_is_the_agent_s_word(
    world: dict[str, Any], window: Callable[..., Any], client: AgentClient
) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["pool"].id)
    profile = client.profile(world["pool"].id)
    assert profile.lifetime is not None
    assert profile.pages is not None
    parts = page.locator(".st-key-lives .kv-lives")
    expect(parts.nth(0)).to_contain_text(f"Residency{sum(profile.lifetime.counts):,} blocks")
    expect(parts.nth(3)).to_contain_text(f"{profile.pages.pages:,} of 2.00 MiB")
    expect(parts.nth(3)).to_contain_text(f"{profile.pages.free_pages:,} (")
    feet = (
        parts.nth(3)
        .locator(".kv-runs")
        .evaluate("node => [...node.querySelectorAll('i')].map(bar => Math.round(bar.getBoundingClientRect().bottom))")
    )
    assert len(feet) > 2
    assert max(feet) - min(feet) <= 1  # with a label or without, they stand on one line
    opened.check()
    page.set_viewport_size({"width": 1920, "height": 1080})
    opened.after_refreshes(1)
    opened.check()
