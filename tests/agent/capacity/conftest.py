"""The shapes of 28 released models with the right figure of each, and a reader for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.geometry import ModelGeometry

Cases = dict[str, dict[str, Any]]
CASES_FILE = Path(__file__).with_name("model_configs.json")


@pytest.fixture(scope="session")
def cases() -> Cases:
    """By model: `config`, the fields of its config.json that matter here, and what is right."""
    found: Cases = json.loads(CASES_FILE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def geometry_of(cases: Cases) -> Callable[..., ModelGeometry]:
    """The geometry of one of them, with fields of its config changed."""

    def read(name: str, **changed: Any) -> ModelGeometry:
        return read_geometry(cases[name]["config"] | changed, name)

    return read
