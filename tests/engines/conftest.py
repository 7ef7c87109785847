"""Real engines for these tests: their environment, the shim's wheel beside it, and what drivers in it report.

KVATLAS_TEST_ENGINES=0 leaves these tests out, and the session says so at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LEFT_OUT = "KVATLAS_TEST_ENGINES=0: tests against real engines were left out"
DRIVER_SECONDS = 3600
ENGINES_SETTINGS = ("KVATLAS_", "VLLM_")

Report = dict[str, Any]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Not even collected where they are left out on purpose: skipped tests count as failed."""
    if os.environ.get("KVATLAS_TEST_ENGINES") == "0" and HERE in collection_path.parents:
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
def smollm2(vllm_python: Path, repository_root: Path) -> Path:
    """Folder of SmolLM2-135M, which is made in the cache when it is not there."""
    script = repository_root / "scripts" / "smollm2.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run(
        [script], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, check=False, env=environment
    )
    if found.returncode != 0:
        pytest.fail(f"{script.name} could not make the model's folder", pytrace=False)
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def run_driver(shim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Runs a program in an engine's environment; its report, from the line that begins with RESULT."""

    def run(python: Path, command: Sequence[str | Path], *folders: Path, **settings: str) -> Report:
        program = Path(command[-1] if command[0] == "-m" else command[0])
        work = tmp_path_factory.mktemp(program.stem)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ENGINES_SETTINGS)}
        environment |= {
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in (shim_folder, *folders)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "KVATLAS_DIR": str(work / "maps"),
            "KVATLAS_ENGINE_ID": "under-test",
        }
        environment |= settings
        finished = subprocess.run(
            [python, *command, work],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DRIVER_SECONDS,
            check=False,
        )
        lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
        if finished.returncode or not lines:
            pytest.fail(f"{program.stem} ended with {finished.returncode}:\n{finished.stderr[-6000:]}", pytrace=False)
        report: Report = json.loads(lines[-1].removeprefix("RESULT "))
        return report

    return run
