"""A real browser, and windows in it that must stay silent and ask nobody else for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

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
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield launched
        launched.close()


class Window:
    """One page, with what it said on its console and what it asked of other hosts. Names of its parts are selectors."""

    MAP = ".st-key-map_box .kvatlas-figure"
    PLOT = f"{MAP} .kvatlas-plot"
    HISTORY = ".st-key-history_box .kvatlas-figure"
    ALERTS = '.st-key-banners [data-testid="stAlert"]'

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

    def picture(self) -> str:
        """The picture of the block map, as a data URL."""
        source: str = self.evaluate("plot.layout.images[0].source")
        return source

    def await_other_picture(self, before: str) -> None:
        changed = f"before => document.querySelector('{self.PLOT}').layout.images[0].source !== before"
        self.page.wait_for_function(changed, arg=before)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in which `plot` is the block map's Plotly node."""
        return self.page.evaluate(f"() => {{ const plot = document.querySelector('{self.PLOT}'); return {script}; }}")

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.home, "data:", "blob:", self.home.replace("http", "ws", 1))):
            self.outside.append(url)


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
