"""Real vLLM for these tests: what its drivers report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Report = dict[str, Any]


@pytest.fixture(scope="session")
def drive(vllm_python: Path, run_driver: Callable[..., Report]) -> Callable[..., Report]:
    """Runs a driver in vLLM's environment."""

    def run(name: str, **settings: str) -> Report:
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        return run_driver(vllm_python, [HERE / f"{name}.py"], HERE, **(defaults | settings))

    return run


@pytest.fixture(scope="session")
def in_process(drive: Callable[..., Report]) -> Report:
    """All variants that run one after the other in one process, every map compared at every step."""
    return drive("drive_in_process", VLLM_ENABLE_V1_MULTIPROCESSING="0", KVATLAS_AUDIT_STEPS="1")


@pytest.fixture(scope="session")
def relocating(drive: Callable[..., Report]) -> Report:
    """Relocating allocation beside vLLM's own, in one process, every map compared at every step."""
    return drive("drive_relocating", VLLM_ENABLE_V1_MULTIPROCESSING="0", KVATLAS_AUDIT_STEPS="1")


@pytest.fixture(scope="session")
def compacting(drive: Callable[..., Report]) -> Report:
    """Moves of live blocks, in one process, every map compared at every step."""
    return drive("drive_compacting", VLLM_ENABLE_V1_MULTIPROCESSING="0", KVATLAS_AUDIT_STEPS="1")


@pytest.fixture(scope="session")
def hostile(drive: Callable[..., Report]) -> Report:
    """Storms of orders and nonsense while it serves, in one process, every map compared at every step."""
    return drive("drive_hostile", VLLM_ENABLE_V1_MULTIPROCESSING="0", KVATLAS_AUDIT_STEPS="1")


@pytest.fixture(scope="session")
def lifetime(drive: Callable[..., Report]) -> Report:
    """What befalls engines that live long: requests that end in all ways, resets, sleep, the engine's own end."""
    return drive("drive_lifetime", VLLM_ENABLE_V1_MULTIPROCESSING="0", KVATLAS_AUDIT_STEPS="1")


@pytest.fixture(scope="session")
def language_model(drive: Callable[..., Report], smollm2: Path) -> Report:
    """SmolLM2-135M under vLLM's defaults, in three variants."""
    return drive("drive_language_model", VLLM_ENABLE_V1_MULTIPROCESSING="0", TEST_MODEL=str(smollm2))


@pytest.fixture(scope="session")
def serving(drive: Callable[..., Report]) -> Report:
    """Engine core and worker in processes of their own; the core is asked for things while it serves and idles."""
    return drive("drive_serving", KVATLAS_VLLM_ALLOCATION="auto", KVATLAS_VLLM_COMPACTION="1")


@pytest.fixture(scope="session")
def disabled(drive: Callable[..., Report]) -> Report:
    """The plugin is installed and switched off: what vLLM does by itself."""
    return drive("drive_serving", KVATLAS_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
