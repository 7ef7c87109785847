"""The page as an operator has it: real pools, the real agent, the real dashboard, a real browser."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from agent.client import AgentClient
from dashboard.palette import DARK, LIGHT

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
MAP = ".st-key-map_box .kvatlas-figure"
PLOT = f"{MAP} .kvatlas-plot"
HISTORY = ".st-key-history_box .kvatlas-figure"
ALERTS = '.st-key-banners [data-testid="stAlert"]'
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
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield launched
        launched.close()


class Window:
    """One page, with what it said on its console and what it asked of other hosts."""

    def __init__(self, page: Page, home: str, *, calm: bool) -> None:
        self.page, self.home, self.calm = page, home, calm
        self.complaints: list[str] = []
        self.outside: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def open(self, pool: str = "") -> Page:
        self.page.goto(self.home + (f"?pool={pool}" if pool else ""))
        return self.page

    def drawn(self, figure: str = MAP) -> int:
        return int(self.page.locator(figure).get_attribute("data-drawn") or 0)

    def after_refreshes(self, refreshes: int, figure: str = MAP) -> None:
        """Wait until the figure was drawn that many times more."""
        before = self.drawn(figure)
        self.page.wait_for_function(
            "([figure, count]) => Number(document.querySelector(figure)?.dataset.drawn ?? 0) >= count",
            arg=[figure, before + refreshes],
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression in which `plot` is the block map's Plotly node."""
        return self.page.evaluate(f"() => {{ const plot = document.querySelector('{PLOT}'); return {script}; }}")

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.home, "data:", "blob:", self.home.replace("http", "ws", 1))):
            self.outside.append(url)


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


@pytest.fixture
def window(browser: Browser) -> Iterator[Callable[..., Window]]:
    """Opens windows; at the end none may have complained or asked another host for anything."""
    windows: list[Window] = []

    def open_window(home: str, *, calm: bool = True, **options: Any) -> Window:
        """`calm`: the console must stay silent."""
        options = {"viewport": {"width": 1280, "height": 900}} | options
        windows.append(Window(browser.new_page(**options), home, calm=calm))
        return windows[-1]

    yield open_window
    for opened in windows:
        opened.page.close()
    assert [w.outside for w in windows if w.outside] == []
    assert [w.complaints for w in windows if w.calm and w.complaints] == []


def picture(window: Window) -> str:
    source: str = window.evaluate("plot.layout.images[0].source")
    return source


def test_the_map_is_there_and_follows_the_pool(world: dict[str, Any], window: Callable[..., Window]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id)
    expect(page.locator(f"{PLOT} .heatmaplayer image")).to_have_count(1)
    expect(page.locator(f"{PLOT} .layer-below image, {PLOT} .imagelayer image").first).to_be_visible()
    expect(page.locator(".kv-tile")).to_have_count(8)
    expect(page.locator(".kv-states")).to_contain_text("cached")
    expect(page.locator(f"{HISTORY} .scatterlayer .trace")).not_to_have_count(0)
    expect(page.get_by_text("Paged attention needs no contiguity")).to_be_visible()
    first = picture(opened)
    page.wait_for_function(f"before => document.querySelector('{PLOT}').layout.images[0].source !== before", arg=first)


def test_a_recorded_trace_is_watched_live(
    stage: Any, window: Callable[..., Window], eventually: Eventually, tmp_path: Path, repository_root: Path
) -> None:
    """The reference engine serves a trace; every state occurs. With KVATLAS_UPDATE_SCREENSHOTS=1 it is the README's
    picture, once there are some minutes to be seen."""
    update = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
    transfers = ["--transfer-dir", str(tmp_path), "--transfer-every", "4", "--transfer-rate", "4000000"]
    size = ["--blocks", "16000", "--model-geometry", "stories260K", "--speed", "2" if update else "6"]
    pool = stage.engine("demo-vllm", "--trace", "mooncake-conversation", *size, *transfers)
    agent_url, _ = stage.agent()
    home, _ = stage.dashboard(agent_url)
    opened = window(home)
    page = opened.open(pool)
    opened.after_refreshes(1)
    first = picture(opened)
    with AgentClient(agent_url) as client:
        seen: set[str] = set()

        def every_state_was_seen() -> bool:
            seen.update(name for name, blocks in client.engine(pool).blocks.model_dump().items() if blocks)
            return seen >= {"free", "cached", "used", "pinned", "reserved"}

        eventually(every_state_was_seen, "each of the five states occurs", 120)
        assert picture(opened) != first
        if update:
            eventually(lambda: len(measured(client, pool)) > 200, "some minutes have passed", 300)
            eventually(lambda: client.engine(pool).blocks.pinned, "something is in transfer", 120)
    expect(page.locator(ALERTS)).to_have_count(0)
    opened.after_refreshes(1)
    folder = repository_root / "docs" / "images" if update else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({"width": 1280, "height": 980})
    opened.after_refreshes(1)
    page.screenshot(path=folder / "dashboard.png")


def measured(client: AgentClient, pool: str) -> list[float]:
    points = client.history(pool, "fragmentation", 300, points=300).points
    return [point.mean for point in points if point.mean is not None]


def test_zoom_and_node_outlive_refreshes(world: dict[str, Any], window: Callable[..., Window]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["large"].id)
    opened.after_refreshes(1)
    whole = opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)")
    opened.evaluate("plot.markedByTest = true")
    opened.evaluate("(plot.querySelector('.main-svg').markedByTest = true)")
    box = page.locator(f"{PLOT} .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"], steps=6)
    page.mouse.up()
    zoomed = opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)")
    assert zoomed != whole
    before = picture(opened)
    page.evaluate(WATCH_FOR_FLICKER, PLOT)
    opened.after_refreshes(5)
    assert picture(opened) != before
    assert page.evaluate("() => window.flickerSeen") == []
    page.locator(MAP).evaluate("node => { node.style.opacity = 0.5; }")
    page.wait_for_function("() => window.flickerSeen.includes('faded')")  # the watch does see
    page.locator(MAP).evaluate("node => { node.style.opacity = ''; }")
    assert opened.evaluate("plot._fullLayout.xaxis.range.concat(plot._fullLayout.yaxis.range)") == zoomed
    assert opened.evaluate("plot.markedByTest && plot.querySelector('.main-svg').markedByTest")
    page.mouse.dblclick(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function(
        f"""whole => {{ const layout = document.querySelector('{PLOT}')._fullLayout;
        return JSON.stringify(layout.xaxis.range.concat(layout.yaxis.range)) === whole; }}""",
        arg=page.evaluate("whole => JSON.stringify(whole)", whole),
    )


@pytest.mark.parametrize("which", ["small", "large"])
def test_hover_equals_the_blocks(which: str, world: dict[str, Any], window: Callable[..., Window]) -> None:
    pool = world[which]
    pool.send("hold")
    try:
        opened = window(world["dashboard"])
        page = opened.open(pool.id)
        opened.after_refreshes(3)  # whatever was under way when the pool came to rest has been shown by now
        with AgentClient(world["agent"]) as client:
            for cell in (0, 1, 130, 700):
                hovered = hover(opened, page, cell)
                compare(hovered, client, pool.id)
    finally:
        pool.send("run")


def hover(opened: Window, page: Page, cell: int) -> str:
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
    said = page.locator(f"{PLOT} .hoverlayer .hovertext")
    expect(said).to_have_count(1)
    return "\n".join(said.locator("tspan.line").all_text_contents())


def compare(hovered: str, client: AgentClient, pool: str) -> None:
    """The hover against every block that it is about."""
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
        assert {name: number for name, number in mix.items() if number} == {s: states.count(s) for s in set(states)}
        owners = [block.owner for block in blocks if block.owner]
        owner = re.search(r"owner of most: (\S+)", hovered)
        assert owner is not None
        most = max((owners.count(name) for name in set(owners)), default=0)
        assert owners.count(owner[1]) == most
        assert owner[1] != "nobody" or most == 0
        assert f"highest reference count {max(block.references or 0 for block in blocks)}" in hovered
    shown = re.search(r"(?:last touched|most recent touch) (?:(\d+) min ?)?(?:([\d.]+) s)? ago", hovered)
    assert shown is not None
    age = 60 * int(shown[1] or 0) + float(shown[2] or 0)
    # The page asked up to one refresh earlier, and shows whole seconds beyond ten.
    assert min(block.age_seconds or 0 for block in blocks) - 5 <= age <= min(b.age_seconds or 0 for b in blocks) + 1.5


def test_the_picker_keeps_its_choice(world: dict[str, Any], window: Callable[..., Window]) -> None:
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
    world: dict[str, Any], window: Callable[..., Window], eventually: Eventually
) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["small"].id)
    opened.after_refreshes(1)
    page.get_by_text("Pause", exact=True).click()
    expect(page.locator(ALERTS)).to_contain_text("Paused")
    with AgentClient(world["agent"]) as client:

        def let_the_pool_go_on() -> None:
            published = client.map(world["small"].id, cells=1).sequence
            eventually(lambda: client.map(world["small"].id, cells=1).sequence > published + 30, "the pool goes on")

        let_the_pool_go_on()  # the map of the refresh that brought the banner has been drawn by now
        before = picture(opened)
        let_the_pool_go_on()
    assert picture(opened) == before
    page.get_by_text("Pause", exact=True).click()
    opened.after_refreshes(2)
    expect(page.locator(ALERTS)).to_have_count(0)
    assert picture(opened) != before


def test_banners_of_an_engine(stage: Any, window: Callable[..., Window]) -> None:
    pool = stage.pool("gamma", 300)
    pool.send("churn 5")
    agent_url, _ = stage.agent(interval_seconds="0.2", stall_seconds="1", stale_seconds="2")
    home, _ = stage.dashboard(agent_url)
    opened = window(home)
    page = opened.open(pool.id)
    alerts, figure = page.locator(ALERTS), page.locator(MAP)

    pool.send("stall")
    expect(alerts).to_contain_text("Stalled")
    expect(page.locator(".kv-heading").first).to_contain_text("stalled, not the present")
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


def test_a_stopped_agent_leaves_no_old_chart(stage: Any, window: Callable[..., Window]) -> None:
    home_agent = stage.agent(interval_seconds="0.2")
    home, _ = stage.dashboard(home_agent[0])
    opened = window(home)
    page = opened.open()
    alerts = page.locator(ALERTS)
    expect(alerts).to_contain_text("No engine found")
    stage.pool("delta", 300).send("run")
    expect(alerts).to_have_count(0)
    expect(page.locator(MAP)).to_have_count(1)
    home_agent[1].terminate()
    expect(alerts).to_contain_text("Agent unreachable")
    expect(page.locator(MAP)).to_have_count(0)
    expect(page.locator(HISTORY)).to_have_count(0)
    stage.agent(port=httpx.URL(home_agent[0]).port, interval_seconds="0.2")
    expect(alerts).to_have_count(0)
    expect(page.locator(MAP)).to_have_count(1)


def test_an_open_page_marks_its_charts_when_the_server_dies(
    stage: Any, world: dict[str, Any], window: Callable[..., Window]
) -> None:
    home, process = stage.dashboard(world["agent"])
    opened = window(home, calm=False)  # the console tells of the lost connection
    opened.open(world["small"].id)
    opened.after_refreshes(1)
    process.kill()
    expect(opened.page.locator(f"{MAP}.kvatlas-late .kvatlas-notice")).to_be_visible()


def test_a_base_path_is_kept(stage: Any, world: dict[str, Any], window: Callable[..., Window]) -> None:
    home, _ = stage.dashboard(world["agent"], base_path="mem")
    assert home.endswith("/mem/")
    opened = window(home)
    opened.open(world["small"].id)
    opened.after_refreshes(1)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_fit_the_screen(
    scheme: str, width: int, height: int, world: dict[str, Any], window: Callable[..., Window], tmp_path: Path
) -> None:
    opened = window(world["dashboard"], viewport={"width": width, "height": height}, color_scheme=scheme)
    page = opened.open(world["large"].id)
    opened.after_refreshes(2)
    opened.after_refreshes(1, HISTORY)
    theme = DARK if scheme == "dark" else LIGHT
    swatch = page.locator(".kv-states i").first.evaluate("node => getComputedStyle(node).backgroundColor")
    assert swatch == "rgb({}, {}, {})".format(*bytes.fromhex(theme.states["used"][1:]))
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
    edges = page.locator(".kv-table").evaluate_all("tables => tables.map(t => t.getBoundingClientRect().right)")
    assert max(edges) <= width
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png")
