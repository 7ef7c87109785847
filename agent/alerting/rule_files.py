"""The rules that the agent judges by: the defaults, and a file that changes them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from agent.alerting.numbers import CATALOGUE
from alerts.rule_files import RuleFile, read_rules
from alerts.rules import Rule
from alerts.yaml_nodes import MAX_BYTES, FileInvalid
from engine_shim.errors import SettingsError

DEFAULT_FILE = "default_rules.yml"


@cache
def _defaults() -> tuple[RuleFile, tuple[Rule, ...]]:
    text = files("agent.alerting").joinpath(DEFAULT_FILE).read_text(encoding="utf-8")
    return read_rules(text, file=DEFAULT_FILE, catalogue=CATALOGUE)


def default_rules() -> tuple[Rule, ...]:
    """Those that need no file."""
    return _defaults()[1]


def load_rules(path: Path | None) -> tuple[Rule, ...]:
    """The defaults as the file at `path` changes them. Raises SettingsError with every fault of the file."""
    if path is None:
        return default_rules()
    try:
        with path.open("rb") as file:
            text = file.read(4 * MAX_BYTES + 1).decode("utf-8")  # more is too long in any script
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(f"alert_rules={path}: {reason}; name a file that this user may read") from error
    try:
        return read_rules(text, file=str(path), catalogue=CATALOGUE, base=_defaults()[0])[1]
    except FileInvalid as error:
        raise SettingsError(str(error)) from error
