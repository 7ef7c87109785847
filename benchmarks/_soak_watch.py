"""What watches a soak: each watcher has a thread of its own and writes down what it sees, judging nothing."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
from playwright.sync_api import ConsoleMessage, Error, sync_playwright

from benchmarks._soak_world import World

BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
USAGE_SECONDS, SCRAPE_SECONDS, GATHER_SECONDS, ASK_SECONDS = 2.0, 5.0, 15.0, 10.0
REACH_SECONDS = 3.0  # what is younger may not be sampled yet


class Watch:
    """Threads that end with the soak. A fault of a watcher is kept, and ends the soak with no verdict."""

    def __init__(self) -> None:
        self.leaving = threading.Event()
        self.faults: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - of the soak's own code: told at the end instead of a verdict
                self.faults.append(f"{work.__qualname__}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()

    def every(self, seconds: float, look: Callable[[], None]) -> None:
        """Look each so many seconds until the end."""

        def run() -> None:
            while not self.leaving.wait(seconds):
                look()

        run.__qualname__ = look.__qualname__
        self.start(run)

    def end(self) -> None:
        self.leaving.set()
        for thread in self._threads:
            thread.join(60)


def ask(port: int, method: str, path: str, body: Any = None, seconds: float = 15.0) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own; 0 where there was no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {} if text is None else {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


class Usage:
    """Memory, descriptors, threads and CPU of the two processes of ours."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: dict[str, list[list[float]]] = {"agent": [], "dashboard": []}

    def look(self) -> None:
        for name, process in (("agent", self._world.agent), ("dashboard", self._world.dashboard)):
            try:
                assert process is not None
                with process.oneshot():
                    cpu = process.cpu_times()
                    row = [process.memory_info().rss, process.num_fds(), process.num_threads(), cpu.user + cpu.system]
            except psutil.NoSuchProcess:
                continue  # it was killed a moment ago
            self.rows[name].append([self._world.clock.now(), *row])


class Scraper:
    """Prometheus, as far as the agent can tell: one kept connection, a scrape each SCRAPE_SECONDS."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.scrapes: list[list[float]] = []

    def look(self) -> None:
        at, began = self._world.clock.now(), time.perf_counter()
        status, _ = ask(self._world.agent_port, "GET", "/metrics", seconds=10)
        self.scrapes.append([at, status, (time.perf_counter() - began) * 1e3])


class Samples:
    """Of which seconds the agent's history has samples, gathered as the soak goes on."""

    def __init__(self, world: World, engines: Sequence[str]) -> None:
        self._world = world
        self.times: dict[str, set[float]] = {engine: set() for engine in engines}
        self._seen: dict[str, float] = dict.fromkeys(engines, 0.0)

    def look(self) -> None:
        for engine in self.times:
            now = self._world.clock.now()
            found = self.between(engine, self._seen[engine], now)
            if found is not None:
                self.times[engine] |= found
                self._seen[engine] = max(self._seen[engine], now - 2 * GATHER_SECONDS)

    def between(self, engine: str, start: float, end: float) -> set[float] | None:
        """Seconds of the soak with a sample; None where the agent does not answer."""
        began = self._world.clock.began_unix
        path = f"/v1/engines/{self._world.engines[engine].pool}/history?metric=used"
        status, body = ask(self._world.agent_port, "GET", f"{path}&from={began + start}&to={began + end}&step=1")
        if status != 200:
            return None
        points = json.loads(body)["points"]
        return {one["time_unix"] - began for one in points if one["mean"] is not None}


class Asker:
    """Asks for runs over HTTP, as an operator does, and keeps which of them the agent answered."""

    def __init__(self, world: World, engines: Sequence[str]) -> None:
        self._world, self._engines, self._turn = world, engines, 0
        self.asked: list[dict[str, Any]] = []
        self.outcomes: dict[str, int] = {}

    def look(self) -> None:
        engine = self._engines[self._turn % len(self._engines)]
        self._turn += 1
        path = f"/v1/engines/{self._world.engines[engine].pool}/compaction"
        at = self._world.clock.now()
        status, body = ask(self._world.agent_port, "POST", path, {"max_moves": 512}, seconds=60)
        if status:
            self.asked.append({"at": at, "until": self._world.clock.now(), "route": f"POST {path}"})
        answer = json.loads(body) if body else {}
        outcome = str(answer.get("decision") or answer.get("error") or "no answer")
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


class Pages:
    """Open pages of the dashboard, one for each view, and what their consoles complain of."""

    def __init__(self, world: World, watch: Watch, browser: str, views: Sequence[str]) -> None:
        self._world, self._watch, self._browser, self._views = world, watch, browser, views
        self.errors: dict[str, list[str]] = {}
        self.shown = threading.Event()

    def run(self) -> None:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=self._browser, args=BROWSER_FLAGS)
            pages = []
            for view in self._views:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                errors = self.errors[view] = []
                page.on("console", partial(self._keep, errors))
                page.on("pageerror", partial(self._note_error, errors))
                page.goto(f"http://127.0.0.1:{self._world.dashboard_port}/?view={view}", timeout=120_000)
                page.locator(f".st-key-view_{view}").wait_for(timeout=120_000)
                pages.append(page)
            self.shown.set()
            while not self._watch.leaving.is_set():
                pages[0].wait_for_timeout(500)
            for view, page in zip(self._views, pages, strict=True):
                if not page.locator(f".st-key-view_{view}").is_visible():
                    self._note(self.errors[view], "the view is not there any more")
            browser.close()

    def _keep(self, errors: list[str], message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(errors, message.text)

    def _note_error(self, errors: list[str], error: Error) -> None:
        self._note(errors, str(error))

    def _note(self, errors: list[str], text: str) -> None:
        errors.append(f"{self._world.clock.now():.0f} s {text[:300]}")
