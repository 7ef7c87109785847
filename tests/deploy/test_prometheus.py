"""deploy/prometheus: rules that promtool takes, that do what they say, and speak of metrics that the agent has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from agent.alerting.rule_files import default_rules

WITHOUT_METRIC = {"compaction-check-failed", "maps-unreadable"}


@pytest.fixture(scope="module")
def folder(repository_root: Path) -> Path:
    return repository_root / "deploy" / "prometheus"


def run(tool: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)


def test_promtool_takes_the_rules_and_each_fires_and_ends(folder: Path, promtool: Path) -> None:
    checked = run(promtool, "check", "rules", folder / "rules.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = run(promtool, "test", "rules", folder / "rules.test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_would_notice_a_rule_that_does_not_fire(folder: Path, promtool: Path, tmp_path: Path) -> None:
    """The negative control of the one above."""
    rules = (folder / "rules.yml").read_text().replace("kvatlas_engine_stalled == 1", "kvatlas_engine_stalled == 2")
    (tmp_path / "rules.yml").write_text(rules)
    tests = yaml.safe_load((folder / "rules.test.yml").read_text())
    tests["tests"] = [one for one in tests["tests"] if one["name"] == "stalled"]
    (tmp_path / "rules.test.yml").write_text(yaml.safe_dump(tests))
    assert run(promtool, "test", "rules", tmp_path / "rules.test.yml").returncode != 0


def test_every_alert_is_tested(folder: Path) -> None:
    groups = yaml.safe_load((folder / "rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    tested = set(re.findall(r'alertname="(\w+)"', (folder / "rules.test.yml").read_text()))
    assert tested == alerts


def test_every_default_rule_has_its_like(folder: Path) -> None:
    groups = yaml.safe_load((folder / "rules.yml").read_text())["groups"]
    runbooks = {rule["annotations"]["runbook"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert runbooks == {rule.name for rule in default_rules()} - WITHOUT_METRIC


def test_the_rules_speak_of_metrics_that_the_agent_s_code_names(folder: Path, repository_root: Path) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (repository_root / "agent").rglob("*.py"))
    named = set(re.findall(r"\bkvatlas_(\w+)", (folder / "rules.yml").read_text()))
    for name in named:
        plain = name.removesuffix("_total").removesuffix("_bucket")
        assert re.search(rf'["}}]{plain}"', code), f"no metric kvatlas_{name}"


def test_alertmanager_takes_the_example(folder: Path, prometheus_tools: Path) -> None:
    checked = run(prometheus_tools / "amtool", "check-config", folder / "alertmanager.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
