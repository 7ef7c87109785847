"""deploy/prometheus/alertmanager.yml in a real Alertmanager: what it holds back, and what its messages can do."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.alerting.rule_files import default_rules
from tests.alerts.slack_receiver import Answer, Receiver

POOL = {"engine_id": "vllm-7", "model": "m", "pool": "kv", "rank": "tp0"}
PAIRS = {
    "KVAtlasPoolExhaustionNear": "KVAtlasPoolExhaustion",
    "KVAtlasHeadroomNearlyGone": "KVAtlasHeadroomBreached",
    "KVAtlasPreemptionStormSevere": "KVAtlasPreemptionStorm",
}
MARKUP = "<!channel> <@U123> <https://evil.example|here> https://evil.example a&b @here"


class Alertmanager:
    """Runs the example, with the waits shortened and the secret file in `folder`."""

    def __init__(self, tools: Path, example: str, folder: Path, webhook: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            port = server.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api/v2/alerts"
        (folder / "webhook").write_text(webhook)
        example = example.replace("/etc/alertmanager/secrets/slack-webhook", str(folder / "webhook"))
        (folder / "alertmanager.yml").write_text(example)
        self.running = subprocess.Popen(
            [
                tools / "alertmanager",
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tools,
        )

    def post(self, *alerts: dict[str, Any]) -> None:
        body = json.dumps(alerts).encode("ascii")
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(self.url, body, headers)).close()

    def held_back(self) -> dict[str, bool]:
        """By name, whether another alert inhibits it."""
        with suppress(OSError), urllib.request.urlopen(self.url) as reply:
            return {one["labels"]["alertname"]: bool(one["status"]["inhibitedBy"]) for one in json.load(reply)}
        return {}

    def answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url) as reply:
            return bool(reply.status == 200)
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def slack() -> Iterator[Receiver]:
    receiver = Receiver(lambda body: Answer())
    yield receiver
    receiver.close()


@pytest.fixture
def run(
    prometheus_tools: Path, repository_root: Path, tmp_path: Path, slack: Receiver
) -> Iterator[Callable[..., Alertmanager]]:
    running: list[Alertmanager] = []

    def start(change: Callable[[str], str] = lambda example: example) -> Alertmanager:
        example = (repository_root / "deploy" / "prometheus" / "alertmanager.yml").read_text()
        made = Alertmanager(prometheus_tools, change(example), tmp_path, slack.url)
        running.append(made)
        wait_until(made.answers)
        return made

    yield start
    for one in running:
        one.running.terminate()
        one.running.wait(60)


def alert(name: str, **annotations: str) -> dict[str, Any]:
    return {"labels": {**POOL, "alertname": name, "severity": "warning"}, "annotations": annotations}


@pytest.mark.parametrize(
    ("source", "target"), [("engine-gone", "pool-nearly-full"), ("KVAtlasEngineGone", "KVAtlasPoolNearlyFull")]
)
def test_an_engine_that_is_gone_holds_the_pool_s_other_alerts_back(
    run: Callable[..., Alertmanager], source: str, target: str
) -> None:
    """Whether the agent itself says so, with its rules' names, or Prometheus with those of rules.yml."""
    alertmanager = run()
    alertmanager.post(alert(target))
    wait_until(lambda: alertmanager.held_back() == {target: False})  # the negative control
    alertmanager.post(alert(source))
    wait_until(lambda: alertmanager.held_back() == {target: True, source: False})


def test_the_worse_of_two_rules_on_one_number_is_told_alone(run: Callable[..., Alertmanager]) -> None:
    alertmanager = run()
    for mild in PAIRS.values():
        alertmanager.post(alert(mild))
    wait_until(lambda: alertmanager.held_back() == dict.fromkeys(PAIRS.values(), False))  # the negative control
    for worse in PAIRS:
        elsewhere = alert(worse)
        elsewhere["labels"]["rank"] = "tp1"  # of another pool: it holds nothing back
        alertmanager.post(elsewhere)
    wait_until(lambda: set(alertmanager.held_back()) == {*PAIRS, *PAIRS.values()})
    assert not any(alertmanager.held_back().values())
    for worse in PAIRS:
        alertmanager.post(alert(worse))
    held = dict.fromkeys(PAIRS, False) | dict.fromkeys(PAIRS.values(), True)
    wait_until(lambda: alertmanager.held_back() == held)


def test_every_name_in_the_example_is_that_of_a_rule(repository_root: Path) -> None:
    folder = repository_root / "deploy" / "prometheus"
    groups = yaml.safe_load((folder / "rules.yml").read_text())["groups"]
    there = {rule.name for rule in default_rules()}
    there |= {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    for rule in yaml.safe_load((folder / "alertmanager.yml").read_text())["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            pattern = re.search(r'"(.*)"', matcher)
            assert pattern is not None
            for alternative in re.split(r"\|(?![^(]*\))", pattern[1]):
                assert any(re.fullmatch(alternative, name) for name in there), alternative


def test_nothing_in_a_model_s_name_acts_in_slack(run: Callable[..., Alertmanager], slack: Receiver) -> None:
    run().post(alert("pool-nearly-full", summary=f"Pool of {MARKUP}", description=MARKUP, action="Nothing."))
    slack.wait_for(lambda: bool(slack.delivered))
    [attachment] = slack.delivered[0]["attachments"]
    assert "&lt;!channel&gt;" in attachment["text"]
    assert acting(attachment["text"]) == []
    assert not {"text", "title"} & set(attachment["mrkdwn_in"])


def test_markup_that_is_not_escaped_would_be_noticed(run: Callable[..., Alertmanager], slack: Receiver) -> None:
    plain = run(lambda example: re.sub(r'\| reReplaceAll "[^"]*" "[^"]*"', "", example))
    plain.post(alert("pool-nearly-full", summary=MARKUP, description="", action=""))
    slack.wait_for(lambda: bool(slack.delivered))
    assert acting(slack.delivered[0]["attachments"][0]["text"])


def acting(text: str) -> list[str]:
    """What Slack would act on: anything in angle brackets, addresses and names with an at sign."""
    return re.findall(r"<[^>]*>|\w://|@\w", text)
