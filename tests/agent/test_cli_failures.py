"""What a command says, and ends with, where it cannot do its work or nobody takes its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.config import AgentSettings
from agent.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (["version", "--json"], ["map", "--json"], ["--help"])
LONG_HOST = "a" * 64 + ".x:1"


def run(arguments: list[str], stdout: Any, unbuffered: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        [sys.executable, "-m", "engine_shim.launcher", *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False,
    )  # fmt: skip


@pytest.fixture
def file(start_engine: Callable[..., Any]) -> str:
    engine = start_engine()
    engine.step_ended(0, 0)
    return str(engine.path)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_is_a_failure_in_one_line(arguments: list[str], unbuffered: str, file: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = run([*arguments, file] if arguments[0] == "map" else arguments, full, unbuffered)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_left_is_no_failure(arguments: list[str], unbuffered: str, file: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = run([*arguments, file] if arguments[0] == "map" else arguments, writer, unbuffered)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["agent", "--listen", LONG_HOST], "no such host (not a host name)"),
        (["agent", "--listen", "nosuchhost.invalid:1"], "no such host"),
        (["demo", "--no-dashboard", "--listen", LONG_HOST], "no such host (not a host name)"),
        (["simulate", "azure-conv", "--blocks", str(10**11)], "blocks=100000000000"),
    ],
)
@pytest.mark.usefixtures("loggers")
def test_values_that_cannot_be_are_wrong_usage(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert words in told


@pytest.mark.usefixtures("loggers")
def test_a_port_that_is_taken_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["agent", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == cli.EXIT_FAILED
    assert "is in use" in capsys.readouterr().err


def test_doctor_tells_of_a_host_that_is_none(folder: Path) -> None:
    findings = {one.check: one for one in examine([folder], AgentSettings(listen=LONG_HOST))}
    assert "not a host name" in findings[f"port {LONG_HOST}"].message
