"""docs/quickstart.md does what it says: its code makes a map, its commands read it, its routes and metrics exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from agent.cli import complete_app

AGENT = "http://127.0.0.1:9477"
LAUNCHER = [sys.executable, "-m", "engine_shim.launcher"]


@pytest.fixture(scope="module")
def text(repository_root: Path) -> str:
    return (repository_root / "docs" / "quickstart.md").read_text(encoding="utf-8")


def code(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str, name: str) -> list[list[str]]:
    lines = [shlex.split(line) for block in code(text, "sh") for line in block.splitlines()]
    return [line[1:] for line in lines if line[0] == name]


@pytest.fixture
def engine(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the document's own code makes."""
    monkeypatch.setenv("KVATLAS_DIR", str(folder))
    names: dict[str, Any] = {}
    (source,) = code(text, "python")
    exec(compile(source, "quickstart.md", "exec"), names)  # noqa: S102 - the document's code is what is tested
    yield names
    names["pool"].release(reversed(names["blocks"]), owner=names["request"])
    names["observer"].close_owner(names["request"])
    names["observer"].close()
    assert list(folder.iterdir()) == []


def test_the_routes_answer_and_the_metrics_are_there(
    text: str, engine: dict[str, Any], start_agent: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    agent = start_agent()
    urls = [line[0] for line in commands(text, "curl")]
    assert len(urls) >= 9
    get = partial(httpx.get, timeout=60.0, trust_env=False)
    wait_until(lambda: get(f"{agent.url}/v1/engines/my-engine").status_code == 200)
    for url in urls:
        assert url.startswith(AGENT)
        answer = get(url.replace(AGENT, agent.url))
        assert answer.status_code == 200, (url, answer.text)
    summary = get(f"{agent.url}/v1/engines/my-engine").json()
    assert summary["blocks"]["used"] == len(engine["blocks"]) == 40
    exported = get(f"{agent.url}/metrics").text
    names = re.findall(r"`(kvatlas_\w+)`", text)
    assert len(names) >= 7
    for name in names:
        assert re.search(rf"^# TYPE {name} ", exported, re.MULTILINE), name


def test_the_commands_read_the_map(text: str, engine: dict[str, Any], folder: Path) -> None:
    given = {line[0]: line[1:] for line in commands(text, "kvatlas")}
    environment = {**os.environ, "KVATLAS_DIR": str(folder), "KVATLAS_JSON": "1"}
    file = str(folder / Path(given["map"][0]).name)
    told = subprocess.run([*LAUNCHER, "map", file], env=environment, capture_output=True, text=True, check=True)
    facts = json.loads(told.stdout)
    assert (facts["engine"], facts["writer_alive"], facts["blocks"]["used"]) == ("my-engine", True, 40)
    told = subprocess.run([*LAUNCHER, "doctor"], env=environment, capture_output=True, text=True, check=True)
    checks = {one["check"]: one for one in json.loads(told.stdout)["findings"]}
    assert "its writer lives" in checks[f"map {Path(file).stem}"]["message"]
    assert engine["observer"].path == Path(file)


def test_the_commands_and_flags_exist(text: str) -> None:
    known = typer.main.get_command(complete_app()).commands  # type: ignore[attr-defined]
    given = commands(text, "kvatlas")
    assert {line[0] for line in given} == {"agent", "dashboard", "doctor", "map"}
    for name, *rest in given:
        options = {flag for parameter in known[name].params for flag in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, name
