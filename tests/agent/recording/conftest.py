"""Engines that run when they are told, and recorders beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.agent.recording.support import ROOT, SteppingEngine

PATIENCE_SECONDS = 120.0


class StartStepping(Protocol):
    def __call__(self, **options: Any) -> SteppingEngine: ...


@pytest.fixture
def start_stepping(folder: Path) -> Iterator[StartStepping]:
    """Starts engines whose maps are in `folder`, and kills them in the end."""
    engines: list[SteppingEngine] = []

    def start(**options: Any) -> SteppingEngine:
        engines.append(SteppingEngine(folder, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


class RecordProcess:
    """`kvatlas record` as a process, once it has begun."""

    def __init__(
        self,
        engine: SteppingEngine,
        output: Path,
        *flags: str,
        limit: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output = output
        command = [sys.executable, "-m", "engine_shim.launcher", "record", str(engine.path), "-o", str(output), *flags]
        if limit:
            command = ["sh", "-c", f'{limit} && exec "$@"', "sh", *command]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=inherited | dict(environment or {}),
        )
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()

    def end(self) -> tuple[int, str, str]:
        """Its exit status and what it said, once it has ended."""
        out, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, self.first_line + errors


class StartRecorder(Protocol):
    def __call__(
        self,
        engine: SteppingEngine,
        output: Path,
        *flags: str,
        limit: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> RecordProcess: ...


@pytest.fixture
def start_recorder() -> Iterator[StartRecorder]:
    processes: list[RecordProcess] = []

    def start(
        engine: SteppingEngine,
        output: Path,
        *flags: str,
        limit: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> RecordProcess:
        processes.append(RecordProcess(engine, output, *flags, limit=limit, environment=environment))
        return processes[-1]

    yield start
    for one in processes:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
