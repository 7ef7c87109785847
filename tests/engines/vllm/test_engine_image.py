"""kvatlas-shim in vLLM's environment: nothing of vLLM's is added, removed or changed, and vLLM finds the plugin."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
PLUGIN = """
import json
from importlib.metadata import distributions, entry_points
found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "kvatlas"]
shim = [one for one in distributions() if one.metadata["Name"] == "kvatlas-shim"]
print(json.dumps({"plugins": [one.value for one in found], "loads": [callable(one.load()) for one in found],
                  "requires": [one.requires for one in shim]}))
"""


@pytest.fixture(scope="module")
def wheel(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim's own wheel, as an image is given it."""
    out = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out)]
    build.append(str(repository_root / "deploy" / "shim"))
    subprocess.run(build, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


def run(python: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, env={**inherited, **environment}
    )


def planned(python: Path, *arguments: str | Path) -> Any:
    """What pip would install, by name, from what is given and what is there alone."""
    done = run(python, *PIP, "install", "--quiet", "--dry-run", "--no-index", "--report", "-", *arguments)
    assert done.returncode == 0, done.stderr
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}


def test_installing_it_changes_nothing_else(vllm_python: Path, wheel: Path) -> None:
    """With its dependencies: what it needs is there already, in a version that fits."""
    assert set(planned(vllm_python, wheel)) == {"kvatlas-shim"}


def test_a_wheel_that_needs_more_would_be_noticed(vllm_python: Path, wheel: Path) -> None:
    done = run(vllm_python, *PIP, "install", "--quiet", "--dry-run", "--no-index", wheel, "numpy>=99")
    assert done.returncode != 0
    assert "numpy>=99" in done.stderr


def test_the_step_of_the_image_installs_it(vllm_python: Path, wheel: Path, repository_root: Path) -> None:
    text = (repository_root / "deploy" / "docker" / "vllm.Dockerfile").read_text(encoding="utf-8")
    (step,) = re.findall(r"^RUN python3 -m pip install (.*)$", text, re.MULTILINE)
    words = [str(wheel.parent) if word == "/tmp/kvatlas" else word for word in shlex.split(step)]
    assert set(planned(vllm_python, *words)) == {"kvatlas-shim"}


def test_the_environment_is_as_consistent_as_before(vllm_python: Path, shim_folder: Path) -> None:
    before = run(vllm_python, *PIP, "check")
    after = run(vllm_python, *PIP, "check", PYTHONPATH=str(shim_folder))
    assert after.stdout == before.stdout


def test_vllm_finds_the_plugin(vllm_python: Path, shim_folder: Path) -> None:
    told = json.loads(run(vllm_python, "-c", PLUGIN, PYTHONPATH=str(shim_folder)).stdout)
    assert told["plugins"] == ["engine_shim.adapters.vllm:register"]
    assert told["loads"] == [True]
    (requires,) = told["requires"]
    assert [re.split(r"[<>=! ]", one)[0] for one in requires] == ["numpy"]
