"""Set-up says what is wrong and what to do, and a run that leaves tests out fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to put in front of PATH: commands there stand in for the system's."""
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, script: str) -> None:
    """Write an executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def set_up(repository_root: Path, tools: Path, tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run set-up for the demo with a fresh place for the environment, as far as it gets."""
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "VENV": str(tmp_path / "venv"),
        "PYTHON": sys.executable,
        **settings,
    }
    return subprocess.run(
        [repository_root / "scripts" / "setup.sh", "demo"],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_a_full_disk_is_found_before_anything_is_downloaded(repository_root: Path, tools: Path, tmp_path: Path) -> None:
    put(tools, "df", "printf 'Filesystem 1M-blocks Used Available\\ndisk 9 9 120\\n'")
    answer = set_up(repository_root, tools, tmp_path)
    assert answer.returncode == 1
    assert "error: 120 MiB are free" in answer.stderr
    assert "3000 are needed" in answer.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_fit_is_refused(repository_root: Path, tools: Path, tmp_path: Path) -> None:
    put(tools, "oldpython", "exit 1")
    answer = set_up(repository_root, tools, tmp_path, PYTHON="oldpython")
    assert answer.returncode == 2
    assert "PYTHON=oldpython is not a Python of version 3.11 or newer" in answer.stderr


@pytest.mark.parametrize("python", ["", "venvless"])
def test_missing_packages_give_one_apt_line(repository_root: Path, tools: Path, tmp_path: Path, python: str) -> None:
    """Without root: a Python without venv names its own package; no Python at all names Debian's."""
    put(tools, "id", "echo 1000")
    put(tools, "apt-get", "exit 9")
    put(tools, "dpkg-query", "exit 1")
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        put(tools, name, "exit 1")
    put(tools, "venvless", f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"')
    answer = set_up(repository_root, tools, tmp_path, PYTHON=python)
    major, minor = sys.version_info[:2]
    wanted = f"python{major}.{minor}-venv" if python else "python3 python3-venv"
    lines = [line for line in answer.stderr.splitlines() if "apt-get install" in line]
    assert answer.returncode == 2
    assert len(lines) == 1
    assert lines[0].rstrip().endswith(f"sudo apt-get install -y {wanted}")


def test_root_installs_what_is_missing(repository_root: Path, tools: Path, tmp_path: Path) -> None:
    put(tools, "id", "echo 0")
    put(tools, "dpkg-query", "exit 1")
    put(tools, "apt-get", f'echo "apt-get $*" >>"{tmp_path}/calls"')
    put(tools, "venvless", f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"')
    answer = set_up(repository_root, tools, tmp_path, PYTHON="venvless")
    assert answer.returncode == 2  # the stand-in installs nothing, which is noticed
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["update", "install"]
    assert "-venv" in calls[1]


@pytest.mark.parametrize(
    ("marker", "body", "status", "said"),
    [
        ("browser", "pass", 1, "not run: these tests count as failed"),
        ("gpu", "pytest.skip('no CUDA device')", 0, "1 skipped"),
        ("parametrize('n', [1])", "pytest.skip('not today')", 1, "not today"),
    ],
    ids=["no-browser", "no-gpu", "skipped"],
)
def test_tests_left_out_fail_the_run(
    repository_root: Path, tmp_path: Path, marker: str, body: str, status: int, said: str
) -> None:
    """The suite's own conftest over one small test, with no Chromium to be found."""
    shutil.copy(repository_root / "tests" / "conftest.py", tmp_path)
    argument = "n" if "(" in marker else ""
    source = f"import pytest\n\n\n@pytest.mark.{marker}\ndef test_it({argument}):\n    {body}\n"
    (tmp_path / "test_one.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", repository_root / "pyproject.toml", f"--rootdir={tmp_path}", tmp_path],
        env={**os.environ, "KVATLAS_CHROMIUM": "/nonexistent/chromium"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == status, run.stdout
    assert said in run.stdout
