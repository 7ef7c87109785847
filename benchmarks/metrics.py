"""How long a scrape of /metrics takes with 32 engines: HTTP round trips to a real agent beside real maps.

Each of 500 requests waits a random time up to 0.1 s, so that many meet a sampler at work. Half of them keep one
connection, as Prometheus does; half open their own. The last answer is then rendered again, in turns by the agent's own
renderer and by prometheus_client's, and the ratio of their times is the median over the turns.

    python benchmarks/metrics.py [--engines 32] [--requests 500] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.exporter import render_text  # noqa: E402 - needs the path above
from benchmarks import _agent, _engines  # noqa: E402

BAR_MS = 40.0
LEAST_SERIES = 100
BLOCKS = 10_000
STEPS_PER_SECOND = 2.0
RENDERINGS = 21


def scrape(connection: http.client.HTTPConnection) -> tuple[float, bytes]:
    """Milliseconds from the request to the last byte, and the text."""
    began = time.perf_counter()
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read()
    taken = (time.perf_counter() - began) * 1e3
    if response.status != 200:
        sys.exit(f"/metrics answered {response.status}")
    return taken, text


def check(text: bytes, engines: int) -> int:
    """Series of the engine that has fewest. Ends the benchmark where a series stands twice or an engine is missing."""
    series = [line.rpartition(b" ")[0] for line in text.splitlines() if not line.startswith(b"#")]
    if len(set(series)) != len(series):
        sys.exit("a series stands twice in /metrics")
    each = [sum(f'engine_id="engine-{i}"'.encode() in line for line in series) for i in range(engines)]
    if min(each) < LEAST_SERIES:
        sys.exit(f"an engine has only {min(each)} series")
    return min(each)


class Families(Collector):
    """Those of a text, which were parsed beforehand."""

    def __init__(self, text: bytes) -> None:
        self._families = list(text_string_to_metric_families(text.decode()))

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(text: bytes) -> tuple[float, float]:
    """Milliseconds that the agent's renderer takes for all of a text, and as a share of prometheus_client's."""
    registry = CollectorRegistry()
    registry.register(Families(text))
    ours, theirs = (  # parsed, since prometheus_client writes large numbers in another way
        list(text_string_to_metric_families(one.decode()))
        for one in (render_text(registry.collect()), generate_latest(registry))
    )
    if ours != theirs:
        sys.exit("the agent's renderer and prometheus_client's do not say the same")
    pairs = []
    for _ in range(RENDERINGS):
        began = time.perf_counter()
        render_text(registry.collect())
        between = time.perf_counter()
        generate_latest(registry)
        pairs.append((between - began, time.perf_counter() - between))
    return 1e3 * statistics.median(one for one, _ in pairs), statistics.median(one / other for one, other in pairs)


def main() -> int:
    """Show the table; the result is the exit status, 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description="Time scrapes of an agent that watches many engines.")
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dice = random.Random(3)
    taken = []
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-", dir=_memory_folder()) as folder:
        engines = _engines.start(Path(folder), options.engines, BLOCKS, STEPS_PER_SECOND)
        agent, port = _agent.start(Path(folder))
        try:
            kept = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            deadline = time.monotonic() + 30
            while f'engine_id="engine-{options.engines - 1}"'.encode() not in scrape(kept)[1]:
                if time.monotonic() > deadline:
                    sys.exit("the agent did not see all engines")
                time.sleep(0.1)
            for number in range(options.requests):
                time.sleep(dice.uniform(0, 0.1))
                if number % 2:
                    milliseconds, text = scrape(kept)
                else:
                    fresh = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                    milliseconds, text = scrape(fresh)
                    fresh.close()
                taken.append(milliseconds)
            least = check(text, options.engines)
        finally:
            for process in (agent, engines):
                process.terminate()
                process.wait(10)
    taken.sort()
    p50, p90, p99 = (taken[min(len(taken) - 1, int(len(taken) * q))] for q in (0.5, 0.9, 0.99))
    met = p99 <= BAR_MS
    render_ms, render_ratio = render(text)
    print(f"{'engines':>8}{'series each':>12}{'bytes':>9}{'p50 ms':>8}{'p90 ms':>8}{'p99 ms':>8}{'worst':>8}{'bar':>6}")
    print(
        f"{options.engines:>8}{least:>12}{len(text):>9}{p50:>8.1f}{p90:>8.1f}{p99:>8.1f}{taken[-1]:>8.1f}{BAR_MS:>6.0f}"
        f"{'' if met else '  MISSED'}"
    )
    print(f"rendering takes {render_ms:.1f} ms, {render_ratio:.2f} of prometheus_client's time")
    if options.json:
        result = {
            "engines": options.engines,
            "requests": options.requests,
            "series_each": least,
            "bytes": len(text),
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "max_ms": taken[-1],
            "bar_ms": BAR_MS,
            "render_ms": render_ms,
            "render_over_prometheus_client": render_ratio,
        }
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if met else 1


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
