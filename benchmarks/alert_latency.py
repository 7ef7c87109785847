"""How long it takes from a number that crosses a threshold in a map until a receiver has taken the message.

An agent with default settings, sampling once a second, watches 60 pools; the rule has no `for`. Pools cross at random
moments: 500 times, five a second, for Alertmanager, which is told of each; and one at a time, two to three seconds
apart, for Slack, which is sent one message a second, so that one just sent would hold up the next. Measured from the
publish of the map to the request that comes of it at the receiver.

    python benchmarks/alert_latency.py [--crossings 500] [--slack-crossings 60] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.alerting.rule_files import default_rules  # noqa: E402 - needs the path above
from benchmarks import _agent  # noqa: E402
from engine_shim import MapObserver, MapSpec  # noqa: E402
from engine_shim.pool.block_pool import BlockPool  # noqa: E402
from tests.alerts.slack_receiver import Answer, Receiver, slack_judge  # noqa: E402

BAR_SECONDS = 2.0
POOLS, BLOCKS = 60, 64
CROSSINGS_PER_SECOND = 5.0
HELD_SECONDS = 4.0  # a pool stays crossed for so long, and then clear, so that no sample misses either
AHEAD_SECONDS = 60.0  # Alertmanager is told an end so far ahead, at least, of what fires
RULE = "pool-nearly-full"


class Engines:
    """The pools in a process of their own; `cross` and `clear` return when their maps are published, monotonic."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engines", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell("")

    def cross(self, number: int) -> float:
        return float(self._tell(f"cross {number}"))

    def clear(self, number: int) -> float:
        return float(self._tell(f"clear {number}"))

    def _tell(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def run_engines(folder: Path) -> None:
    """What `Engines` starts."""
    pools = []
    for number in range(POOLS):
        spec = MapSpec(
            engine_id=f"engine-{number}",
            kind="benchmark",
            model="org/model",
            pool="kv",
            total_blocks=BLOCKS,
            block_tokens=16,
            block_bytes=1 << 20,
            dtype="bfloat16",
        )
        observer = MapObserver.create(spec, folder)
        pools.append((observer, BlockPool(BLOCKS, observer=observer, headroom=0.0, prefix_cache=False)))
        observer.step_ended(0, 0)
    print("ready", flush=True)
    held: dict[int, list[int]] = {}
    for line in sys.stdin:
        what, _, text = line.partition(" ")
        number = int(text)
        observer, pool = pools[number]
        if what == "cross":
            held[number] = pool.allocate(BLOCKS * 3 // 4).blocks
        else:
            pool.release(held.pop(number))
        observer.step_ended(0, 0)
        print(time.monotonic(), flush=True)


def rules_file(folder: Path) -> Path:
    """The one rule, and no other."""
    others = [rule.name for rule in default_rules() if rule.name != RULE]
    path = folder / "rules.yml"
    path.write_text(f"disable: [{', '.join(others)}]\nrules:\n  - {{name: {RULE}, above: 50%, exit: 25%, for: 0s}}\n")
    return path


def told_by_alertmanager(request: Any) -> set[str]:
    """Engines that a request tells to be firing: with an end that is minutes ahead."""
    found = set()
    for one in request.body:
        start, end = (datetime.fromisoformat(one[name]) for name in ("startsAt", "endsAt"))
        if (end - start).total_seconds() > AHEAD_SECONDS:
            found.add(one["labels"]["engine_id"])
    return found


def told_by_slack(request: Any) -> set[str]:
    """The same; a message may tell of several."""
    return set(re.findall(r"WARNING: Pool kv of (engine-\d+)", json.dumps(request.body["blocks"])))


def measure(
    engines: Engines,
    receiver: Receiver,
    told: Callable[[Any], set[str]],
    crossings: int,
    pause: Callable[[], float],
    numbers: Callable[[set[int]], int],
    held_seconds: float = HELD_SECONDS,
) -> list[float]:
    """Seconds from each crossing to the first request after it that tells of its engine."""
    crossed: list[tuple[str, float]] = []
    open_until: dict[int, float] = {}
    cleared: dict[int, float] = {}
    due = time.monotonic()
    for _ in range(crossings):
        due += pause()
        while (now := time.monotonic()) < due:
            for number in [one for one, until in open_until.items() if until <= now]:
                cleared[number] = engines.clear(number)
                del open_until[number]
            time.sleep(min(0.02, due - now))
        number = numbers(set(open_until) | {one for one, at in cleared.items() if now - at < HELD_SECONDS})
        crossed.append((f"engine-{number}", engines.cross(number)))
        open_until[number] = time.monotonic() + held_seconds
    time.sleep(HELD_SECONDS)
    for number in open_until:
        engines.clear(number)
    time.sleep(HELD_SECONDS)
    requests = [(request.at, told(request)) for request in receiver.requests if request.status == 200]
    seconds = []
    for engine, at in crossed:
        arrived = next((then for then, names in requests if then >= at and engine in names), None)
        seconds.append(math.inf if arrived is None else arrived - at)
    return seconds


def main() -> int:
    """Show the table; the result is the exit status, 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description="Measure from a crossing in a map to the message at a receiver.")
    parser.add_argument("--crossings", type=int, default=500)
    parser.add_argument("--slack-crossings", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.engines is not None:
        run_engines(options.engines)
        return 0
    if options.slack_crossings > POOLS:
        parser.error(f"--slack-crossings: at most {POOLS}, since an engine is told of once a minute")
    dice = random.Random(options.seed)
    alertmanager, slack = Receiver(lambda body: Answer(200, "")), Receiver(slack_judge)
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as name:
        folder = Path(name)
        (maps := folder / "maps").mkdir()
        engines = Engines(maps)
        rules = str(rules_file(folder))

        def watched(sink: dict[str, str], work: Callable[[], list[float]]) -> list[float]:
            store = str(folder / f"{next(iter(sink))}.sqlite")
            settings = {"KVATLAS_ALERT_RULES": rules, "KVATLAS_ALERT_STORE": store}
            agent, _ = _agent.start(maps, settings | sink)
            try:
                time.sleep(3.0)
                return work()
            finally:
                agent.terminate()
                agent.wait(10)

        def any_other(taken: set[int]) -> int:
            return dice.choice([one for one in range(POOLS) if one not in taken])

        fresh = iter(range(POOLS))
        try:
            rows["alertmanager"] = watched(
                {"KVATLAS_ALERTMANAGER_URL": f"http://127.0.0.1:{alertmanager.port}"},
                lambda: measure(
                    engines,
                    alertmanager,
                    told_by_alertmanager,
                    options.crossings,
                    lambda: dice.expovariate(CROSSINGS_PER_SECOND),
                    any_other,
                ),
            )
            rows["slack"] = watched(
                {"KVATLAS_SLACK_WEBHOOK_URL": slack.url},
                lambda: measure(
                    engines,
                    slack,
                    told_by_slack,
                    options.slack_crossings,
                    lambda: dice.uniform(2.0, 3.0),
                    lambda taken: next(fresh),
                    held_seconds=math.inf,  # what ends would take turns with what begins
                ),
            )
        finally:
            engines.close()
            alertmanager.close()
            slack.close()
    result = {
        name: {
            "crossings": len(seconds),
            "lost": len(seconds) - len(arrived),
            **{f"p{q}": float(np.percentile(arrived, q, method="higher")) for q in (50, 95, 99)},
            "max": max(arrived),
            "bar_p99": BAR_SECONDS,
        }
        for name, seconds in rows.items()
        if (arrived := [one for one in seconds if one < math.inf])
    }
    print(f"{'receiver':<14}{'crossings':>10}{'lost':>6}{'p50 s':>8}{'p95 s':>8}{'p99 s':>8}{'max s':>8}")
    fine = len(result) == len(rows) and all(not row["lost"] and row["p99"] <= BAR_SECONDS for row in result.values())
    for name, row in result.items():
        late = "" if row["p99"] <= BAR_SECONDS and not row["lost"] else "  MISSED"
        numbers = "".join(f"{row[key]:>8.2f}" for key in ("p50", "p95", "p99", "max"))
        print(f"{name:<14}{row['crossings']:>10}{row['lost']:>6}{numbers}{late}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
