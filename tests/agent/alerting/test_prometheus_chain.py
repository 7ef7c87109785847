"""The other way: a real agent is scraped by Prometheus, which judges by our rules and tells Alertmanager, which tells
Slack by our example."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.slack_receiver import Answer, Receiver

SCRAPED = """\
global: {scrape_interval: 500ms, evaluation_interval: 500ms}
rule_files: [rules.yml]
alerting: {alertmanagers: [{static_configs: [{targets: ["127.0.0.1:ALERTMANAGER"]}]}]}
scrape_configs: [{job_name: kvatlas, static_configs: [{targets: ["AGENT"]}]}]
"""


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Starts programs in their own folder, where Alertmanager finds its templates, and ends them."""
    running: list[subprocess.Popen[bytes]] = []

    def run(tool: Path, *flags: str) -> None:
        with (tmp_path / f"{tool.name}.log").open("wb") as log:
            running.append(subprocess.Popen([tool, *flags], stdout=log, stderr=log, cwd=tool.parent))

    yield run
    for one in running:
        one.terminate()
    for one in running:
        one.wait(120)


def test_from_the_agent_over_prometheus_and_alertmanager_to_slack(
    start_pool: Callable[..., Any],
    start_agent: Callable[..., Any],
    start: Callable[..., None],
    wait_until: Callable[..., Any],
    prometheus_tools: Path,
    repository_root: Path,
    tmp_path: Path,
) -> None:
    """The waits and the threshold are shortened, and nothing else is changed."""
    deploy, slack = repository_root / "deploy" / "prometheus", Receiver(lambda body: Answer())
    pool = start_pool(live=0.65)
    agent = start_agent("--no-alert-log").url.removeprefix("http://")
    ports = {"prometheus": free_port(), "alertmanager": free_port()}
    rules = (deploy / "rules.yml").read_text().replace("for: 30s", "for: 0s").replace("ratio > 0.95", "ratio > 0.6")
    (tmp_path / "rules.yml").write_text(rules)
    scraped = SCRAPED.replace("ALERTMANAGER", str(ports["alertmanager"])).replace("AGENT", agent)
    (tmp_path / "prometheus.yml").write_text(scraped)
    (tmp_path / "webhook").write_text(slack.url)
    example = (
        (deploy / "alertmanager.yml")
        .read_text()
        .replace("/etc/alertmanager/secrets/slack-webhook", str(tmp_path / "webhook"))
    )
    (tmp_path / "alertmanager.yml").write_text(example)
    start(
        prometheus_tools / "alertmanager",
        f"--config.file={tmp_path / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'am'}",
        f"--web.listen-address=127.0.0.1:{ports['alertmanager']}",
        "--cluster.listen-address=",
    )
    start(
        prometheus_tools / "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
    )
    slack.wait_for(lambda: bool(slack.delivered))
    message = json.dumps(slack.delivered[0])
    assert "FIRING: KVAtlasPoolNearlyFull" in message
    assert "Pool kv of engine is 64.8" in message
    assert "Hardly a block is left" in message

    def firing() -> set[str]:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{ports['prometheus']}/api/v1/alerts") as reply,
        ):
            return {
                one["labels"]["alertname"] for one in json.load(reply)["data"]["alerts"] if one["state"] == "firing"
            }
        return set()

    wait_until(lambda: firing() == {"KVAtlasPoolNearlyFull"})
    pool.process.kill()
    wait_until(lambda: "KVAtlasEngineGone" in firing())
    slack.close()
