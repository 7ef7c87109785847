"""The page as an operator has it: real pools, the real agent, the real dashboard, a real browser."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from agent.client import AgentClient
from agent.wire import ENDED_OWNER
from dashboard.palette import DARK, LIGHT

pytestmark = pytest.mark.browser

# In each frame of the browser: is the map still there, opaque, at its size, and does it hold a picture?
WATCH_FOR_FLICKER = """selector => {
    window.flickerSeen = [];
    const height = document.querySelector(selector).clientHeight;
    const look = () => {
        const plot = document.querySelector(selector);
        if (!plot) window.flickerSeen.push("gone");
        else {
            for (let node = plot; node; node = node.parentElement)
                if (getComputedStyle(node).opacity !== "1") window.flickerSeen.push("faded");
            if (plot.clientHeight !== height) window.flickerSeen.push("resized");
            if (!plot.querySelector("image[*|href^='data:image/png']")) window.flickerSeen.push("empty");
        }
        requestAnimationFrame(look);
    };
    look();
}"""
Eventually = Callable[..., Any]


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


def test_the_map_is_there_and_follows_the_pool(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id)
    expect(page.locator(f"{opened.PLOT} .heatmaplayer image")).to_have_count(1)
    expect(page.locator(f"{opened.PLOT} .layer-below image, {opened.PLOT} .imagelayer image").first).to_be_visible()
    expect(page.locator(".kv-tile")).to_have_count(8)
    expect(page.locator(".kv-states")).to_contain_text("cached")
    expect(page.locator(f"{opened.HISTORY} .scatterlayer .trace")).not_to_have_count(0)
    expect(page.get_by_text("Paged attention needs no contiguity")).to_be_visible()
    first = opened.picture()
    opened.await_other_picture(first)


def test_a_recorded_trace_is_watched_live(
    stage: Any, window: Callable[..., Any], eventually: Eventually, tmp_path: Path, repository_root: Path
) -> None:
    """The reference engine serves a trace; every state occurs. With KVATLAS_UPDATE_SCREENSHOTS=1 it is the README's
    picture, once there are some minutes to be seen."""
    update = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
    transfers = ["--transfer-dir", str(tmp_path), "--transfer-every", "8", "--transfer-rate", "8000000"]
    size = ["--blocks", "91200" if update else "16000", "--speed", "1.5" if update else "6"]
    size += ["--model-geometry", "stories260K"]
    pool = stage.engine("demo-vllm", "--policy", "vllm", "--trace", "mooncake-conversation", *size, *transfers)
    agent_url, _ = stage.agent(compaction="off")  # the picture is of a pool that nobody mends
    home, _ = stage.dashboard(agent_url)
    opened = window(home)
    page = opened.open(pool)
    opened.after_refreshes(1)
    first = opened.picture()
    with AgentClient(agent_url, timeout_seconds=60) as client:
        seen: set[str] = set()

        def every_state_was_seen() -> bool:
            seen.update(name for name, blocks in client.engine(pool).blocks.model_dump().items() if blocks)
            return seen >= {"free", "cached", "used", "pinned", "reserved"}

        eventually(every_state_was_seen, "each of the five states occurs", 120)
        opened.await_other_picture(first)
        if update:
            eventually(lambda: len(measured(client, pool)) > 160, "some minutes have passed", 300)
            page.set_viewport_size({"width": 1280, "height": 960})
            eventually(lambda: client.engine(pool).blocks.pinned > 2000, "much is in transfer", 120)
    expect(page.locator(opened.ALERTS)).to_have_count(0)
    opened.after_refreshes(1)
    folder = repository_root / "docs" / "images" if update else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / "dashboard.png")


def measured(client: AgentClient, pool: str) -> list[float]:
    points = client.history(pool, "fragmentation", 300, points=300).points
    return [point.mean for point in points if point.mean is not None]


def test_zoom_and_node_outlive_refreshes(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["large"].id)
    opened.after_refreshes(1)
    whole = opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)")
    opened.evaluate("plot.markedByTest = true")
    opened.evaluate("(plot.querySelector('.main-svg').markedByTest = true)")
    box = page.locator(f"{opened.PLOT} .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"], steps=6)
    page.mouse.up()
    zoomed = opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)")
    assert zoomed != whole
    before = opened.picture()
    page.evaluate(WATCH_FOR_FLICKER, opened.PLOT)
    opened.after_refreshes(5)
    assert opened.picture() != before
    assert page.evaluate("() => window.flickerSeen") == []
    page.locator(opened.MAP).evaluate("node => { node.style.opacity = 0.5; }")
    page.wait_for_function("() => window.flickerSeen.includes('faded')")  # the watch does see
    page.locator(opened.MAP).evaluate("node => { node.style.opacity = ''; }")
    assert opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)") == zoomed
    assert opened.evaluate("plot.markedByTest && plot.querySelector('.main-svg').markedByTest")
    page.mouse.dblclick(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function(
        f"""whole => {{ const layout = document.querySelector('{opened.PLOT}')._fullLayout;
        return JSON.stringify(layout.xaxis.range.concat(layout.yaxis.range)) === whole; }}""",
        arg=page.evaluate("whole => JSON.stringify(whole)", whole),
    )


@pytest.mark.parametrize("which", ["small", "large"])
def test_hover_equals_the_blocks(
    which: str, world: dict[str, Any], window: Callable[..., Any], eventually: Eventually
) -> None:
    pool = world[which]
    pool.send("hold")
    try:
        opened = window(world["dashboard"])
        page = opened.open(pool.id)
        with AgentClient(world["agent"], timeout_seconds=60) as client:
            eventually(lambda: client.engine(pool.id).running_requests == 0, "the agent has seen the pool come to rest")
            ages = client.map(pool.id).age_seconds
            assert ages is not None
            opened.after_refreshes(3)  # what was under way then has been shown by now: what is shown is no younger
            for cell in (0, 1, 130, 700):
                hovered = hover(opened, page, cell)
                compare(hovered, client, pool.id, ages[cell])
    finally:
        pool.send("run")


def hover(opened: Any, page: Page, cell: int) -> str:
    """What the page says over the middle of a cell."""
    x, y, width = opened.evaluate(
        f"""(() => {{ const layout = plot._fullLayout, columns = plot.layout.images[0].sizex;
        const box = plot.getBoundingClientRect(), cell = {cell};
        return [box.left + layout.xaxis._offset + layout.xaxis.l2p(cell % columns),
                box.top + layout.yaxis._offset + layout.yaxis.l2p(Math.floor(cell / columns)), columns]; }})()"""
    )
    assert width == 64
    page.mouse.move(x - 1, y)
    page.mouse.move(x, y)
    said = page.locator(f"{opened.PLOT} .hoverlayer .hovertext")
    expect(said).to_have_count(1)
    return "\n".join(said.locator("tspan.line").all_text_contents())


def compare(hovered: str, client: AgentClient, pool: str, youngest: float) -> None:
    """The hover against every block that it is about; its age is between `youngest` and that of now."""
    first, last = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", hovered)[:2])
    if hovered.startswith("block "):
        last = first
    blocks = client.blocks(pool, first, last - first + 1).blocks
    states = [block.state for block in blocks]
    if hovered.startswith("block "):
        assert f": {states[0]}\n" in hovered
        assert f"owner {blocks[0].owner or 'nobody'}\n" in hovered
        assert f"references {blocks[0].references}" in hovered
    else:
        mix = {name: int(number) for name, number in re.findall(r"(used|pinned|reserved|cached|free) (\d+)", hovered)}
        assert mix == {s: states.count(s) for s in set(states)}
        owners = [block.owner for block in blocks if block.owner]
        owner = re.search(r"owner of most: (.+)", hovered)
        assert owner is not None
        most = max((owners.count(name) for name in set(owners) - {ENDED_OWNER}), default=0)
        if owner[1] == ENDED_OWNER:  # a name that many may share
            assert owners.count(ENDED_OWNER) >= max(most, 1)
        else:
            assert owners.count(owner[1]) == most
        assert owner[1] != "nobody" or not owners
        assert f"highest reference count {max(block.references or 0 for block in blocks)}" in hovered
    shown = re.search(r"(?:last touched|most recent touch) (?:(\d+) min ?)?(?:([\d.]+) s)? ago", hovered)
    assert shown is not None
    age = 60 * int(shown[1] or 0) + float(shown[2] or 0)
    # The page shows whole seconds beyond ten.
    assert youngest - 1.5 <= age <= min(block.age_seconds or 0 for block in blocks) + 1.5


def test_the_picker_keeps_its_choice(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open()
    opened.after_refreshes(1)
    page.get_by_role("combobox").click()
    page.get_by_role("option", name=world["large"].id).click()
    expect(page.locator(".kv-identity")).to_contain_text("40,000 blocks")
    page.wait_for_url(f"**pool={world['large'].id}*")
    opened.after_refreshes(3)
    expect(page.locator(".kv-identity")).to_contain_text("40,000 blocks")
    page.reload()
    expect(page.locator(".kv-identity")).to_contain_text("40,000 blocks")


def test_paused_stands_still_and_goes_on(
    world: dict[str, Any], window: Callable[..., Any], eventually: Eventually
) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id)
    opened.after_refreshes(1)
    page.get_by_text("Pause", exact=True).click()
    expect(page.locator(opened.ALERTS)).to_contain_text("Paused")
    with AgentClient(world["agent"], timeout_seconds=60) as client:

        def let_the_pool_go_on() -> None:
            published = client.map(world["small"].id, cells=1).sequence
            eventually(lambda: client.map(world["small"].id, cells=1).sequence > published + 30, "the pool goes on")

        let_the_pool_go_on()  # the map of the refresh that brought the banner has been drawn by now
        before = opened.picture()
        let_the_pool_go_on()
    assert opened.picture() == before
    page.get_by_text("Pause", exact=True).click()
    opened.after_refreshes(2)
    expect(page.locator(opened.ALERTS)).to_have_count(0)
    assert opened.picture() != before


def test_a_base_path_is_kept(stage: Any, world: dict[str, Any], window: Callable[..., Any]) -> None:
    home, _ = stage.dashboard(world["agent"], base_path="mem")
    assert home.endswith("/mem/")
    opened = window(home)
    opened.open(world["small"].id)
    opened.after_refreshes(1)


def test_the_wheel_scrolls_the_page_and_no_drag_leaves_the_pool(
    world: dict[str, Any], window: Callable[..., Any]
) -> None:
    opened = window(world["dashboard"], viewport={"width": 1280, "height": 600})
    page = opened.open(world["small"].id)
    opened.after_refreshes(1)
    ranges = "JSON.stringify([plot._fullLayout.xaxis.range, plot._fullLayout.yaxis.range])"
    whole = opened.evaluate(ranges)
    box = page.locator(f"{opened.PLOT} .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, 300)
    page.wait_for_function("top => document.querySelector('.kv-title').getBoundingClientRect().top < top", arg=-100)
    assert opened.evaluate(ranges) == whole
    page.mouse.wheel(0, -300)
    page.wait_for_function("() => document.querySelector('.kv-title').getBoundingClientRect().top > 0")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(f"{opened.PLOT} [data-val=pan]").click()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 300, steps=6)
    page.mouse.up()
    (left, right), (bottom, top) = json.loads(opened.evaluate(ranges))
    (_, columns), (rows, _) = json.loads(whole)
    assert -0.5 <= left < right <= columns
    assert rows >= bottom > top >= -0.5


@pytest.mark.parametrize(("width", "height"), [(800, 1000), (1280, 900), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_fit_the_screen(
    scheme: str, width: int, height: int, world: dict[str, Any], window: Callable[..., Any], tmp_path: Path
) -> None:
    opened = window(world["dashboard"], viewport={"width": width, "height": height}, color_scheme=scheme)
    page = opened.open(world["large"].id)
    opened.after_refreshes(2)
    opened.after_refreshes(1, opened.HISTORY)
    theme = DARK if scheme == "dark" else LIGHT
    used = "rgb({}, {}, {})".format(*bytes.fromhex(theme.states["used"][1:]))
    expect(page.locator(".kv-states i").first).to_have_css("background-color", used)  # asks again: refreshes go on
    ground = page.locator(".stApp").evaluate("node => getComputedStyle(node).backgroundColor")
    red = int(re.findall(r"\d+", ground)[0])
    assert red < 60 if scheme == "dark" else red > 230
    clipped = page.evaluate(
        """() => [...document.querySelectorAll('.kv-value, .kv-label, .kv-detail, .kv-table td, .kv-identity')]
        .filter(node => node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 2)
        .map(node => node.textContent)"""
    )
    assert clipped == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    edges = page.evaluate("() => [...document.querySelectorAll('.kv-table')].map(t => t.getBoundingClientRect().right)")
    assert max(edges) <= width
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png")
