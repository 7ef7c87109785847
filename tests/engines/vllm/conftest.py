"""Real vLLM for these tests: an environment of its own, with the shim's wheel beside it, and what its drivers report.

KVATLAS_TEST_ENGINES=0 leaves these tests out, and the session says so at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LEFT_OUT = "KVATLAS_TEST_ENGINES=0: tests against real engines were left out"
DRIVER_SECONDS = 600

Report = dict[str, Any]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Not even collected where they are left out on purpose: skipped tests count as failed."""
    if os.environ.get("KVATLAS_TEST_ENGINES") == "0" and collection_path.parent == HERE:
        return collection_path.name.startswith("test_") or None
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leaving them out is allowed, but not in silence."""
    if os.environ.get("KVATLAS_TEST_ENGINES") == "0":
        terminalreporter.section(LEFT_OUT, red=True)


@pytest.fixture(scope="session")
def vllm_python(repository_root: Path) -> Path:
    """Python of the environment with vLLM, which is built in the cache when it is not there."""
    script = repository_root / "scripts" / "vllm_env.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run(
        [script], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False, env=environment
    )
    if found.returncode != 0:
        pytest.fail(f"{script.name} could not make an environment with vLLM", pytrace=False)
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def shim_folder(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim as a wheel, unpacked: on PYTHONPATH its entry point is seen as in an environment that it was installed
    in, and vLLM's own environment stays as it is."""
    folder = tmp_path_factory.mktemp("shim")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(folder), str(repository_root / "deploy" / "shim")]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def drive(vllm_python: Path, shim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Runs a driver in vLLM's environment; its report, from the line that begins with RESULT."""

    def run(name: str, **settings: str) -> Report:
        work = tmp_path_factory.mktemp(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVATLAS_", "VLLM_"))}
        environment |= {
            "PYTHONPATH": os.pathsep.join((str(shim_folder), str(HERE))),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "KVATLAS_DIR": str(work / "maps"),
            "KVATLAS_ENGINE_ID": "under-test",
        }
        environment |= settings
        finished = subprocess.run(
            [vllm_python, HERE / f"{name}.py", work],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DRIVER_SECONDS,
            check=False,
        )
        lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
        if finished.returncode or not lines:
            pytest.fail(f"{name} ended with {finished.returncode}:\n{finished.stderr[-6000:]}", pytrace=False)
        report: Report = json.loads(lines[-1].removeprefix("RESULT "))
        return report

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
def language_model(drive: Callable[..., Report], repository_root: Path) -> Report:
    """SmolLM2-135M under vLLM's defaults, in three variants."""
    script = repository_root / "scripts" / "smollm2.sh"
    found = subprocess.run([script], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False)
    if found.returncode != 0:
        pytest.fail(f"{script.name} could not make the model's folder", pytrace=False)
    return drive("drive_language_model", VLLM_ENABLE_V1_MULTIPROCESSING="0", TEST_MODEL=found.stdout.strip())


@pytest.fixture(scope="session")
def serving(drive: Callable[..., Report]) -> Report:
    """Engine core and worker in processes of their own; the core is asked for things while it serves and idles."""
    return drive("drive_serving", KVATLAS_VLLM_ALLOCATION="auto", KVATLAS_VLLM_COMPACTION="1")


@pytest.fixture(scope="session")
def disabled(drive: Callable[..., Report]) -> Report:
    """The plugin is installed and switched off: what vLLM does by itself."""
    return drive("drive_serving", KVATLAS_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
