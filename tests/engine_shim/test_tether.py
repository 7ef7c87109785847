"""A tethered process ends when its parent is killed, and at once where the parent has gone already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Starts a tethered sleeper, tells its pid, and waits to be killed.
PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "engine_shim.tether", str(os.getpid()), "sleep", "600"]
child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
while open(f"/proc/{child.pid}/comm").read().strip() != "sleep":
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""


def state_of(pid: int) -> str:
    """Of a process, as /proc has it; "" where there is none any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_killed_parent_takes_the_command_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 120
    while state_of(pid) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_parent_that_left_before_is_noticed() -> None:
    """This test is the parent, but the command is told of another."""
    command = [sys.executable, "-m", "engine_shim.tether", str(os.getpid() + 1), "sleep", "600"]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["x", "true"], 2, "error: usage"),
        ([str(os.getpid())], 2, "error: usage"),
        ([str(os.getpid()), "no-such-command"], 1, "error: no-such-command cannot be started: No such file"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], status: int, message: str) -> None:
    command = [sys.executable, "-m", "engine_shim.tether", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status
    assert ended.stderr.startswith(message)
