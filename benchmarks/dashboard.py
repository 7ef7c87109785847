"""What the dashboard costs: a real pool of 1,000,000 blocks, a real agent, a real browser on each of its views.

A refresh is timed by the dashboard itself, from the start to the end of each fragment, the agent's answers included; a
view's is the sum of the medians of its fragments, the banners' among them. Bytes are those of the WebSocket frames that
the browser received: as refreshes go on, and for the whole page at once (with refreshes paused, the page is run anew,
which sends every element again). The first useful paint is from the browser's call of the address to the block map's
being drawn: cold with a new server and a new browser, warm with a server and a browser that have shown the page before.

    python benchmarks/dashboard.py [--blocks 1000000] [--seconds 20] [--paints 5] [--views pool,fleet] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _agent, _engines  # noqa: E402 - needs the path above

BAR_MS = 200.0
BAR_BYTES = 150_000
BAR_PAINT_MS = {"warm": 2500.0, "cold": 4000.0}
STEPS_PER_SECOND = 10.0
MAP = ".st-key-map_box .kvatlas-figure[data-drawn]"
VIEWS = ("fleet", "pool", "time", "requests", "compaction", "memory", "alerts")
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def start_dashboard(agent_port: int) -> tuple[subprocess.Popen[str], str, queue.SimpleQueue[dict[str, Any]]]:
    """A dashboard, its address, and the events that it logs of its fragments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
    environment |= {"KVATLAS_DASHBOARD_TIMING": "1", "PYTHONPATH": str(ROOT)}
    flags = ["--listen", f"127.0.0.1:{port}", "--agent", f"http://127.0.0.1:{agent_port}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dashboard", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_events, args=(process.stderr, events), daemon=True).start()
    return process, f"http://127.0.0.1:{port}/", events


def _read_events(stream: IO[str], events: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in stream:
        if line.startswith('{"event": "fragment"'):
            events.put(json.loads(line))


def wait_for(url: str) -> None:
    """Until the address answers; ends the benchmark after a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own server, above
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                sys.exit(f"{url} does not answer")
            time.sleep(0.1)


def count_frames(page: Page) -> list[int]:
    """A list that grows by the bytes of each WebSocket frame received."""
    sizes: list[int] = []

    def received(event: dict[str, Any]) -> None:
        response = event["response"]
        binary = response["opcode"] == 2
        sizes.append(len(base64.b64decode(response["payloadData"])) if binary else len(response["payloadData"]))

    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.webSocketFrameReceived", received)
    return sizes


def measure(
    page: Page, home: str, view: str, events: queue.SimpleQueue[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """One view: what its refreshes cost in a window of `seconds`."""
    sizes = count_frames(page)
    page.goto(f"{home}?view={view}")
    page.locator(f".st-key-view_{view}").wait_for(timeout=60_000)
    if view == "pool":
        page.wait_for_selector(MAP, timeout=60_000)
    page.wait_for_timeout(8_000)  # caches of Python and of the browser are warm after that
    sizes.clear()
    while not events.empty():
        events.get()
    page.wait_for_timeout(seconds * 1000)
    received = sum(sizes)
    taken: dict[str, list[float]] = {}
    while not events.empty():
        event = events.get()
        taken.setdefault(event["fragment"], []).append(event["milliseconds"])
    if set(taken) <= {"banners"}:
        sys.exit(f"the view {view} did not refresh in {seconds:.0f} s")
    fragments = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "refresh_ms": sum(fragments.values()),
        "fragments_ms": fragments,
        "fragments_ms_p95": {name: sorted(v)[int(0.95 * (len(v) - 1))] for name, v in taken.items()},
        "bytes_a_second": round(received / seconds),
        "whole_page_bytes": whole_page(page, sizes),
    }


def paint_ms(page: Page, home: str) -> float:
    """From the call of the address to the first block map."""
    start = time.perf_counter()
    page.goto(home, wait_until="commit")
    page.wait_for_selector(MAP, timeout=60_000)
    return 1000 * (time.perf_counter() - start)


def paints(browser_path: str, agent_port: int, count: int) -> dict[str, float]:
    """Milliseconds to the first useful paint, medians."""
    cold, warm = [], []
    with sync_playwright() as playwright:
        for number in range(count):
            server, home, _ = start_dashboard(agent_port)
            wait_for(home + "_stcore/health")
            browser = playwright.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            cold.append(paint_ms(page, home))
            if number == count - 1:
                for _ in range(count):
                    page.goto("about:blank")
                    warm.append(paint_ms(page, home))
            browser.close()
            server.terminate()
            server.wait(timeout=20)
    return {"cold": statistics.median(cold), "warm": statistics.median(warm)}


def whole_page(page: Page, sizes: list[int]) -> int:
    """Bytes of one run of the whole page, nothing left out: the largest of five."""
    page.get_by_text("Pause", exact=True).click()
    page.get_by_text("Paused.").wait_for()
    runs = []
    for _ in range(5):
        until_quiet(page, sizes)
        sizes.clear()
        page.locator(".kv-title").click()  # the key must go to the page, not to a field
        page.keyboard.press("r")
        until_quiet(page, sizes)
        runs.append(sum(sizes))
    return max(runs)


def until_quiet(page: Page, sizes: list[int]) -> None:
    """Until frames came and then none for two seconds."""
    seen = -1
    while not sizes or seen != len(sizes):
        seen = len(sizes)
        page.wait_for_timeout(2000)


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Time the dashboard's views on a large pool.")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each view")
    parser.add_argument("--paints", type=int, default=5, help="of each kind; 0: none")
    parser.add_argument("--views", default=",".join(VIEWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = (os.environ.get("KVATLAS_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    browser_path = next((path for name in names if name and (path := shutil.which(name))), None)
    if browser_path is None:
        print("no Chromium: apt-get install chromium, or name one in KVATLAS_CHROMIUM", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-", dir=_memory_folder()) as folder:
        engines = _engines.start(Path(folder), 1, options.blocks, STEPS_PER_SECOND)
        # On a disk, as in use: a frame of each pool a second is what the view of time reads.
        state = tempfile.TemporaryDirectory(prefix="kvatlas-bench-state-")
        agent, port = _agent.start(Path(folder), {"KVATLAS_STATE_DIR": state.name})
        try:
            first_paint = paints(browser_path, port, options.paints) if options.paints else {}
            views = all_views(browser_path, port, options.views.split(","), options.seconds)
        finally:
            for process in (agent, engines):
                process.terminate()
                process.wait(timeout=20)
            state.cleanup()
    fine = all(each["refresh_ms"] <= BAR_MS and each["whole_page_bytes"] <= BAR_BYTES for each in views.values())
    fine = fine and all(milliseconds <= BAR_PAINT_MS[kind] for kind, milliseconds in first_paint.items())
    print(f"{'dashboard on ' + format(options.blocks, ',') + ' blocks':<44}{'measured':>12}{'bar':>12}")
    for kind, milliseconds in first_paint.items():
        print(f"{'first useful paint, ' + kind + ', median':<44}{milliseconds:>9.0f} ms{BAR_PAINT_MS[kind]:>9.0f} ms")
    for view, each in views.items():
        parts = ", ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in each["fragments_ms"].items())
        whole = each["whole_page_bytes"] / 1000
        print(f"{view + ': refresh (' + parts + ')':<44}{each['refresh_ms']:>9.1f} ms{BAR_MS:>9.0f} ms")
        print(f"{view + ': WebSocket frames, whole page':<44}{whole:>9.1f} kB{BAR_BYTES / 1000:>9.0f} kB")
        print(f"{view + ': WebSocket frames, a second':<44}{each['bytes_a_second'] / 1000:>9.1f} kB")
    if options.json:
        result = {"schema": "kvatlas.benchmark.dashboard/v2", "fine": fine, "blocks": options.blocks, "views": views}
        result |= {
            "first_paint_ms": first_paint,
            "bar_ms": BAR_MS,
            "bar_bytes": BAR_BYTES,
            "bar_paint_ms": BAR_PAINT_MS,
        }
        options.json.write_text(json.dumps(result, indent=2))
    return 0 if fine else 1


def all_views(browser_path: str, agent_port: int, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Each view in a page of its own, on one server."""
    server, home, events = start_dashboard(agent_port)
    try:
        wait_for(home + "_stcore/health")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
            found = {}
            for name in names:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                found[name] = measure(page, home, name, events, seconds)
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=20)
    return found


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
