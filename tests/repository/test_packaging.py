"""Both distributions build, hold what they should, and work alone in an empty environment."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TRACES = ("azure2023_conv_0-4999.csv.gz", "mooncake_conversation_0-3999.jsonl.gz")


@dataclass(frozen=True)
class Distribution:
    """One of the two distributions: the folder with its pyproject.toml, and the packages it must hold."""

    name: str
    folder: str
    packages: frozenset[str]


DISTRIBUTIONS = (
    Distribution("kvatlas", ".", frozenset({"engine_shim", "agent", "alerts", "dashboard"})),
    Distribution("kvatlas-shim", "deploy/shim", frozenset({"engine_shim"})),
)


def project(repository_root: Path, folder: str) -> dict[str, Any]:
    """The [project] table of the pyproject.toml in `folder`."""
    table: dict[str, Any] = tomllib.loads((repository_root / folder / "pyproject.toml").read_text())["project"]
    return table


def pins(repository_root: Path) -> dict[str, str]:
    """constraints.txt as canonical name -> version; every line that is not a comment must be an exact pin."""
    lines = (repository_root / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(requirement.specifier).startswith("==") for requirement in requirements)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


@pytest.fixture(scope="module", params=DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def built(
    request: pytest.FixtureRequest, repository_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Distribution, Path]:
    """A distribution and its wheel, built through its sdist as `python -m build` does it."""
    distribution: Distribution = request.param
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, repository_root / distribution.folder],
        check=True,
        capture_output=True,
    )
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    assert sdist.stat().st_size < 2**21  # a cache or an environment that slipped in would be more
    return distribution, wheel


def test_wheel_holds_its_packages_and_nothing_else(built: tuple[Distribution, Path], repository_root: Path) -> None:
    distribution, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert {name.split("/")[0] for name in names} == distribution.packages
    tracked = subprocess.run(
        ["git", "ls-files", *distribution.packages], cwd=repository_root, capture_output=True, text=True, check=True
    )
    assert set(tracked.stdout.split()) <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert {f"{package}/py.typed" for package in distribution.packages} <= names
    assert {f"engine_shim/traces/{trace}" for trace in TRACES} <= names
    assert "LICENSE" in licences


def test_wheel_works_in_an_empty_environment(
    built: tuple[Distribution, Path], repository_root: Path, tmp_path: Path
) -> None:
    """With NumPy alone: `kvatlas version` answers from another folder, and other commands name what is missing."""
    distribution, wheel = built
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    constraints = repository_root / "constraints.txt"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", constraints, wheel],
        check=True,
        capture_output=True,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVATLAS_"))}
    version = project(repository_root, distribution.folder)["version"]

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)

    answer = run(home / "bin" / "kvatlas", "version")
    assert answer.returncode == 0, answer.stderr
    assert version in answer.stdout
    where = run(python, "-c", "import engine_shim; print(engine_shim.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(home)
    refused = run(home / "bin" / "kvatlas", "agent")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "kvatlas[agent" in refused.stderr


def test_the_two_distributions_agree(repository_root: Path) -> None:
    main, shim = (project(repository_root, distribution.folder) for distribution in DISTRIBUTIONS)
    for key in ("version", "requires-python", "license", "scripts", "dependencies"):
        assert main[key] == shim[key], key
    assert [Requirement(text).name for text in shim["dependencies"]] == ["numpy"]
    assert filecmp.cmp(repository_root / "LICENSE", repository_root / "deploy/shim/LICENSE", shallow=False)


def test_every_requirement_has_a_pin_that_fits(repository_root: Path) -> None:
    main = project(repository_root, ".")
    pinned = pins(repository_root)
    texts = [*main["dependencies"], *(text for extra in main["optional-dependencies"].values() for text in extra)]
    for requirement in map(Requirement, texts):
        if requirement.name != main["name"]:
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), str(requirement)
    assert pinned["torch"] == "2.13.0"
