"""Set-up installs by the pins, and does nothing more until they, the Python or the index change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose Python does nothing but write down how pip was called."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *" install "*) echo "$*" >>"{tmp_path}/calls" ;; esac\n')
    python.chmod(0o755)
    return folder


def test_it_does_nothing_when_it_is_up_to_date(repository_root: Path, tmp_path: Path, venv: Path) -> None:
    def set_up(**settings: str) -> tuple[list[str], str]:
        """What was installed, and what was said."""
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VENV": str(venv), "PYTHON": sys.executable}
        script = [str(repository_root / "scripts" / "setup.sh"), "demo"]
        done = subprocess.run(script, env=environment | settings, capture_output=True, text=True, check=True)
        return calls.read_text().splitlines(), done.stderr

    installed, said = set_up()
    assert "set-up for 'demo' is done" in said
    assert installed
    assert all(f"-c {repository_root}/constraints.txt" in call for call in installed)
    assert set_up() == ([], "")
    again, _ = set_up(TORCH_INDEX="https://index.example")
    assert [call for call in again if "--index-url https://index.example torch==" in call]
    assert set_up(TORCH_INDEX="https://index.example") == ([], "")
