"""Whether the agent samples on time beside receivers of alerts that never answer.

Two agents watch the same engines at the same time, so that whatever else the machine does meets both: one has nobody to
tell, the other's Slack, Alertmanager and webhook take every request and answer none. Then the intervals between their
samples are compared, as their histories have them, to 10 ms.

    python benchmarks/alert_sampling.py [--seconds 150] [--engines 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _agent, _engines  # noqa: E402 - needs the path above
from tests.alerts.slack_receiver import Answer, Receiver  # noqa: E402

BAR = 1.05
REPLY_SECONDS = 20.0
RULES = """
rules:
  - name: in-use
    number: pool_used_ratio
    above: 0.1%
    severity: warning
    summary: "Pool {pool} of {engine_id} is in use"
    meaning: "A benchmark."
    action: "Nothing."
"""
STEP_SECONDS = 0.01
WINDOW_SECONDS = 30.0
SETTLED_SECONDS = 10.0


def sample_times(port: int, pool: str, start: float, end: float) -> list[float]:
    """Unix seconds at which that agent sampled the pool."""
    times = []
    while start < end:
        until = min(start + WINDOW_SECONDS, end)
        query = f"metric=used&from={start:.2f}&to={until:.2f}&step={STEP_SECONDS}"
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v1/engines/{pool}/history?{query}", timeout=REPLY_SECONDS
        ) as reply:
            history = json.load(reply)
        times += [point["time_unix"] for point in history["points"] if point["mean"] is not None]
        start = until
    return sorted(set(times))


def pool_of(port: int) -> str:
    """Id of the first pool."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/engines", timeout=REPLY_SECONDS) as reply:
        return str(json.load(reply)["engines"][0]["id"])


def main() -> int:
    """Show the figures; the result is the exit status, 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description="Measure sampling beside receivers that never answer.")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    silent = Receiver(lambda _: Answer(hang=True))
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as name:
        folder = Path(name)
        maps = folder / "maps"
        maps.mkdir()
        (folder / "rules.yml").write_text(RULES)
        processes = [_engines.start(maps, options.engines, 10_000, 20.0)]
        told = {
            "KVATLAS_ALERT_RULES": str(folder / "rules.yml"),
            "KVATLAS_SLACK_WEBHOOK_URL": silent.url,
            "KVATLAS_WEBHOOK_URL": silent.url,
            "KVATLAS_ALERTMANAGER_URL": f"http://127.0.0.1:{silent.port}",
            "KVATLAS_ALERT_STORE": str(folder / "alerts.sqlite"),
        }
        try:
            alone, alone_port = _agent.start(maps)
            processes.append(alone)
            beside, beside_port = _agent.start(maps, told)
            processes.append(beside)
            began = round(time.time() + SETTLED_SECONDS, 2)  # the same span of both, whenever each is asked
            ended = began + options.seconds
            time.sleep(SETTLED_SECONDS + options.seconds)
            pool = pool_of(beside_port)
            ends = {
                "nobody": np.diff(sample_times(alone_port, pool, began, ended)),
                "silent": np.diff(sample_times(beside_port, pool, began, ended)),
            }
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(20)
    figures = {
        who: {
            "samples": len(found) + 1,
            "interval_p50_seconds": round(float(np.percentile(found, 50)), 3),
            "interval_p99_seconds": round(float(np.percentile(found, 99)), 3),
            "interval_max_seconds": round(float(found.max()), 3),
        }
        for who, found in ends.items()
    }
    ratio = figures["silent"]["interval_p99_seconds"] / figures["nobody"]["interval_p99_seconds"]
    result = {"requests_left_unanswered": len(silent.requests), "p99_ratio": round(ratio, 3), "bar": BAR, **figures}
    silent.close()
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if ratio <= BAR and result["requests_left_unanswered"] else 1


if __name__ == "__main__":
    sys.exit(main())
