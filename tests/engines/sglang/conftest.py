"""Real SGLang for these tests: the folder with its packages, and what drivers on it report.

The folder is heavy, so these tests are run where it stands (`scripts/sglang_env.sh` builds it), or with
KVATLAS_TEST_SGLANG=1, which builds it; elsewhere they are left out, and the session says so at its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[2] / "scripts" / "sglang_env.sh"
LEFT_OUT = f"SGLang's tests were left out: scripts/{SCRIPT.name} has not been run here"

Report = dict[str, Any]


@cache
def built() -> str:
    """The folder with SGLang's packages; "" where it is not there and nobody asked for it."""
    asked = os.environ.get("KVATLAS_TEST_SGLANG") == "1"
    command = [str(SCRIPT)] if asked else [str(SCRIPT), "--if-built"]
    environment = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False, env=environment
    )
    if found.returncode != 0:
        pytest.exit(f"{SCRIPT.name} could not make a folder with SGLang's packages", returncode=1)
    return found.stdout.strip()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Not even collected where they are left out on purpose: skipped tests count as failed."""
    if collection_path.parent == HERE and collection_path.name.startswith("test_") and not built():
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leaving them out is allowed, but not in silence."""
    if os.environ.get("KVATLAS_TEST_ENGINES") != "0" and not built():
        terminalreporter.section(LEFT_OUT, yellow=True)


@pytest.fixture(scope="session")
def drive(vllm_python: Path, run_driver: Callable[..., Report]) -> Callable[..., Report]:
    """Runs a program beside SGLang's packages."""

    def run(program: Path, *folders: Path, **settings: str) -> Report:
        settings = {"KVATLAS_SGLANG_PUBLISH_MS": "0"} | settings  # every step is looked at
        return run_driver(vllm_python, [program], *folders, Path(built()), **settings)

    return run


@pytest.fixture(scope="session")
def allocators(drive: Callable[..., Report]) -> Report:
    """SGLang's allocators and radix cache on a trace, every map compared at every step."""
    return drive(HERE / "drive_allocators.py", HERE)


@pytest.fixture(scope="session")
def loops(drive: Callable[..., Report]) -> Report:
    """The event loops of SGLang's scheduler, each from its first step to long after its last."""
    return drive(HERE / "drive_scheduler.py", HERE)


@pytest.fixture(scope="session")
def conformance(drive: Callable[..., Report]) -> Report:
    """The suite that every adapter must pass."""
    folder = HERE.parent / "conformance"
    return drive(folder / "run_subject.py", folder, HERE, SUBJECT="sglang")
