"""Real Transformers for these tests, in the environment of vLLM's: it brings the version that is watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Report = dict[str, Any]


@pytest.fixture(scope="session")
def generation(vllm_python: Path, run_driver: Callable[..., Report]) -> Report:
    """Models of random weights in many variants, in one process; every map compared at every step."""
    return run_driver(vllm_python, [HERE / "drive_generation.py"], HERE, KVATLAS_AUDIT_STEPS="1")
