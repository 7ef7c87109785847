"""The delivering half of an agent as a process that may be killed: commits a fixed row of changes and delivers them.

    python benchmarks/_alert_agent.py FOLDER SLACK_URL WEBHOOK_URL CHANGES SEED

The store remembers how far it came, in one transaction with the changes themselves, so that each is committed once,
however often the process is killed. It ends with 0 when everything is committed and delivered.
"""

from __future__ import annotations

import json
import logging
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alerts.backoff import Backoff  # noqa: E402 - needs the path above
from alerts.grouping import Cadence  # noqa: E402
from alerts.model import Alert, Change, ChangeKind, Severity  # noqa: E402
from alerts.pipeline import Pipeline  # noqa: E402
from alerts.sinks.base import Sink  # noqa: E402
from alerts.sinks.secret_url import SecretUrl  # noqa: E402
from alerts.sinks.slack import SlackSink  # noqa: E402
from alerts.sinks.webhook import WebhookSink  # noqa: E402
from alerts.store import Store  # noqa: E402
from alerts.tally import Counted  # noqa: E402

ENGINES = 200
RULES = ("pool_nearly_full", "exhaustion_soon", "engine_stalled")
START = 1_790_000_000
CURSOR = "cursor"
TIMEOUT_SECONDS = 0.5
# As by default, made some fifty times quicker.
SLACK = Cadence(collect_seconds=0.02, group_seconds=1.0, per_second=40.0, storm_seconds=0.1)
WEBHOOK = replace(SLACK, most_changes=50)
BACKOFF = Backoff(first_seconds=0.02, longest_seconds=0.2)


@dataclass(frozen=True, slots=True)
class Step:
    """One change: the `episode`th firing of an alert (from 1), or its end."""

    number: int
    engine: int
    rule: str
    episode: int
    firing: bool

    @property
    def fingerprint(self) -> str:
        return f"{self.rule}/{self.engine}"

    def change(self, started: int) -> Change:
        alert = Alert(
            fingerprint=self.fingerprint,
            episode=f"{self.fingerprint}/{self.episode}",
            rule=self.rule,
            severity=Severity.WARNING if self.engine % 5 else Severity.CRITICAL,
            labels={"engine_id": f"engine-{self.engine}", "pool": "main"},
            value=0.5,
            value_text="50 %",
            threshold_text="over 30 %",
            summary=f"{self.fingerprint} number {self.episode}",
            meaning="A test.",
            action="Nothing.",
            started_at=float(START + started),
            ended_at=None if self.firing else float(START + self.number),
        )
        return Change(0, ChangeKind.FIRED if self.firing else ChangeKind.RESOLVED, alert, time.time())


def steps(changes: int, seed: int) -> Iterator[tuple[Step, int]]:
    """The fixed row: each with the number of the step that began its episode. The last ones end what is still open."""
    rng = random.Random(seed)
    episodes: dict[tuple[int, str], int] = {}
    opened: dict[tuple[int, str], int] = {}
    number = 0
    while number < changes:
        ending = len(opened) >= changes - number
        key = next(iter(opened)) if ending else (rng.randrange(ENGINES), rng.choice(RULES))
        if key in opened:
            yield Step(number, *key, episodes[key], False), opened.pop(key)
        else:
            episodes[key] = episodes.get(key, 0) + 1
            opened[key] = number
            yield Step(number, *key, episodes[key], True), number
        number += 1


def firings_in_doubt(path: Path) -> dict[str, int]:
    """By sink: firings in a message of which the process that was killed did not record what came of it."""
    if not path.exists():
        return {}
    found = {}
    with closing(sqlite3.connect(path)) as connection:
        for sink, standing in connection.execute("SELECT sink, standing FROM standing").fetchall():
            sequences = json.loads(standing)["in_flight"]
            marks = ",".join("?" * len(sequences))
            rows = connection.execute(
                f"SELECT change FROM waiting WHERE sink = ? AND sequence IN ({marks})",  # noqa: S608 - marks alone
                [sink, *sequences],
            )
            found[sink] = sum(json.loads(change)["kind"] == ChangeKind.FIRED for (change,) in rows)
    return found


def main() -> int:
    folder, slack_url, webhook_url = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    changes, seed = int(sys.argv[4]), int(sys.argv[5])
    path = folder / "alerts.sqlite"
    logging.basicConfig(level=logging.ERROR)
    doubt = firings_in_doubt(path)
    store = Store(path, ["slack", "webhook"])
    outcomes = store.tally.read()
    with (folder / "starts.jsonl").open("a") as starts:
        unsure = {sink: outcomes[sink, Counted.UNSURE.value] for sink in ("slack", "webhook")}
        starts.write(json.dumps({"unsure": unsure, "doubt": doubt, "durable": store.durable}) + "\n")
    sinks: list[Sink] = [
        SlackSink("slack", SecretUrl(slack_url, what="slack"), cadence=SLACK, timeout_seconds=TIMEOUT_SECONDS),
        WebhookSink(
            "webhook", SecretUrl(webhook_url, what="webhook"), cadence=WEBHOOK, timeout_seconds=TIMEOUT_SECONDS
        ),
    ]
    pipeline = Pipeline(store, sinks, backoff=BACKOFF, list_url=lambda: "http://agent.example/v1/alerts")
    pipeline.start()
    cursor = int(store.load_states().get(CURSOR, "0"))
    pace = random.Random()
    batch: list[Change] = []
    size = 1
    for step, started in steps(changes, seed):
        if step.number < cursor:
            continue
        batch.append(step.change(started))
        if len(batch) >= size or step.number == changes - 1:
            store.commit({CURSOR: str(step.number + 1)}, batch)
            batch, size = [], pace.randint(1, 40)
            time.sleep(pace.uniform(0.0, 0.12))
    while any(one.waiting or one.attempts for one in pipeline.health().values()):
        time.sleep(0.05)
    pipeline.stop()
    with (folder / "end.json").open("w") as end:
        told = {sink: len(store.backlog(sink).told) for sink in ("slack", "webhook")}
        json.dump({"told_open": told, "durable": store.durable}, end)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
