"""docs/settings.md names every setting that the code reads, with its flag and default, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from agent.cli import app
from agent.commands.plan import plan
from agent.commands.record import record_command
from agent.commands.replay import replay
from agent.commands.simulate import simulate
from agent.commands.top import top
from agent.config import AgentSettings, has_flag, variable
from agent.demo.run import demo

ROW = re.compile(r"^\| `(KVATLAS_\w+)` \|(.*?)\|(.*?)\|(.*)\|$", re.MULTILINE)
NAME = re.compile(r"KVATLAS_[A-Z][A-Z_]*[A-Z]")


class Row(NamedTuple):
    """One documented setting, as text."""

    flags: str
    default: str
    meaning: str


@pytest.fixture(scope="module")
def documented(repository_root: Path) -> dict[str, Row]:
    text = (repository_root / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [(name, Row(*(cell.strip() for cell in cells))) for name, *cells in ROW.findall(text)]
    assert len(rows) == len(dict(rows)), "a setting is documented twice"
    return dict(rows)


def options(command: Any) -> Iterator[Any]:
    """Every option with an environment variable, of a command and of the commands in it.

    By attributes, since some versions of Typer carry a Click of their own.
    """
    yield from (parameter for parameter in command.params if isinstance(parameter.envvar, str))
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


def in_code(root: Path) -> set[str]:
    """Every name that starts as our settings do, in the packages, the scripts and the suite's own fixtures."""
    files = [
        path for package in ("engine_shim", "agent", "dashboard", "alerts") for path in (root / package).rglob("*.py")
    ]
    files += [root / "tests" / "conftest.py", *(root / "scripts").glob("*.sh")]
    return {name for path in files for name in NAME.findall(path.read_text(encoding="utf-8"))}


def test_every_setting_is_documented_and_no_other(documented: dict[str, Row], repository_root: Path) -> None:
    of_the_agent = {variable(name) for name in AgentSettings.model_fields}
    assert set(documented) == in_code(repository_root) | of_the_agent


def test_documented_defaults_of_the_agent_are_right(documented: dict[str, Row]) -> None:
    for name, field in AgentSettings.model_fields.items():
        row = documented[variable(name)]
        if field.default not in (None, "", ()):
            assert row.default == str(field.default), name
        elif name != "dir":
            assert row.default == "", name
        assert (f"`--{name.replace('_', '-')}`" in row.flags) == has_flag(name), name


def test_documented_flags_and_defaults_of_the_commands_are_right(documented: dict[str, Row]) -> None:
    late = typer.Typer()  # the command line adds these commands only when they are asked for
    late.command()(demo)
    late.command()(plan)
    late.command()(top)
    late.command()(record_command)
    late.command()(replay)
    late.command()(simulate)
    seen = set()
    for option in (*options(typer.main.get_command(app)), *options(typer.main.get_command(late))):
        seen.add(option.envvar)
        row = documented[option.envvar]
        for flag in (*option.opts, *option.secondary_opts):
            assert f"`{flag}`" in row.flags, option.envvar
        default = option.default
        if isinstance(default, bool):
            expected = "on" if default else "off"
        else:
            several = default if isinstance(default, (list, tuple)) else () if default is None else (default,)
            expected = ",".join(map(str, several))
        assert row.default == expected, option.envvar
    assert {"KVATLAS_BLOCKS", "KVATLAS_AGENT_URL", "KVATLAS_DEMO_SPEED", "KVATLAS_PLAN_GPU"} <= seen
