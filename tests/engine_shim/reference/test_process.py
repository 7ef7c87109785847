"""The engine as a process: its flags, its report, its map, and its end, in good order or with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import KvatlasError, MapSpaceError, SettingsError
from engine_shim.layout import BlockState
from engine_shim.reference import __main__ as command

TINY = ["--model-geometry", "test-tiny", "--device", "cpu", "--blocks", "600", "--transfer-every", "1"]
DEADLINE_SECONDS = 120.0
# A stand-in for a supervisor: starts an engine, tells its pid, and waits to be killed.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "engine_shim.reference", "--end-with-parent", *sys.argv[1:]])
print(child.pid, flush=True)
time.sleep(600)
"""


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition of another process; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests at two a second, and one failed one."""
    path = tmp_path / "trace.csv"
    rows = [f"{index / 2},{100 + 30 * (index % 7)},{60 + index}" for index in range(40)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows, "19.6,0,0"]) + "\n")
    return path


@pytest.fixture
def start(tmp_path: Path, trace: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start an engine with its map in `tmp_path/maps`; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> subprocess.Popen[str]:
        arguments = ["--trace", str(trace), "--map-folder", str(tmp_path / "maps"), *TINY, *flags]
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_shim.reference", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def maps(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvmap"))


def test_a_trace_is_served_to_its_end(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(
        "--virtual-time", "--exit-when-done", "--verify-every", "20",
        "--transfer-dir", str(tmp_path / "kv"), "--transfer-pinned-share", "1",
    )  # fmt: skip
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["schema"] == "kvatlas.engine-report/v1"
    assert (report["served_requests"], report["skipped_requests"]) == (40, 1)
    assert report["mismatched_blocks"] == 0
    assert report["verified_tokens"] > 10_000
    assert report["transfers"]["sequences"] == 40
    assert set(report["states_seen"]) == {"free", "cached", "used", "pinned", "reserved"}
    assert maps(tmp_path / "maps") == []


def test_a_quantised_cache_serves_a_trace(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(
        "--virtual-time", "--exit-when-done", "--verify-every", "20", "--requests", "10", "--kv-dtype", "int4_group32"
    )  # fmt: skip
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert (report["served_requests"], report["mismatched_blocks"]) == (10, 0)
    assert report["kv_bytes"] == 600 * 16 * 2 * 4 * 2 * 18  # layers, KV heads, and a vector of 32 in 16 + 2 bytes


def test_model_mode_serves_a_trace(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("--virtual-time", "--exit-when-done", "--content", "model", "--requests", "4")
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["output_tokens"] == 60 + 61 + 62 + 63


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = start("--engine-id", "one", "--loop", "--transfer-dir", str(tmp_path / "kv"), "--transfer-rate", "100000")
    (path,) = eventually(lambda: maps(tmp_path / "maps"), "the map")
    reader = MapReader(path)
    snapshot = eventually(
        lambda: (s := reader.read(DEADLINE_SECONDS)).counters["tokens_written"] and s, "tokens in the map"
    )
    assert snapshot.identity.engine_id == "one"
    assert snapshot.identity.block_bytes == 16 * 1024
    assert snapshot.states[0] == BlockState.RESERVED
    assert sum(snapshot.state_counts) == 600
    assert snapshot.running_requests > 0
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["engine_id"] == "one"
    assert not reader.writer_alive()
    reader.close()
    assert maps(tmp_path / "maps") == []


def test_the_map_shows_what_the_pool_does(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    start("--speed", "4", "--loop", "--transfer-dir", str(tmp_path / "kv"), "--transfer-rate", "200000")
    (path,) = eventually(lambda: maps(tmp_path / "maps"), "the map")
    reader = MapReader(path)
    seen: set[int] = set()

    def all_states() -> bool:
        snapshot = reader.read(DEADLINE_SECONDS)
        seen.update(snapshot.states.tolist())
        return seen == set(BlockState)

    eventually(all_states, "all five states in the map")
    reader.close()


def test_the_engine_ends_with_its_parent(trace: Path, tmp_path: Path) -> None:
    flags = ["--trace", str(trace), "--map-folder", str(tmp_path / "maps"), *TINY]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        eventually(lambda: maps(tmp_path / "maps"), "the map")
    finally:
        parent.kill()
        parent.communicate()
    eventually(lambda: has_ended(pid), "the engine's end")
    assert maps(tmp_path / "maps") == []


def has_ended(pid: int) -> bool:
    """Gone, or only waiting to be reaped by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "nowhere.csv"], "error: nowhere.csv does not exist"),
        (["--speed", "0"], "error: speed=0.0 must be 1e-06 or more"),
    ],
)
def test_wrong_usage_is_said_in_one_line(
    start: Callable[..., subprocess.Popen[str]], flags: list[str], message: str
) -> None:
    process = start(*flags)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith(message)
    assert "Traceback" not in err


@pytest.fixture
def in_process() -> Iterator[Callable[..., int]]:
    """The command in this process, whose signal handlers are put back afterwards."""
    kept = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield lambda *flags: command.main([*TINY, *flags])
    for number, handler in kept:
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--headroom", "nan"], "headroom=nan"),
        (["--threads", "0"], "threads=0 must be 1 to"),
        (["--threads", str(10**12)], "threads=1000000000000"),
        (["--seed", str(10**23)], "seed=1000"),
        (["--speed", "1e-320"], "speed=1e-320"),
        (["--tokens-per-second", "1e-320"], "tokens_per_second=1e-320"),
        (["--blocks", str(10**12)], "blocks=1000000000000"),
        (["--transfer-dir", "/dev/null/x"], "transfer folder"),
        (["--transfer-peer", "localhost:1", "--transfer-rate", "nan"], "transfer rate nan"),
        (["--transfer-dir", "kv", "--transfer-pinned-share", "1.5"], "transfers may pin a share of 0 to 1"),
    ],
)
def test_values_that_no_engine_can_have(
    in_process: Callable[..., int], flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process("--map-folder", str(tmp_path), *flags) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "status"), [(MapSpaceError("full"), 1), (SettingsError("wrong"), 2)])
def test_a_failure_is_not_wrong_usage(
    in_process: Callable[..., int], error: KvatlasError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command, "build_engine", fail)
    assert in_process() == status
