"""What is written by scripts/write_generated.py is what it would write now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml


def test_written_files_are_up_to_date(repository_root: Path) -> None:
    script = repository_root / "scripts" / "write_generated.py"
    checked = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"run scripts/write_generated.py: {checked.stdout}{checked.stderr}"


def test_the_operator_s_rules_are_prometheus_s(repository_root: Path) -> None:
    deploy = repository_root / "deploy"
    resource = yaml.safe_load(
        (deploy / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml").read_text(encoding="utf-8")
    )
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == yaml.safe_load((deploy / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
