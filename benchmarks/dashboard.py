"""What a refresh of the dashboard costs: a real pool of 1,000,000 blocks, a real agent, a real browser on the page.

A refresh is timed by the dashboard itself, from the start to the end of the fragment, the agent's answers included.
Bytes are those of the WebSocket frames that the browser received: as refreshes go on, and for the whole page at once
(with refreshes paused, the page is run anew, which sends every element again).

    python benchmarks/dashboard.py [--blocks 1000000] [--refreshes 60] [--json FILE]
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
from pathlib import Path
from typing import IO, Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _agent, _engines  # noqa: E402 - needs the path above

BAR_MS = 200.0
BAR_BYTES = 150_000
STEPS_PER_SECOND = 10.0
MAP = ".st-key-map_box .kvatlas-figure[data-drawn]"
HISTORY = ".st-key-history_box .kvatlas-figure[data-drawn]"


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


def take(events: queue.SimpleQueue[dict[str, Any]], fragment: str, count: int, page: Page) -> list[float]:
    """Milliseconds of the next `count` runs of a fragment."""
    taken: list[float] = []
    deadline = time.monotonic() + 10 + 4 * count
    while len(taken) < count:
        if time.monotonic() > deadline:
            sys.exit(f"only {len(taken)} refreshes in time")
        page.wait_for_timeout(200)  # lets Playwright hand over what the browser sent
        while not events.empty():
            event = events.get()
            if event["fragment"] == fragment:
                taken.append(event["milliseconds"])
    return taken[:count]


def measure(browser_path: str, home: str, events: queue.SimpleQueue[dict[str, Any]], refreshes: int) -> dict[str, Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        sizes = count_frames(page)
        page.goto(home)
        page.wait_for_selector(MAP, timeout=60_000)
        page.wait_for_selector(HISTORY, timeout=60_000)
        take(events, "pool", 3, page)  # caches of Python and of the browser are warm after these
        sizes.clear()
        while not events.empty():
            events.get()
        taken = take(events, "pool", refreshes, page)
        received, largest = sum(sizes), max(sizes)
        whole = whole_page(page, sizes)
        browser.close()
    return {
        "refresh_ms_median": statistics.median(taken),
        "refresh_ms_p95": sorted(taken)[int(0.95 * (len(taken) - 1))],
        "bytes_a_refresh": round(received / refreshes),
        "largest_frame_bytes": largest,
        "whole_page_bytes": whole,
    }


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
    parser = argparse.ArgumentParser(description="Time refreshes of the dashboard on a large pool.")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--refreshes", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = (os.environ.get("KVATLAS_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    browser_path = next((path for name in names if name and (path := shutil.which(name))), None)
    if browser_path is None:
        print("no Chromium: apt-get install chromium, or name one in KVATLAS_CHROMIUM", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-", dir=_memory_folder()) as folder:
        engines = _engines.start(Path(folder), 1, options.blocks, STEPS_PER_SECOND)
        agent, port = _agent.start(Path(folder))
        page_server, home, events = start_dashboard(port)
        try:
            wait_for(home + "_stcore/health")
            result = measure(browser_path, home, events, options.refreshes)
        finally:
            for process in (page_server, agent, engines):
                process.terminate()
                process.wait(timeout=20)
    fine = result["refresh_ms_median"] <= BAR_MS and result["whole_page_bytes"] <= BAR_BYTES
    result |= {"blocks": options.blocks, "refreshes": options.refreshes, "bar_ms": BAR_MS, "bar_bytes": BAR_BYTES}
    print(f"{'dashboard on ' + format(options.blocks, ',') + ' blocks':<44}{'measured':>12}{'bar':>12}")
    print(f"{'refresh with the agent call, median':<44}{result['refresh_ms_median']:>9.1f} ms{BAR_MS:>9.0f} ms")
    print(f"{'refresh, 95th percentile':<44}{result['refresh_ms_p95']:>9.1f} ms")
    print(
        f"{'WebSocket frames, whole page':<44}{result['whole_page_bytes'] / 1000:>9.1f} kB{BAR_BYTES / 1000:>9.0f} kB"
    )
    print(f"{'WebSocket frames, a refresh':<44}{result['bytes_a_refresh'] / 1000:>9.1f} kB")
    if options.json:
        options.json.write_text(
            json.dumps({"schema": "kvatlas.benchmark.dashboard/v1", "fine": fine} | result, indent=2)
        )
    return 0 if fine else 1


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
