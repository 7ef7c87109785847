"""One suite for all adapters, each run against its own real engine: docs/adding-an-engine.md says how to join it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SUBJECTS = ["reference", "transformers full", "transformers hybrid", "vllm"]
MOVING = ["reference", "vllm"]

Report = dict[str, Any]
Examined = Callable[[str], Report]


@pytest.fixture(scope="session")
def examined(request: pytest.FixtureRequest, run_driver: Callable[..., Report]) -> Examined:
    """The suite's report on one engine, which is run once."""
    reports: dict[str, Report] = {}
    settings = {
        "KVATLAS_AUDIT_STEPS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def run(name: str) -> Report:
        if name not in reports:
            # The reference engine runs in this environment, the others where they are installed.
            python = Path(sys.executable) if name == "reference" else request.getfixturevalue("vllm_python")
            folders = [HERE.parent / folder for folder in ("transformers", "vllm")]
            reports[name] = run_driver(python, [HERE / "run_subject.py"], *folders, SUBJECT=name, **settings)
        return reports[name]

    return run


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("rule", ["partition", "references", "owners", "requests", "faults"])
def test_the_rule_holds(examined: Examined, name: str, rule: str) -> None:
    report = examined(name)["rules"][rule]
    assert report["broken"] == []
    assert report["looked"] > (5 if rule == "faults" else 50)


@pytest.mark.parametrize("name", SUBJECTS)
def test_live_blocks_move_where_they_can(examined: Examined, name: str) -> None:
    report = examined(name)
    if name in MOVING:
        assert report["moved"] > 0
        assert report["rules"]["moves"]["broken"] == []
    else:
        assert report["moved"] is None


@pytest.mark.parametrize("name", SUBJECTS)
def test_wrong_facts_are_noticed(examined: Examined, name: str) -> None:
    """The control: a suite that looks at nothing would pass as well."""
    assert examined(name)["noticed"] == dict.fromkeys(["partition", "references", "owners", "requests"], True)
