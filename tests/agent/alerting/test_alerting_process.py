"""A whole agent: from a map to Slack, over a kill -9, and from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.client import AgentClient
from tests.alerts.slack_receiver import Answer, Receiver

FULL = "rules:\n  - name: pool-nearly-full\n    above: 60%\n    exit: 50%\n    for: 0s\n"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yml"
    path.write_text(FULL)
    return path


@pytest.fixture
def alertmanager() -> Iterator[Receiver]:
    """Takes what it is posted."""
    receiver = Receiver(lambda body: Answer(200, ""))
    yield receiver
    receiver.close()


def test_an_alert_outlives_a_kill_and_is_told_once(
    start_pool: Callable[..., Any],
    start_agent: Callable[..., Any],
    client_of: Callable[..., AgentClient],
    wait_until: Callable[..., Any],
    slack: Receiver,
    alertmanager: Receiver,
    rules: Path,
    tmp_path: Path,
) -> None:
    """The pool empties while the agent is down. The next one tells its end, with the labels of its beginning, and its
    beginning not again; Slack is told the end too, once the engine's minute is over."""
    flags = ("--alert-rules", str(rules), "--alert-store", str(tmp_path / "alerts.sqlite"))
    environment = {
        "KVATLAS_SLACK_WEBHOOK_URL": slack.url,
        "KVATLAS_ALERTMANAGER_URL": f"http://127.0.0.1:{alertmanager.port}",
    }
    pool = start_pool(live=0.65)
    agent = start_agent(*flags, environment=environment)
    client = client_of(agent)
    wait_until(lambda: {one.outcomes["sent"] for one in client.alerts().sinks} == {1})
    agent.process.kill()
    agent.process.wait()
    pool.process.kill()
    pool.process.wait()
    start_pool(live=0.2)
    again = client_of(start_agent(*flags, environment=environment))
    over = wait_until(lambda: again.alerts().recent)
    assert [(one.rule, one.reason) for one in over] == [("pool-nearly-full", "it is at 20 % now")]
    ((fired,),) = alertmanager.delivered[:1]

    def resolved() -> list[Any]:
        """What was posted with an end that has come: a firing alert has one in four minutes."""
        return [one for body in alertmanager.delivered for one in body if one["endsAt"] < fired["endsAt"]]

    alertmanager.wait_for(lambda: bool(resolved()))
    assert resolved()[0]["labels"] == fired["labels"]
    assert resolved()[0]["startsAt"] == fired["startsAt"]
    wait_until(lambda: {one.name: one.waiting for one in again.alerts().sinks}["slack"] == 1)
    (message,) = slack.delivered
    assert message["text"].startswith("WARNING: Pool kv of engine is 65 % full (org/model, dp0.tp0.pp0)")


def test_from_the_command_line(
    start_pool: Callable[..., Any],
    start_agent: Callable[..., Any],
    wait_until: Callable[..., Any],
    rules: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_pool(live=0.65)
    agent = start_agent("--alert-rules", str(rules))

    def kvatlas(*words: str, status: int = 0) -> str:
        assert cli.main(["alerts", *words, "--agent", agent.url]) == status
        captured = capsys.readouterr()
        return captured.out if status == 0 else captured.err

    def open_alerts() -> dict[str, Any]:
        return {one["rule"]: one for one in json.loads(kvatlas("list", "--json"))["open"]}

    wait_until(lambda: "pool-nearly-full" in open_alerts())
    assert open_alerts()["pool-nearly-full"]["state"] == "firing"
    text = kvatlas("list")
    assert "warning  firing   Pool kv of engine is 65 % full" in text
    made = json.loads(
        kvatlas(
            "mute", "--rule", "pool-nearly-full", "--for", "2h", "--author", "ann", "--comment", "a drill", "--json"
        )
    )
    assert made["expires_unix"] - made["created_unix"] == 7200
    assert "pool-nearly-full, for 2 h more, by ann: a drill" in kvatlas("mutes")
    assert kvatlas("unmute", made["id"]) == "nothing is muted\n"
    assert "no mute" in kvatlas("unmute", made["id"], status=1)
    assert "did you mean tail-waste?" in kvatlas("mute", "--rule", "tail-wate", status=1)
    assert "--for 'soon' is no duration" in kvatlas("mute", "--rule", "tail-waste", "--for", "soon", status=2)
    assert "everything cannot be muted" in kvatlas("mute", status=2)


def test_a_rules_file_is_checked(rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["alerts", "check", str(rules), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], facts["changed"], facts["added"]) == ("kvatlas.alerts-check/v1", ["pool-nearly-full"], [])
    assert cli.main(["alerts", "check", str(rules)]) == 0
    assert "changed: pool-nearly-full" in capsys.readouterr().out
    rules.write_text(FULL.replace("60%", "much").replace("for: 0s", "fore: 0s"))
    assert cli.main(["alerts", "check", str(rules)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: {rules}:3: above: 'much' is no number in ratio; write 0.3 or 30%",
        f"{rules}:5: a rule has no 'fore'; did you mean for?",
    ]


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (Answer(), 0, "slack took the message"),
        (Answer(404, "no_service"), 1, "slack did not take the message (gone, HTTP 404); the agent would give it up"),
        (Answer(503, "later"), 1, "the agent would try again"),
    ],
)
def test_a_receiver_is_tried(
    slack: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: Answer,
    status: int,
    said: str,
) -> None:
    monkeypatch.setenv("KVATLAS_SLACK_WEBHOOK_URL", slack.url)
    slack.script(answer)
    assert cli.main(["alerts", "test", "slack"]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert slack.requests[0].body["text"].startswith("INFO: This is a test of KVAtlas")


def test_a_receiver_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("KVATLAS_SLACK_WEBHOOK_URL", raising=False)
    assert cli.main(["alerts", "test", "slack"]) == 2
    assert "set KVATLAS_SLACK_WEBHOOK_URL" in capsys.readouterr().err
    assert cli.main(["alerts", "test", "pager"]) == 2
    assert "log, slack, alertmanager, webhook" in capsys.readouterr().err
    assert cli.main(["alerts", "test", "https://hooks.example/services/T0/B0/secret"]) == 2
    assert "secret" not in capsys.readouterr().err
    monkeypatch.setenv("KVATLAS_SLACK_WEBHOOK_URL", "http://hooks.example/services/T0/B0/secret")
    assert cli.main(["alerts", "test", "slack"]) == 2
    told = capsys.readouterr().err
    assert "https" in told
    assert "secret" not in told
