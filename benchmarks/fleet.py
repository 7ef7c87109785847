"""A fleet on one machine: real agents, each beside its own engine, a real Prometheus over all, and the Fleet view.

    python benchmarks/fleet.py [--agents 50] [--seconds 120] [--interval 15] [--json FILE]

Each engine has 20,000 blocks and allocates and frees some 1,250 of them a second; ten engines share a process, to
save memory, and each has a folder and an agent of its own, as a pod has. Prometheus scrapes every 15 s and
evaluates deploy/prometheus/rules.yml. Its own series say how long scrapes took and whether one is missing; what it
costs for each series and sample is what docs/scale.md computes with. Needs scripts/prometheus_tools.sh and
Chromium. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _agent  # noqa: E402 - needs the path above
from benchmarks._soak_world import free_port  # noqa: E402

BLOCKS, STEPS_PER_SECOND, ENGINES_A_PROCESS = 20_000, 4.0, 10
BAR_OPERATIONS = 1000.0
SCRAPE_SECONDS = 15
BAR_MS = 50.0
BAR_GAP_INTERVALS = 1.5  # between scrapes of a target
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


class Prometheus:
    """A server of its own over these targets."""

    def __init__(self, tools: Path, folder: Path, targets: Sequence[str], interval: int) -> None:
        config = {
            "global": {"scrape_interval": f"{interval}s", "evaluation_interval": f"{interval}s"},
            "rule_files": [str(ROOT / "deploy" / "prometheus" / "rules.yml")],
            "scrape_configs": [{"job_name": "kvatlas", "static_configs": [{"targets": list(targets)}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.url = f"http://127.0.0.1:{free_port()}"
        self._http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        flags = [
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--web.enable-admin-api",
        ]
        log = (folder / "prometheus.log").open("w")
        self.process = psutil.Popen([str(tools / "prometheus"), *flags], stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it serves."""
        _wait_for(f"{self.url}/-/ready")

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        answer = self._http.get("/api/v1/query", params={"query": query}).raise_for_status()
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def own(self) -> dict[str, float]:
        """Its own metrics, those of a name added up."""
        text = self._http.get("/metrics").raise_for_status().text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.partition("{")[0].split()[0], float(line.rsplit(" ", 1)[1])
                found[name] = found.get(name, 0.0) + value
        return found

    def block(self, folder: Path) -> dict[str, float]:
        """Bytes on the disk of all that it knows, written as a block."""
        name = self._http.post("/api/v1/admin/tsdb/snapshot").raise_for_status().json()["data"]["name"]
        blocks = list((folder / "tsdb" / "snapshots" / name).glob("*/meta.json"))
        stats = [json.loads(path.read_text())["stats"] for path in blocks]
        chunks = sum(one.stat().st_size for path in blocks for one in (path.parent / "chunks").iterdir())
        index = sum((path.parent / "index").stat().st_size for path in blocks)
        return {
            "samples": sum(one["numSamples"] for one in stats),
            "series": sum(one["numSeries"] for one in stats),
            "chunk_bytes": chunks,
            "index_bytes": index,
        }


def scrapes(prometheus: Prometheus, seconds: float) -> dict[str, Any]:
    """How long scrapes took, and whether one failed or is missing."""
    window = f"[{seconds:.0f}s]"
    durations = prometheus.ask(f"scrape_duration_seconds{window}")
    taken = sorted(float(value) for series in durations for _, value in series["values"])
    ups = prometheus.ask(f"up{window}")
    failed = sum(value != "1" for series in ups for _, value in series["values"])
    times = [[at for at, _ in series["values"]] for series in ups]
    longest = max((b - a for one in times for a, b in pairwise(one)), default=0.0)
    fewest = min((len(one) for one in times), default=0)
    return {
        "targets": len(ups),
        "scrapes": len(taken),
        "p50_ms": 1e3 * statistics.median(taken) if taken else None,
        "p99_ms": 1e3 * taken[min(len(taken) - 1, int(0.99 * len(taken)))] if taken else None,
        "max_ms": 1e3 * taken[-1] if taken else None,
        "failed": failed,
        "fewest_of_a_target": fewest,
        "longest_gap_seconds": longest,
    }


def fleet_view(prometheus: Prometheus, agent_port: int, agents: int, browser: str) -> dict[str, Any]:
    """How many of the engines the Fleet view shows, and how long that took from the first call of the page."""
    port = free_port()
    flags = ["--listen", f"127.0.0.1:{port}", "--agent", f"http://127.0.0.1:{agent_port}"]
    command = [sys.executable, "-P", "-m", "dashboard", *flags, "--prometheus", prometheus.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**environment, "PYTHONPATH": str(ROOT)}
    )
    wanted = {f"engine-{number}." for number in range(agents)}
    try:
        _wait_for(f"http://127.0.0.1:{port}/_stcore/health")
        with sync_playwright() as playwright:
            window = playwright.chromium.launch(executable_path=browser, args=BROWSER_FLAGS)
            page = window.new_page(viewport={"width": 1920, "height": 1080})
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            began = time.perf_counter()
            page.goto(f"http://127.0.0.1:{port}/?view=fleet", timeout=120_000)
            deadline = time.monotonic() + 60
            names: list[str] = []
            while time.monotonic() < deadline:
                names = page.locator(".kv-card b").evaluate_all("all => all.map(one => one.title)")
                if all(any(name.startswith(one) for name in names) for one in wanted):
                    break
                page.wait_for_timeout(100)
            seconds = time.perf_counter() - began
            window.close()
    finally:
        process.terminate()
        process.wait(20)
    shown = sum(any(name.startswith(one) for name in names) for one in wanted)
    return {"shown": shown, "seconds": round(seconds, 1), "page_errors": errors}


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(url, timeout=2, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                sys.exit(f"{url} does not answer")
            time.sleep(0.1)


def measure(folder: Path, agents: int, seconds: float, interval: int, tools: Path, browser: str) -> dict[str, Any]:
    """Start everything, let Prometheus scrape each so many seconds, and ask it."""
    running: list[Any] = []
    try:
        for number in range(agents):
            (folder / f"pod-{number}").mkdir()
        for first in range(0, agents, ENGINES_A_PROCESS):
            count = min(ENGINES_A_PROCESS, agents - first)
            script = [sys.executable, str(ROOT / "benchmarks" / "_fleet_engines.py"), str(folder)]
            numbers = [str(first), str(count), str(BLOCKS), str(STEPS_PER_SECOND)]
            engines = subprocess.Popen([*script, *numbers], stdout=subprocess.PIPE, text=True)
            running.append(engines)
            assert engines.stdout is not None
            if engines.stdout.readline() != "ready\n":
                sys.exit("the engines did not start")
        ports, watched = [], []
        for number in range(agents):
            agent, port = _agent.start(folder / f"pod-{number}")
            running.append(agent)
            watched.append(psutil.Process(agent.pid))
            ports.append(port)
        prometheus = Prometheus(tools, folder, [f"127.0.0.1:{port}" for port in ports], interval)
        running.append(prometheus.process)
        prometheus.wait()
        empty = prometheus.own()
        time.sleep(interval + 2)  # by now each target was scraped once, which the first time takes longer
        load, before, cpu = os.getloadavg()[0], prometheus.own(), _cpu(watched)
        began = time.monotonic()
        time.sleep(seconds)
        load = max(load, os.getloadavg()[0])
        window = time.monotonic() - began
        last, agents_cpu = prometheus.own(), (_cpu(watched) - cpu) / window
        operations = prometheus.ask(
            f"rate(kvatlas_blocks_allocated_total[{seconds:.0f}s]) + rate(kvatlas_blocks_freed_total[{seconds:.0f}s])"
        )
        each = [float(one["value"][1]) for one in prometheus.ask("scrape_samples_scraped")]
        result = {
            "agents": agents,
            "seconds": seconds,
            "scrape_interval_seconds": interval,
            "load_average": round(load, 1),
            "cores": len(os.sched_getaffinity(0)),
            "operations_a_second": [round(float(one["value"][1])) for one in operations],
            "scrapes": scrapes(prometheus, window),
            "agents_cpu_cores": round(agents_cpu, 2),
            "agent_rss_megabytes": round(statistics.median(one.memory_info().rss for one in watched) / 1e6, 1),
            "series_an_agent": round(statistics.mean(each)),
            "prometheus": {
                "head_series": last["prometheus_tsdb_head_series"],
                "samples_a_second": (
                    last["prometheus_tsdb_head_samples_appended_total"]
                    - before["prometheus_tsdb_head_samples_appended_total"]
                )
                / window,
                "rss_bytes": last["process_resident_memory_bytes"],
                "rss_bytes_empty": empty["process_resident_memory_bytes"],
                "cpu_cores": (last["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / window,
                "rules_seconds": last["prometheus_rule_group_last_duration_seconds"],
                "block": prometheus.block(folder),
            },
        }
        return {**result, "view": fleet_view(prometheus, ports[0], agents, browser)}
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(30)
            except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                process.kill()


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(one.cpu_times().user + one.cpu_times().system for one in processes)


def report(result: dict[str, Any]) -> int:
    """Show the bars; the result is the exit status."""
    found, view, prometheus = result["scrapes"], result["view"], result["prometheus"]
    operations = min(result["operations_a_second"], default=0)
    interval = result["scrape_interval_seconds"]
    due = int(result["seconds"] / interval)
    shown = f"{view['shown']} of {result['agents']}, after {view['seconds']} s"
    gap = f"{found['failed']} failed, longest pause {found['longest_gap_seconds']:.1f} s"
    lines = [
        (
            "scrape, p99",
            f"{found['p99_ms']:.1f} ms (p50 {found['p50_ms']:.1f})",
            f"{BAR_MS:g} ms",
            found["p99_ms"] <= BAR_MS,
        ),
        (
            "scrapes missing",
            gap,
            f"0, {BAR_GAP_INTERVALS * interval:g} s",
            not found["failed"]
            and found["targets"] == result["agents"]
            and found["fewest_of_a_target"] >= due
            and found["longest_gap_seconds"] <= BAR_GAP_INTERVALS * interval,
        ),
        (
            "block operations of an engine",
            f"{operations} /s at least",
            f"{BAR_OPERATIONS:g} /s",
            operations >= BAR_OPERATIONS,
        ),
        ("pools on the Fleet view", shown, "all", view["shown"] == result["agents"] and not view["page_errors"]),
    ]
    print(f"{result['agents']} agents on {result['cores']} cores, load {result['load_average']}")
    for name, value, bar, met in lines:
        print(f"{'' if met else 'MISSED':>6}  {name:<30}  {value}   (bar {bar})")
    print(
        f"        series an agent {result['series_an_agent']}, agent {result['agent_rss_megabytes']} MB,"
        f" all agents {result['agents_cpu_cores']} cores; Prometheus {prometheus['head_series']:.0f} series,"
        f" {prometheus['samples_a_second']:.0f} samples/s, {prometheus['rss_bytes'] / 1e6:.0f} MB,"
        f" {prometheus['cpu_cores']:.2f} cores, rules {1e3 * prometheus['rules_seconds']:.0f} ms a round"
    )
    return 0 if all(met for *_, met in lines) else 1


def main() -> int:
    """Show the table; the result is the exit status, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Scrape a fleet of agents with Prometheus.")
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--interval", type=int, default=SCRAPE_SECONDS, help="seconds between scrapes of an agent")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tools = subprocess.run([ROOT / "scripts" / "prometheus_tools.sh"], capture_output=True, text=True, check=True)
    names = [os.environ.get("KVATLAS_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    browser = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if browser is None:
        sys.exit("no Chromium; install it, or name it in KVATLAS_CHROMIUM")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvatlas-fleet-", dir=memory) as folder:
        result = measure(
            Path(folder), options.agents, options.seconds, options.interval, Path(tools.stdout.strip()), browser
        )
    if options.json:
        options.json.write_text(json.dumps({"schema": "kvatlas.fleet/v1", **result}, indent=2) + "\n")
    return report(result)


if __name__ == "__main__":
    sys.exit(main())
