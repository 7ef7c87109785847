"""Whether alerts get through: 10,000 changes, receivers that fail half of all requests, and 20 kills in between.

200 engines, 3 rules. Both receivers fail every other request at random: 500, 429 with Retry-After, a connection that
breaks, no answer at all. The process is killed with -9 at random moments, and every second time just as a message was
taken, where a repetition cannot be told from a first attempt. Pace and back-off are some fifty times quicker than by
default. Then every firing must have been named or counted, no resolve may stand before its firing, no alert may be left
open, and what came twice must have been in flight at a kill.

    python benchmarks/alert_delivery.py [--changes 10000] [--kills 20] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._alert_agent import START, Step, steps  # noqa: E402 - needs the path above
from tests.alerts.slack_receiver import Answer, Receiver, slack_judge  # noqa: E402

AGENT = Path(__file__).with_name("_alert_agent.py")
TITLE = re.compile(
    r"^(?:INFO|WARNING|CRITICAL|FIRED AND RESOLVED|RESOLVED|STILL \w+|NOW \w+): (\S+) number (\d+)$", re.MULTILINE
)
TIMES = re.compile(r"fired (\d+) times? since the last message")
COUNTED = re.compile(r"\(([\d,]+) new firings?\)")
FAILURES = (
    Answer(500, "rollup_error"),
    Answer(503, "", {"Retry-After": "0.05"}),
    Answer(429, '{"retry_after":1}', {"Retry-After": "0.1"}),
    Answer(drop=True),
)
WEBHOOK_FAULTS = ("lost", "resolved_before_fired", "never_told", "left_open", "told_twice_without_cause")
HANGING_SHARE = 0.04  # of the failures: each costs the whole timeout


class Chaos:
    """Fails half of the requests, and says when one was taken."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.taken = threading.Event()

    def choose(self) -> Answer | None:
        with self._lock:
            if self._random.random() < 0.5:
                return Answer(hang=True) if self._random.random() < HANGING_SHARE else self._random.choice(FAILURES)
        self.taken.set()
        return None


def drive(folder: Path, changes: int, kills: int, seed: int, receivers: dict[str, Receiver], chaos: Chaos) -> int:
    """Run the agent, kill it so often, and let the last one end by itself. Returns the number of kills that hit."""
    rng = random.Random(seed + 1)
    command = [sys.executable, str(AGENT), str(folder), receivers["slack"].url, receivers["webhook"].url]
    done = 0
    while True:
        agent = subprocess.Popen([*command, str(changes), str(seed)])
        if done == kills:
            if agent.wait() != 0:
                raise SystemExit(f"the agent ended with {agent.returncode}")
            return done
        time.sleep(rng.uniform(0.6, 1.6))
        if done % 2:
            chaos.taken.clear()
            chaos.taken.wait(5.0)
        agent.send_signal(signal.SIGKILL)
        if agent.wait() == 0:
            raise SystemExit(f"everything was delivered after {done} kills; give more changes")
        done += 1


def judge_webhook(bodies: list[Any], expected: dict[str, list[Step]], doubt: int) -> dict[str, Any]:
    """Payload by payload and alert by alert: which of its firings had been told before, and which were by this one."""
    numbers = {step.number: step for rows in expected.values() for step in rows if step.firing}
    told: Counter[str] = Counter()
    last: dict[str, str] = {}
    found: Counter[str] = Counter()
    for body in bodies:
        for alert in body["alerts"]:
            fingerprint, firings = alert["fingerprint"], int(alert["annotations"]["firings"])
            began = round(datetime.fromisoformat(alert["startsAt"]).timestamp()) - START
            episode = numbers[began].episode
            before = told[fingerprint]
            if before < episode - firings:
                found["lost" if firings else "resolved_before_fired"] += episode - firings - before
            found["told_twice"] += min(firings, max(0, before - (episode - firings)))
            told[fingerprint] = max(before, episode)
            last[fingerprint] = alert["status"]
        found["messages"] += 1
        found["counted"] += body["truncatedAlerts"]
    for fingerprint, rows in expected.items():
        found["never_told"] += max(0, rows[-1].episode - told[fingerprint])
        found["left_open"] += last.get(fingerprint) != "resolved"
    found["told_twice_without_cause"] = max(0, found["told_twice"] - doubt)
    return dict(found)


def firings_of(body: Any) -> int:
    """Firings that a Slack message names or counts."""
    texts = [block["text"]["text"] for block in body.get("blocks", []) if "text" in block]
    if counts := [text for text in texts if "by rule:" in text or text.startswith("By rule")]:
        return sum(int(number.replace(",", "")) for text in counts for number in COUNTED.findall(text))
    # One alert alone has its title in the header, and all else of it in the section behind that.
    alone = len(texts) > 1 and not TITLE.search(texts[1])
    return _firings_of_section("\n".join(texts)) if alone else sum(map(_firings_of_section, texts))


def _firings_of_section(text: str) -> int:
    if times := TIMES.search(text):
        return int(times.group(1))
    title = TITLE.search(text)
    return int(bool(title) and not text.startswith(("RESOLVED", "STILL", "NOW")))


def judge_slack(bodies: list[Any], expected: dict[str, list[Step]], doubt: int) -> dict[str, Any]:
    """Firings that were named or counted, against those that there were, and resolves against firings by name."""
    told = sum(firings_of(body) for body in bodies)
    fired = sum(step.firing for rows in expected.values() for step in rows)
    return {
        "messages": len(bodies),
        "firings": fired,
        "told": told,
        "lost": max(0, fired - told),
        "told_twice": max(0, told - fired),
        "told_twice_without_cause": max(0, told - fired - doubt),
    }


def main() -> int:
    """Show the result; the exit status is 1 where something was lost, untimely or twice without cause."""
    parser = argparse.ArgumentParser(description="Kill a delivering agent between failing receivers.")
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    expected: dict[str, list[Step]] = {}
    for step, _ in steps(options.changes, options.seed):
        expected.setdefault(step.fingerprint, []).append(step)
    chaos = Chaos(options.seed)
    receivers = {"slack": Receiver(slack_judge), "webhook": Receiver(lambda _: Answer())}
    for receiver in receivers.values():
        receiver.choose = chaos.choose
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as name:
        folder = Path(name)
        kills = drive(folder, options.changes, options.kills, options.seed, receivers, chaos)
        starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
        end = json.loads((folder / "end.json").read_text())
    seconds = time.monotonic() - began
    unsure = {sink: sum(start["unsure"][sink] for start in starts) for sink in receivers}
    doubt = {sink: sum(start["doubt"].get(sink, 0) for start in starts) for sink in receivers}
    slack = judge_slack(receivers["slack"].delivered, expected, doubt["slack"])
    webhook = judge_webhook(receivers["webhook"].delivered, expected, doubt["webhook"])
    statuses = Counter(request.status for one in receivers.values() for request in one.requests)
    result = {
        "changes": options.changes,
        "kills": kills,
        "seconds": round(seconds, 1),
        "requests": {str(status or "none"): number for status, number in sorted(statuses.items())},
        "refused_as_invalid": statuses[400],
        "messages_in_flight_at_a_kill": unsure,
        "firings_in_those": doubt,
        "slack": slack,
        "webhook": webhook,
        "told_open_at_the_end": end["told_open"],
        "always_durable": all(start["durable"] for start in starts) and end["durable"],
    }
    for receiver in receivers.values():
        receiver.close()
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    faults = [
        *(slack[name] for name in ("lost", "told_twice_without_cause")),
        *(webhook.get(name, 0) for name in WEBHOOK_FAULTS),
        statuses[400],
        *end["told_open"].values(),
    ]
    return 1 if any(faults) or not result["always_durable"] else 0


if __name__ == "__main__":
    sys.exit(main())
