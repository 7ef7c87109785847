"""The stand-in for the driver's library, compiled once, and processes that read devices through it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

HERE = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


def compile_driver(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "these tests need a C compiler: apt-get install gcc"
    folder.mkdir()
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *flags, "-o", target, HERE / "fake_nvml.c"],
        check=True,
    )
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the stand-in's library."""
    return compile_driver(tmp_path_factory.mktemp("nvml") / "new")


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without functions that came with driver 510."""
    return compile_driver(tmp_path_factory.mktemp("nvml") / "old", "-DOLD_DRIVER")


def gpu(index: int, **given: object) -> dict[str, object]:
    """The keys of a device of 24 GiB of which 4 are used; `given` overrides them."""
    values: dict[str, object] = {
        "uuid": f"GPU-{index:08d}-aaaa-bbbb-cccc-000000000000",
        "name": "Test GPU",
        "bus_id": f"00000000:0{index}:00.0",
        "total": 24 * GIB,
        "reserved": GIB // 2,
        "used": 4 * GIB,
        "free": 24 * GIB - 4 * GIB - GIB // 2,
        **given,
    }
    return {f"gpu{index}.{key}": value for key, value in values.items() if value is not None}


class Reader:
    """One process of nvml_process.py. `script` sets what the library answers from now on."""

    def __init__(self, script: Path, library: Path | None, maps: Path, proc: Path) -> None:
        self._script = script
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_NVML": str(script)}
        environment["LD_LIBRARY_PATH"] = str(library or "")
        self.process = subprocess.Popen(
            [sys.executable, HERE / "nvml_process.py", maps, proc],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def script(self, *parts: Mapping[str, object]) -> None:
        """Replaced as a whole, so that a call sees the old or the new."""
        lines = [f"{key}={value}\n" for part in parts for key, value in part.items()]
        fresh = self._script.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.replace(self._script)

    def __call__(self, do: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> int:
        """Close its input and wait: it must end by itself, also while a call hangs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(120)
        self.process.stdout.close()
        return status


class StartReader(Protocol):
    def __call__(self, library: Path | None) -> Reader: ...


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A folder that stands for /proc where a test is about the memory of a machine that shares it."""
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def start_reader(tmp_path: Path, folder: Path, proc: Path) -> Iterator[StartReader]:
    """Starts reading processes, with the library of a folder or without one; each must end by itself with 0."""
    readers: list[Reader] = []

    def start(library: Path | None) -> Reader:
        reader = Reader(tmp_path / f"script-{len(readers)}", library, folder, proc)
        readers.append(reader)
        return reader

    yield start
    for reader in readers:
        status = reader.end() if reader.process.poll() is None else reader.process.returncode
        assert status == 0
