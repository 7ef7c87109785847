"""The other sinks: Alertmanager itself, Alertmanager's webhook payload, and the log; and Slack's odd answers."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alerts.grouping import Cadence
from alerts.model import Alert, Severity
from alerts.notice import Entry, News, Notice
from alerts.pipeline import Pipeline
from alerts.sinks.alertmanager import AlertmanagerSink
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink
from alerts.sinks.log import LogSink
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.slack import SlackSink
from alerts.sinks.webhook import WebhookSink, payload
from alerts.store import Store
from tests.alerts.conftest import START, TurnedClock, fired, make_alert, resolved
from tests.alerts.slack_receiver import Answer, Receiver

AWKWARD = {"engine_id": "a", "Größe": "x", "1st": "y", "empty": "", "lone": "\ud800\x00"}


def notice(*entries: Entry, **more: Any) -> Notice:
    return Notice(at=START, entries=entries, **more)


def firing(alert: Alert | None = None) -> Entry:
    return Entry(alert or make_alert(), News.FIRING, 1)


def over(alert: Alert | None = None) -> Entry:
    return Entry(replace(alert or make_alert(), ended_at=START), News.RESOLVED, 0, "back at 80 %", Severity.WARNING)


def alertmanager(url: str, **more: Any) -> AlertmanagerSink:
    return AlertmanagerSink("alertmanager", SecretUrl(url, what="x"), proxy="none", **more)


def test_a_firing_and_its_resolve_have_the_same_labels_and_start(receiver: Receiver) -> None:
    sink = alertmanager(f"http://127.0.0.1:{receiver.port}/prefix/")
    alert = make_alert(labels=AWKWARD)
    assert sink.send(notice(firing(alert))) == Sent()
    assert sink.send(notice(over(alert))) == Sent()
    assert [request.path for request in receiver.requests] == ["/prefix/api/v2/alerts"] * 2
    [one], [other] = receiver.delivered
    assert one["labels"] == other["labels"]
    assert one["labels"] == {
        "alertname": "pool_nearly_full",
        "severity": "warning",
        "engine_id": "a",
        "Gr__e": "x",
        "_1st": "y",
        "lone": "? ",
    }
    assert one["startsAt"] == other["startsAt"] == "2026-09-21T14:12:20.000Z"
    assert one["endsAt"] == "2026-09-21T14:17:20.000Z"  # four re-sends ahead
    assert other["endsAt"] == "2026-09-21T14:13:20.000Z"
    assert one["annotations"]["summary"] == "Pool main of a is nearly full"
    assert other["annotations"]["lasted"] == "1 min"


def test_a_severity_that_rose_ends_the_alert_of_the_one_before(receiver: Receiver) -> None:
    worse = Entry(make_alert(severity=Severity.CRITICAL), News.ESCALATED, 0, "", Severity.WARNING)
    assert alertmanager(f"http://127.0.0.1:{receiver.port}").send(notice(worse)) == Sent()
    [[now, before]] = receiver.delivered
    assert (now["labels"]["severity"], before["labels"]["severity"]) == ("critical", "warning")
    assert before["endsAt"] == "2026-09-21T14:13:20.000Z"
    assert now["endsAt"] > before["endsAt"]


def test_the_api_that_is_gone_is_not_asked_again(receiver: Receiver) -> None:
    receiver.script(Answer(410, "v1 is gone"), Answer(400, "bad"))
    sink = alertmanager(f"http://127.0.0.1:{receiver.port}")
    assert sink.send(notice(firing())) == Permanent(Reason.GONE, 410)
    assert sink.send(notice(firing())) == Permanent(Reason.INVALID_MESSAGE, 400)


def test_a_login_page_in_the_place_of_alertmanager_took_nothing(receiver: Receiver) -> None:
    receiver.script(Answer(200, "<html><title>Log in</title>"), Answer(200, ""))
    sink = alertmanager(f"http://127.0.0.1:{receiver.port}")
    assert sink.send(notice(firing())) == Retry(Reason.NOT_A_RECEIVER)
    assert sink.send(notice(firing())) == Sent()


@pytest.fixture
def real_alertmanager(prometheus_tools: Path, tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The program itself; asks it for its alerts. `.url` is where it listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    (tmp_path / "config.yml").write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    command = [
        str(prometheus_tools / "alertmanager"),
        f"--config.file={tmp_path / 'config.yml'}",
        f"--storage.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with (tmp_path / "log").open("w") as log:
        # In their folder, where it finds its templates.
        running = subprocess.Popen(command, stdout=log, stderr=log, cwd=prometheus_tools)
    url = f"http://127.0.0.1:{port}"

    def ask() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=60) as reply:
            found: list[dict[str, Any]] = json.load(reply)
            return found

    until = time.monotonic() + 120
    while time.monotonic() < until:
        if running.poll() is not None:
            pytest.fail((tmp_path / "log").read_text(), pytrace=False)
        with suppress(OSError):
            ask()
            break
        time.sleep(0.05)
    ask.url = url  # type: ignore[attr-defined]
    yield ask
    running.terminate()
    running.wait(120)


def test_alertmanager_takes_alerts_keeps_them_and_lets_them_go(real_alertmanager: Any, path: Path) -> None:
    cadence = Cadence.at_once(resend_seconds=0.3)
    sink = alertmanager(real_alertmanager.url, cadence=cadence)
    store = Store(path, ["alertmanager"])
    pipeline = Pipeline(store, [sink])
    pipeline.start()

    def until(condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        last = time.monotonic() + 120
        found: list[dict[str, Any]] = real_alertmanager()
        while not condition(found):
            assert time.monotonic() < last, found
            time.sleep(0.02)
            found = real_alertmanager()
        return found

    now = time.time()
    alert = make_alert(labels=AWKWARD | {"lone": "fine"}, started_at=now - 60)
    store.commit({}, [fired(alert, now)])
    [found] = until(lambda alerts: len(alerts) == 1)
    assert found["labels"]["alertname"] == "pool_nearly_full"
    assert found["status"]["state"] == "active"
    assert found["generatorURL"] == "http://agent.example/engines/a"
    # It would be taken for over after four times 0.3 s, were it not sent again.
    first_end = found["endsAt"]
    [again] = until(lambda alerts: bool(alerts) and alerts[0]["endsAt"] > first_end)
    assert again["startsAt"] == found["startsAt"]
    assert again["fingerprint"] == found["fingerprint"]
    store.commit({}, [resolved(alert, time.time())])
    until(lambda alerts: not alerts)
    assert pipeline.outcomes()["alertmanager", "retried"] == 0
    pipeline.stop()
    store.close()


def test_the_webhook_payload_is_alertmanagers(receiver: Receiver) -> None:
    sink = WebhookSink("pager", SecretUrl(receiver.url, what="x"), proxy="none")
    other = make_alert("b", link="javascript:alert(1)")
    one = notice(firing(), over(other), groups={"a": 1, "b": 1}, list_url="http://agent.example/v1/alerts")
    assert sink.send(one) == Sent()
    [body] = receiver.delivered
    assert {name: value for name, value in body.items() if name != "alerts"} == {
        "version": "4",
        "groupKey": "{}:{a,b}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "pager",
        "groupLabels": {},
        "commonLabels": {
            "alertname": "pool_nearly_full",
            "severity": "warning",
            "model": "llama",
            "pool": "main",
        },
        "commonAnnotations": {
            "value": "97 %",
            "threshold": "over 95 %",
            "description": "New requests wait, and running ones are soon preempted.",
            "action": "Send fewer requests, or give the pool more memory.",
            "runbook_url": "https://runbooks.example/pool_nearly_full",
        },
        "externalURL": "http://agent.example/v1/alerts",
    }
    first, second = body["alerts"]
    assert (first["status"], first["endsAt"], first["annotations"]["firings"]) == (
        "firing",
        "0001-01-01T00:00:00Z",
        "1",
    )
    assert (second["status"], second["endsAt"], second["generatorURL"]) == ("resolved", "2026-09-21T14:13:20.000Z", "")
    assert first["fingerprint"] == "pool_nearly_full/a"


def test_a_payload_of_resolves_is_resolved_and_counts_what_it_leaves_out() -> None:
    body = payload(notice(over(), counted={"a": 3, "b": 4}), "x")
    assert (body["status"], body["truncatedAlerts"]) == ("resolved", 7)


def test_the_log_has_a_line_for_each_alert() -> None:
    stream = io.StringIO()
    sink = LogSink("log", stream)
    upheld = Entry(make_alert("c"), News.UPHELD)
    hostile = make_alert("b", summary="two\nlines \u2028 and \ud800")
    assert sink.send(notice(firing(), firing(hostile), over(), upheld, counted={"r": 2})) == Sent()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["alert", "alert", "alert", "alerts_counted"]
    assert lines[0]["status"] == "firing"
    assert lines[0]["labels"] == {"engine_id": "a", "model": "llama", "pool": "main"}
    assert lines[2]["ended_at"] == "2026-09-21T14:13:20.000Z"
    assert lines[3]["firings"] == 2
    stream.close()
    assert sink.send(notice(firing())) == Retry(Reason.BROKEN)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200, "ok"), Sent()),
        (Answer(200, "<!DOCTYPE html><title>Log in</title>"), Retry(Reason.NOT_A_RECEIVER)),
        (Answer(200, "\n<!-- gateway --><html>"), Retry(Reason.NOT_A_RECEIVER)),
        (Answer(200, '{"ok": false, "error": "invalid_auth"}'), Retry(Reason.NOT_A_RECEIVER)),
        (Answer(200, '{"ok": true}'), Sent()),
        (Answer(200, "no_service"), Permanent(Reason.GONE, 200)),
        (Answer(200, "action_prohibited"), Permanent(Reason.FORBIDDEN, 200)),
        (Answer(200, "invalid_blocks"), Shrink(Reason.INVALID_MESSAGE, 200)),
        (Answer(400, "invalid_token"), Permanent(Reason.GONE, 400)),
        (Answer(403, "action_prohibited"), Permanent(Reason.FORBIDDEN, 403)),
        (Answer(404, "channel_not_found"), Permanent(Reason.GONE, 404)),
        (Answer(410, "channel_is_archived"), Permanent(Reason.GONE, 410)),
        (Answer(429, '{"retry_after":1}', {"Retry-After": "30"}), Retry(Reason.RATE_LIMITED, 30.0, 429)),
        (Answer(500, "rollup_error"), Retry(Reason.SERVER_ERROR, None, 500)),
        (Answer(drop=True), Retry(Reason.BROKEN)),
    ],
)
def test_what_slacks_answers_mean(slack: Receiver, answer: Answer, outcome: Outcome) -> None:
    slack.script(answer)
    sink = SlackSink("slack", SecretUrl(slack.url, what="x"), proxy="none", clock=TurnedClock())
    assert sink.send(notice(firing())) == outcome
    assert len(slack.requests) == 1
