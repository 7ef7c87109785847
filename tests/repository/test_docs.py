"""Links of the documentation lead somewhere, and each alert's runbook is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from agent.alerting.rule_files import default_rules

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pages(repository_root: Path) -> dict[Path, str]:
    """Every page that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=True)
    paths = [repository_root / name for name in listed.stdout.split("\0") if name]
    return {path: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def anchors(text: str) -> set[str]:
    """The names by which GitHub reaches the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        count = found.get(name, 0)
        names.add(f"{name}-{count}" if count else name)
        found[name] = count + 1
    return names


def dead_links(page: Path, text: str) -> list[str]:
    """Links to files and headings that are not there; addresses elsewhere are not asked."""
    dead = []
    for found in LINK.finditer(CODE.sub("", text)):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        wanted = anchor if there.suffix == ".md" else ""
        if not there.exists() or (wanted and wanted not in anchors(there.read_text(encoding="utf-8"))):
            dead.append(target)
    return dead


def test_no_link_is_dead(pages: dict[Path, str], repository_root: Path) -> None:
    dead = {str(page.relative_to(repository_root)): dead_links(page, text) for page, text in pages.items()}
    assert {page: links for page, links in dead.items() if links} == {}


@pytest.mark.parametrize("link", ["nowhere.md", "runbook.md#nothing", "#nothing", "images/nothing.png"])
def test_a_dead_link_is_noticed(repository_root: Path, link: str) -> None:
    page = repository_root / "docs" / "alerts.md"
    assert dead_links(page, f"# Alerts\n\n[a](runbook.md#engine-gone) [b](https://example.com) [c]({link})\n") == [link]


def test_every_alert_s_runbook_is_a_section(pages: dict[Path, str], repository_root: Path) -> None:
    sections = anchors(pages[repository_root / "docs" / "runbook.md"])
    assert {rule.runbook for rule in default_rules()} <= sections
    groups = yaml.safe_load((repository_root / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    rules = [rule for group in groups["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["annotations"]["runbook"] for rule in rules} <= sections
