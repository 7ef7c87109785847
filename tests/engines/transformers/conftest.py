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


@pytest.fixture(scope="session")
def language_model(vllm_python: Path, run_driver: Callable[..., Report], smollm2: Path) -> Report:
    """SmolLM2-135M, alone and watched."""
    return run_driver(
        vllm_python, [HERE / "drive_language_model.py"], HERE, KVATLAS_AUDIT_STEPS="1", TEST_MODEL=str(smollm2)
    )


@pytest.fixture(scope="session")
def unchanged(vllm_python: Path, run_driver: Callable[..., Report]) -> Report:
    """A program that does not know of us, run by the launcher."""
    return run_driver(vllm_python, ["-m", "engine_shim.adapters.transformers", HERE / "drive_unchanged.py"], HERE)
