"""A real browser, and windows in it that must stay silent and ask nobody else for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, TimeoutError, expect, sync_playwright

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
PATIENCE_MS = 120_000
CHECKS = Path(__file__).with_name("checks.js")
MOST_TAB_STOPS = 200
TAB_STOPS_KNOWN = 3
SETTLED_MS = 60_000
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

    def open(self, pool: str = "", **address: str) -> Page:
        """A view of a pool: `address` is the rest of the query, such as view="requests"."""
        query = ({"pool": pool} if pool else {}) | address
        self.page.goto(self.home + (f"?{urlencode(query)}" if query else ""))
        return self.page

    def to_view(self, name: str) -> None:
        """Choose a view in the header, and wait until it is the one that is shown."""
        self.page.locator(".st-key-view_picker").get_by_text(name.capitalize(), exact=True).click()
        self.page.locator(f".st-key-view_{name}").wait_for()

    def check(self) -> None:
        """What every view must hold as it stands now: no text cut off, nothing beside the window, contrast of 4.5."""
        self.page.mouse.move(0, 0)  # what the mouse is over has colours of its own for as long
        self._load_checks()
        self._expect_none("clipped()")
        self._expect_none("faint()")

    def check_keyboard(self) -> None:
        """All that a pointer can operate is reached by the Tab key (in a group: its members by arrow keys)."""
        self._load_checks()
        self.page.evaluate("() => { document.activeElement?.blur(); getSelection().removeAllRanges(); }")
        known = (
            0  # presses in a row that led to nothing new: a refresh may take the focus once, the page's end comes too
        )
        for _ in range(MOST_TAB_STOPS):
            self.page.keyboard.press("Tab")
            known = 0 if self.page.evaluate("() => kvatlasChecks.step()") else known + 1
            if known >= TAB_STOPS_KNOWN and not self._found("unreached()"):
                break
        assert self._found("unreached()") == []

    def _expect_none(self, check: str) -> None:
        """What a check finds while something changes, as a colour in transition, is gone a moment later."""
        with suppress(TimeoutError):
            self.page.wait_for_function(f"() => kvatlasChecks.{check}.length === 0", timeout=SETTLED_MS, polling=250)
        assert self._found(check) == []

    def _found(self, check: str) -> list[str]:
        self._load_checks()
        found: list[str] = self.page.evaluate(f"() => kvatlasChecks.{check}")
        return found

    def _load_checks(self) -> None:
        if not self.page.evaluate("() => 'kvatlasChecks' in window"):
            self.page.evaluate(CHECKS.read_text(encoding="utf-8"))

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
