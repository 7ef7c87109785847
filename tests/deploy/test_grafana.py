"""deploy/grafana: every query is PromQL, of metrics that the agent exports, and a real Prometheus answers it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.catalogue import catalogue
from tests.agent.conftest import Agent, PoolProcess
from tests.deploy.kustomize import render

NAME = re.compile(r"\bkvatlas[_:][\w:]+")
DASHBOARDS = ("fleet", "pool")
PATIENCE_SECONDS = 120.0
# What a healthy pool that is hardly used shows nothing of.
MAY_BE_EMPTY = (
    "kvatlas_pool_exhaustion_seconds",
    "kvatlas:model_exhaustion_seconds:min",
    "kvatlas:prefix_hit:ratio2m",
    "kvatlas:model_prefix_hit:ratio2m",
    "_up{",  # engines that are down
    "histogram_quantile",
)


def read(repository_root: Path, name: str) -> dict[str, Any]:
    text = (repository_root / "deploy" / "grafana" / f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Every expression of a panel, and those by which the choices are listed, with everything chosen."""
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    definitions = [one.get("definition", "") for one in dashboard["templating"]["list"]]
    choices = [re.fullmatch(r"label_values\((.*), (\w+)\)", one) for one in definitions]
    expressions += [f"count by ({found[2]}) ({found[1]})" for found in choices if found]
    return [re.sub(r"\$\w+", ".*", one) for one in expressions]


def rules(repository_root: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((repository_root / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    return [rule for group in groups["groups"] for rule in group["rules"]]


def unknown_names(text: str, repository_root: Path) -> set[str]:
    """Names of ours that neither the agent exports nor a rule records."""
    known = {rule["record"] for rule in rules(repository_root) if "record" in rule}
    for family in (one for part in catalogue() for one in part.families):
        known |= {family.name}
        if family.kind == "histogram":
            known |= {f"{family.name}_{ending}" for ending in ("bucket", "sum", "count")}
    return set(NAME.findall(text)) - known


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_name_is_one_that_the_agent_exports_or_a_rule_records(repository_root: Path, name: str) -> None:
    assert unknown_names("\n".join(queries(read(repository_root, name))), repository_root) == set()


def test_rules_and_autoscalers_speak_of_no_other_names(repository_root: Path) -> None:
    texts = [rule["expr"] for rule in rules(repository_root)]
    folder = repository_root / "deploy" / "kubernetes" / "examples"
    (scaled,) = render(folder / "keda")
    texts += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    adapter = yaml.safe_load((folder / "hpa" / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    texts += [rule["seriesQuery"] for rule in adapter["rules"]]
    assert unknown_names("\n".join(texts), repository_root) == set()
    (scaler,) = render(folder / "hpa")
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == adapter["rules"][0]["name"]["as"]


def test_a_name_that_is_not_there_is_noticed(repository_root: Path) -> None:
    assert unknown_names("rate(kvatlas_pool_block[1m]) + kvatlas:nothing:sum", repository_root) == {
        "kvatlas_pool_block",
        "kvatlas:nothing:sum",
    }


def check(promtool: Path, expressions: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    made = [{"record": f"query:{number}", "expr": one} for number, one in enumerate(expressions)]
    path = folder / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}), encoding="utf-8")
    return subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)


def test_every_query_is_promql(repository_root: Path, promtool: Path, tmp_path: Path) -> None:
    expressions = [one for name in DASHBOARDS for one in queries(read(repository_root, name))]
    (scaled,) = render(repository_root / "deploy" / "kubernetes" / "examples" / "keda")
    expressions += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    done = check(promtool, expressions, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check(promtool, ["sum(kvatlas_engine_up"], tmp_path).returncode != 0


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_well_formed(repository_root: Path, name: str) -> None:
    dashboard = read(repository_root, name)
    panels = dashboard["panels"]
    assert dashboard["uid"] == f"kvatlas-{name}"
    assert len({panel["id"] for panel in panels}) == len(panels)
    for number, panel in enumerate(panels):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for other in panels[number + 1 :]:
            there = other["gridPos"]
            apart_x = place["x"] + place["w"] <= there["x"] or there["x"] + there["w"] <= place["x"]
            apart_y = place["y"] + place["h"] <= there["y"] or there["y"] + there["h"] <= place["y"]
            assert apart_x or apart_y, f"{panel['title']} lies over {other['title']}"
    links = re.findall(r"/d/(kvatlas-\w+)", json.dumps(dashboard))
    assert set(links) <= {f"kvatlas-{one}" for one in DASHBOARDS}


# A real Prometheus beside a real agent


class Prometheus:
    """Scrapes one agent each second and evaluates rules.yml as often."""

    def __init__(self, tools: Path, repository_root: Path, target: str, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            port = server.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(repository_root / "deploy" / "prometheus" / "rules.yml")],
            "scrape_configs": [{"job_name": "kvatlas", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self.running = subprocess.Popen(
            [
                tools / "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector or scalar; raises where Prometheus refuses the query or is not there yet."""
        asked = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(asked, timeout=60) as reply:
            result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return result

    def ask_until_answered(self, expression: str) -> list[dict[str, Any]]:
        """As soon as there is something."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            with suppress(OSError):
                if found := self.query(expression):
                    return found
            time.sleep(0.2)
        raise AssertionError(f"nothing in {PATIENCE_SECONDS:g} s: {expression}")


@pytest.fixture(scope="module")
def prometheus(prometheus_tools: Path, repository_root: Path) -> Iterator[Prometheus]:
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-") as name:
        folder = Path(name)
        (folder / "maps").mkdir()
        pool = PoolProcess(folder / "maps")
        agent = Agent(folder / "maps", environment={"KVATLAS_STATE_DIR": str(folder / "state")})
        made = Prometheus(prometheus_tools, repository_root, urllib.parse.urlsplit(agent.url).netloc, folder)
        try:
            yield made
        finally:
            made.running.terminate()
            made.running.wait(60)
            agent.stop()
            assert agent.process.stderr is not None
            agent.process.stderr.close()
            pool.end()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_real_prometheus_answers_every_query(prometheus: Prometheus, repository_root: Path, name: str) -> None:
    # A rate over two minutes takes two scrapes, and what is made of it one evaluation more.
    prometheus.ask_until_answered("kvatlas:model_tokens_written:rate2m")
    for expression in queries(read(repository_root, name)):
        if any(part in expression for part in MAY_BE_EMPTY):
            prometheus.query(expression)
        else:
            assert prometheus.ask_until_answered(expression)


def test_each_query_of_the_autoscaler_gives_one_number(prometheus: Prometheus, repository_root: Path) -> None:
    """As many replicas as engines, or half as many again."""
    (scaled,) = render(repository_root / "deploy" / "kubernetes" / "examples" / "keda")
    wanted = {}
    for trigger in scaled["spec"]["triggers"]:
        query = re.sub(r"\{namespace=[^}]*\}", "", trigger["metadata"]["query"])
        assert query != trigger["metadata"]["query"]
        (found,) = prometheus.ask_until_answered(query)
        wanted[trigger["name"]] = float(found["value"][1]) / float(trigger["metadata"]["threshold"])
    assert 0.0 <= wanted["use"] <= 1.34
    assert wanted["blocked"] in (1.0, 1.5)
    assert wanted["exhaustion"] in (1.0, 1.5)


def test_the_real_agent_exports_nothing_that_the_reference_does_not_have(
    prometheus: Prometheus, repository_root: Path
) -> None:
    prometheus.ask_until_answered("kvatlas_engine_up")
    exported = {one["metric"]["__name__"] for one in prometheus.query('{__name__=~"kvatlas_.*"}')}
    assert unknown_names("\n".join(exported), repository_root) == set()
    reference = (repository_root / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(kvatlas_\w+)`", reference, re.MULTILINE))
    assert listed == {family.name for part in catalogue() for family in part.families}
    assert len(exported & listed) > 40
