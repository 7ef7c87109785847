"""deploy/prometheus: rules that promtool takes, that do what they say, and speak of metrics that the agent has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from agent.alerting.numbers import NUMBERS
from agent.alerting.rule_files import default_rules
from alerts.units import Unit, parse

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


# What metrics tell otherwise than the agent's own numbers; rules.yml says so beside each.
OTHER_NUMBERS = {"headroom-breached", "agent-sampling-late", "compaction-backs-off", "notifications-failing"}
OTHER_WAITS = {
    "KVAtlasAgentDown",
    "KVAtlasCompactionFailed",
    "KVAtlasCompactionBacksOff",
    "KVAtlasNotificationsFailing",
}


def differences(rules: str) -> set[str]:
    """Alerts and default rules that do not say the same: thresholds, exits, conditions, severities raised to, waits."""
    groups = yaml.safe_load(rules)["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    found = set()
    for rule in default_rules():
        like = [one for one in alerts if one["annotations"]["runbook"] == rule.name]
        if rule.unit is not Unit.FLAG and rule.name not in WITHOUT_METRIC | OTHER_NUMBERS:
            units = {bound.number: NUMBERS[bound.number].unit for bound in rule.when}
            bounds = [bound.value for bound in rule.when if units[bound.number] is not Unit.FLAG]
            own = {rule.enter.value, rule.exit, *bounds, *(one.bound.value for one in rule.raises)}
            said = {float(one) for alert in like for one in re.findall(r"[<>] ([0-9.]+)", alert["expr"])}
            found |= {rule.name} if own != said else set()
        for alert in like:
            waits = (rule.for_seconds, rule.keep_firing_seconds)
            if alert["alert"] not in OTHER_WAITS and waits != (wait(alert, "for"), wait(alert, "keep_firing_for")):
                found.add(alert["alert"])
    return found


def wait(alert: dict[str, str], key: str) -> float:
    seconds = parse(alert.get(key, "0s"), Unit.SECONDS)
    assert seconds is not None
    return seconds


def test_thresholds_and_waits_are_those_of_the_agent(folder: Path) -> None:
    assert differences((folder / "rules.yml").read_text()) == set()


@pytest.mark.parametrize(
    ("written", "instead", "differs"),
    [
        ("kvatlas:pool_used:ratio > 0.95", "kvatlas:pool_used:ratio > 0.94", "pool-nearly-full"),
        ("kvatlas:pool_used:ratio > 0.90", "kvatlas:pool_used:ratio > 0.91", "pool-nearly-full"),
        ("kvatlas_preemptions_total[1m]) > 60", "kvatlas_preemptions_total[1m]) > 50", "preemption-storm"),
        ("for: 5m", "for: 4m", "KVAtlasTailWaste"),
    ],
)
def test_a_threshold_or_a_wait_that_is_changed_is_noticed(
    folder: Path, written: str, instead: str, differs: str
) -> None:
    rules = (folder / "rules.yml").read_text()
    assert rules.count(written) >= 1
    assert differs in differences(rules.replace(written, instead))


def test_the_rules_speak_of_metrics_that_the_agent_s_code_names(folder: Path, repository_root: Path) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (repository_root / "agent").rglob("*.py"))
    named = set(re.findall(r"\bkvatlas_(\w+)", (folder / "rules.yml").read_text()))
    for name in named:
        plain = name.removesuffix("_total").removesuffix("_bucket")
        assert re.search(rf'["}}]{plain}"', code), f"no metric kvatlas_{name}"


def test_alertmanager_takes_the_example(folder: Path, prometheus_tools: Path) -> None:
    checked = run(prometheus_tools / "amtool", "check-config", folder / "alertmanager.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
