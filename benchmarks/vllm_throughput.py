"""Throughput of `vllm serve` with the plugin against without: SmolLM2 on the CPU, live servers taking turns.

Three of vLLM's OpenAI servers stay up all the time: one with the plugin as it comes, two with KVATLAS_DISABLE=1. Each
serves the same stream of requests in rounds of a fixed number of them, sized beforehand so that a round takes some
seconds; the others idle meanwhile. Rounds go round as on, off, off again, off again, off, on, so that a machine that
warms up or is used by others favours none. All of it is done twice, half the pairs each, with the servers started in
the opposite order: the one that was started first has a slower worker (3 % of its CPU time, where the plugin does
nothing), whether it has the plugin or not. A pair's ratio is the time of the round without over that of the round
with the plugin; the row `off/off` pairs the two servers without in the same way, and shows what noise alone looks
like. Medians, with bootstrap intervals of 95 %. Beside the time stands the CPU time of the server's processes, which
others on the machine disturb least, and what the plugin adds of it to a step; vLLM's engine core polls while it waits
for its worker, so that its CPU time follows the clock.

    python benchmarks/vllm_throughput.py [--pairs 20] [--seconds 7] [--allocation relocating] [--json FILE]
    python benchmarks/vllm_throughput.py --short

The first takes about nine minutes on two idle cores. Servers run in the environment that scripts/vllm_env.sh prints,
with the model of scripts/smollm2.sh; both are built when they are not there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.demo.plugin_folder import make_plugin_folder  # noqa: E402 - needs the path above
from engine_shim import MapReader  # noqa: E402

BARS = {"stock": 0.99, "relocating": 0.97}
SERVERS = ("on", "off", "off again")
CONCURRENT = 8
SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 96, (32, 160), 24
BLOCKS, BLOCK_TOKENS = 160, 32  # prefixes are evicted all the time
FIRST_REQUESTS = 16
START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
RESAMPLES = 4000
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """One of vLLM's OpenAI servers, and its own copy of the stream of requests."""

    def __init__(self, name: str, python: str, model: str, scratch: Path, allocation: str) -> None:
        self.maps = scratch / name.replace(" ", "-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        plugin = make_plugin_folder(scratch / f"plugin-{self.maps.name}")
        environment = os.environ | {
            "PYTHONPATH": str(plugin),
            "KVATLAS_DIR": str(self.maps),
            "KVATLAS_VLLM_ALLOCATION": allocation,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {} if name == "on" else {"KVATLAS_DISABLE": "1"}
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "1024"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--max-num-seqs", str(CONCURRENT), "--disable-uvicorn-access-log"]
        self.log = scratch / f"{self.maps.name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=scratch, start_new_session=True, stdout=log, stderr=log
            )
        self._dice = random.Random(9)
        self._shared = [[self._dice.randrange(1000, 40000) for _ in range(SHARED_TOKENS)] for _ in range(12)]

    def await_health(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                said = self.log.read_text(errors="replace")[-2000:]
                sys.exit(f"a server ended with {self.process.returncode} before it answered:\n{said}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:
                time.sleep(0.2)
        sys.exit(f"a server did not answer within {START_SECONDS:g} s")

    def round(self, requests: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of its processes, for the next requests of the stream."""
        prompts = []
        for _ in range(requests):
            own = [self._dice.randrange(1000, 40000) for _ in range(self._dice.randrange(*OWN_TOKENS))]
            prompts.append(self._dice.choice(self._shared) + own)
        before, began = self._cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(CONCURRENT) as pool:
            for _ in pool.map(self._complete, prompts):
                pass
        return time.perf_counter() - began, self._cpu_seconds() - before

    def counters(self) -> dict[str, int]:
        """Of its map, where it has one."""
        (path,) = self.maps.glob("*.kvmap")
        reader = MapReader(path)
        counters = dict(reader.read(timeout_seconds=5.0).counters)
        reader.close()
        return counters

    def stop(self) -> None:
        """End it and what it has started: all are in one session of their own."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _complete(self, prompt: Sequence[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != http.client.OK or json.loads(content)["usage"]["completion_tokens"] != ANSWER_TOKENS:
            raise RuntimeError(f"status {answer.status}: {content[:200]!r}")

    def _cpu_seconds(self) -> float:
        """Of all processes of the server's session."""
        ticks = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, and the 95 % bootstrap interval of it."""
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return {"median": statistics.median(values), "low": medians[cut], "high": medians[-1 - cut]}


Rounds = dict[str, list[tuple[float, float]]]
COUNTED = ("steps", "shim_cpu_ns", "blocks_allocated", "repairs")


def turns(
    order: Sequence[str], pairs: int, seconds: float, allocation: str, python: str, model: str
) -> tuple[Rounds, dict[str, int], int]:
    """Start the servers in this order and let them serve in turn: the rounds, what the map counted meanwhile, and the
    requests of a round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        servers = {}
        for name in order:  # one after the other: starting takes both cores
            server = servers[name] = Server(name, python, model, Path(folder), allocation)
            running.callback(server.stop)
            server.await_health()
        for server in servers.values():
            server.round(FIRST_REQUESTS)  # the first ones fill the pool
        slowest = max(server.round(FIRST_REQUESTS)[0] for server in servers.values())
        requests = max(CONCURRENT, round(FIRST_REQUESTS * seconds / slowest))
        before = servers["on"].counters()
        rounds: Rounds = {name: [] for name in SERVERS}
        for _ in range(-(-pairs // 2)):
            for name in (*SERVERS, *reversed(SERVERS)):
                rounds[name].append(servers[name].round(requests))
        after = servers["on"].counters()
    return rounds, {name: after[name] - before[name] for name in COUNTED}, requests


def measure(pairs: int, seconds: float, allocation: str, python: str, model: str) -> dict[str, Any]:
    """Serve in both orders of start, and compare."""
    rounds: Rounds = {name: [] for name in SERVERS}
    spent = dict.fromkeys(COUNTED, 0)
    requests = 0
    for order in (SERVERS, SERVERS[::-1]):
        some, counted, requests = turns(order, -(-pairs // 2), seconds, allocation, python, model)
        for name in SERVERS:
            rounds[name] += some[name]
        for name in COUNTED:
            spent[name] += counted[name]
    steps = spent["steps"] / len(rounds["on"])
    on, off, again = (rounds[name] for name in SERVERS)
    throughput = interval([one[0] / other[0] for one, other in zip(off, on, strict=True)])
    return {
        "pairs": len(on),
        "round_seconds": statistics.median(time for time, _ in off),
        "requests_a_round": requests,
        "steps_a_round": steps,
        "allocation": allocation,
        "throughput": throughput | {"bar": BARS[allocation], "met": throughput["high"] >= BARS[allocation]},
        "off_off": interval([one[0] / other[0] for one, other in zip(again, off, strict=True)]),
        "cpu": interval([one[1] / other[1] for one, other in zip(off, on, strict=True)]),
        "cpu_off_off": interval([one[1] / other[1] for one, other in zip(again, off, strict=True)]),
        "added_microseconds_a_step": interval(
            [(one[1] - other[1]) / steps * 1e6 for one, other in zip(on, off, strict=True)]
        ),
        "publish_microseconds_a_step": spent["shim_cpu_ns"] / max(1, spent["steps"]) / 1e3,
        "repairs": spent["repairs"],
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    """Show the rows; the exit status is 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=7.0, help="a round, about")
    parser.add_argument("--allocation", choices=sorted(BARS), default="stock", help="of the server with the plugin")
    parser.add_argument("--short", action="store_true", help="four pairs: does it work?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    paths = []
    for script in ("vllm_env.sh", "smollm2.sh"):
        found = subprocess.run([ROOT / "scripts" / script], stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            return found.returncode
        paths.append(found.stdout.strip())
    result = measure(4 if options.short else options.pairs, options.seconds, options.allocation, paths[0], paths[1])
    print(
        f"{result['pairs']} pairs of {result['round_seconds']:.1f} s, {result['steps_a_round']:.0f} steps each; "
        f"load average {result['load_average']:.1f}"
    )
    for name in ("throughput", "off_off", "cpu", "cpu_off_off", "added_microseconds_a_step"):
        row = result[name]
        print(f"{name:26} {row['median']:8.3f}  {row['low']:8.3f} to {row['high']:.3f}")
    print(
        f"publish: {result['publish_microseconds_a_step']:.0f} microseconds of CPU a step; repairs {result['repairs']}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if result["throughput"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
