"""From a commit to a message at a receiver that holds to Slack's limits, over real sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alerts.backoff import Backoff
from alerts.grouping import Cadence
from alerts.pipeline import Pipeline
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.slack import SlackSink
from alerts.store import Store
from tests.alerts.conftest import fired, make_alert, resolved
from tests.alerts.slack_receiver import Answer, Receiver

QUICK = Cadence(collect_seconds=0.02, group_seconds=0.05, per_second=1000, burst=1000, storm_seconds=0.05)
TITLE = re.compile("^(?:WARNING|RESOLVED): Pool main", re.MULTILINE)
Deliver = Callable[..., tuple[Store, Pipeline]]


@pytest.fixture
def deliver(path: Path) -> Iterator[Deliver]:
    """Starts delivery to receivers by name; everything is stopped at the end."""
    started: list[tuple[Store, Pipeline]] = []

    def start(cadence: Cadence = QUICK, timeout: float = 60.0, **receivers: Receiver) -> tuple[Store, Pipeline]:
        store = Store(path, receivers)
        sinks = [
            SlackSink(name, SecretUrl(one.url, what=name), cadence=cadence, timeout_seconds=timeout, proxy="none")
            for name, one in receivers.items()
        ]
        pipeline = Pipeline(store, sinks, backoff=Backoff(first_seconds=0.01, longest_seconds=0.05), random=Random(1))
        pipeline.start()
        started.append((store, pipeline))
        return store, pipeline

    yield start
    for store, pipeline in started:
        pipeline.stop()
        store.close()


def until(condition: Callable[[], bool]) -> None:
    """Of what no request tells: it is looked at again and again."""
    last = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


def texts(body: Any) -> list[str]:
    """Every text of a message's blocks."""
    found = [block["text"]["text"] for block in body.get("blocks", []) if "text" in block]
    return found + [element["text"] for block in body.get("blocks", []) for element in block.get("elements", [])]


def test_a_firing_and_its_resolve_are_two_messages(deliver: Deliver, slack: Receiver) -> None:
    store, _ = deliver(slack=slack)
    store.commit({}, [fired(make_alert())])
    slack.wait_for(lambda: len(slack.requests) == 1)
    store.commit({}, [resolved(make_alert())])
    slack.wait_for(lambda: len(slack.requests) == 2)
    first, second = slack.delivered
    whole = "\n".join(texts(first))
    for part in (
        "nearly full",
        "engine_id a",
        "97 %",
        "over 95 %",
        "since",
        "What it means",
        "What to do",
        "/engines/a",
    ):
        assert part in whole
    assert "RESOLVED" in second["text"]
    assert "lasted 1 min" in "\n".join(texts(second))
    assert "back at 80 %" in "\n".join(texts(second))


def test_a_storm_of_500_is_a_few_messages(deliver: Deliver, slack: Receiver) -> None:
    store, _ = deliver(Cadence(collect_seconds=0.2), slack=slack)
    alerts = [make_alert(f"e{number}", rule=f"rule_{number % 7}") for number in range(500)]
    store.commit({}, [fired(alert) for alert in alerts])
    slack.wait_for(lambda: len(slack.requests) == 1)
    [message] = slack.delivered
    named = [text for text in texts(message) if text.startswith("WARNING: Pool main of")]
    assert len(named) == 20
    counts = next(text for text in texts(message) if "480 more" in text)
    assert sum(int(line.split(": ")[1].split()[0]) for line in counts.splitlines()[1:]) == 500


def test_429_is_waited_out_and_told_once(deliver: Deliver, slack: Receiver) -> None:
    store, pipeline = deliver(slack=slack)
    slack.script(Answer(429, '{"retry_after":1}', {"Retry-After": "1"}), Answer(429, "", {"Retry-After": "0"}))
    store.commit({}, [fired(make_alert())])
    slack.wait_for(lambda: len(slack.delivered) == 1)
    assert [request.status for request in slack.requests] == [429, 429, 200]
    assert slack.requests[1].at - slack.requests[0].at >= 1.0
    store.commit({}, [resolved(make_alert())])
    slack.wait_for(lambda: len(slack.delivered) == 2)
    assert pipeline.outcomes()["slack", "retried"] == 2


def test_a_revoked_webhook_is_asked_once_and_holds_nobody_up(
    deliver: Deliver, slack: Receiver, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    store, pipeline = deliver(slack=slack, other=receiver)
    slack.script(Answer(404, "no_service"))
    store.commit({}, [fired(make_alert("a"))])
    slack.wait_for(lambda: len(slack.requests) == 1)
    receiver.wait_for(lambda: len(receiver.delivered) == 1)
    store.commit({}, [fired(make_alert("b"))])
    receiver.wait_for(lambda: len(receiver.delivered) == 2)
    until(lambda: pipeline.outcomes()["slack", "dead_lettered"] == 1)
    assert len(slack.requests) == 1
    assert pipeline.health()["slack"].last_failure == "gone"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["sink_refuses_all"]


def test_a_refused_form_is_tried_once_as_plain_text(deliver: Deliver, slack: Receiver) -> None:
    store, pipeline = deliver(slack=slack)
    slack.script(Answer(400, "invalid_blocks"))
    store.commit({}, [fired(make_alert())])
    slack.wait_for(lambda: len(slack.delivered) == 1)
    assert "blocks" not in slack.delivered[0]
    assert "nearly full" in slack.delivered[0]["text"]
    assert pipeline.outcomes()["slack", "shrunk"] == 1


def test_one_that_never_answers_holds_up_no_other_and_nobody_who_commits(
    deliver: Deliver, slack: Receiver, receiver: Receiver
) -> None:
    slack.choose = lambda: Answer(hang=True)
    store, _ = deliver(slack=slack, other=receiver)
    for number in range(20):
        store.commit({}, [fired(make_alert(f"e{number}"))])
    receiver.wait_for(lambda: sum(body["text"].count("Pool main of e") for body in receiver.delivered) >= 5)
    assert len(slack.requests) <= 1


def test_a_restart_tells_what_waited_and_nothing_twice(deliver: Deliver, slack: Receiver) -> None:
    store, pipeline = deliver(slack=slack)
    store.commit({"a": "firing"}, [fired(make_alert("a"))])
    slack.wait_for(lambda: len(slack.delivered) == 1)
    pipeline.stop()
    store.commit({"a": None, "b": "firing"}, [resolved(make_alert("a")), fired(make_alert("b"))])
    store.close()
    again, pipeline = deliver(slack=slack)
    assert again.load_states() == {"b": "firing"}
    slack.wait_for(lambda: sum(len(TITLE.findall(body["text"])) for body in slack.delivered) == 3)
    told = "\n".join(body["text"] for body in slack.delivered[1:])
    assert "RESOLVED: Pool main of a" in told
    assert "WARNING: Pool main of b" in told
    assert "WARNING: Pool main of a" not in told
    assert pipeline.outcomes()["slack", "unsure"] == 0
