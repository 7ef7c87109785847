"""The demo as a person starts it: it runs, says where, ends well, and leaves nothing behind, even when killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.demo.figures import EngineFigures, require_positive, suggest_blocks
from agent.demo.guardian import end_groups, end_processes, start_ticks
from agent.demo.supervisor import Supervisor, free_address, joined, url
from engine_shim.errors import SettingsError
from engine_shim.workload import TraceRequest, Workload, load_workload

DEADLINE_SECONDS = 120.0
SMALL = ["--blocks", "8000", "--speed", "4"]  # 78 MiB of KV: these tests are of processes


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition of other processes; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.05)
    return found


def cmdline_of(proc: Path) -> bytes:
    """Empty where the process ended meanwhile, or may not be looked at: any process of the host may be asked for."""
    try:
        return (proc / "cmdline").read_bytes()
    except OSError:
        return b""


class Demo:
    """One demo process with folders of its own, so that whatever it leaves can be found."""

    def __init__(self, folder: Path, *flags: str, command: str = "demo") -> None:
        self.maps, self.scratch = folder / "maps", folder / "scratch"
        self.scratch.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_shim.launcher", command, "--listen", f"127.0.0.1:{self.port}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"KVATLAS_DIR": str(self.maps), "TMPDIR": str(self.scratch), "COLUMNS": "200"},
        )

    def family(self) -> list[str]:
        """Command lines of every process that has this demo's folders in its environment, but for the demo itself."""
        found = []
        for proc in Path("/proc").iterdir():
            if proc.name.isdecimal() and int(proc.name) != self.process.pid:
                try:
                    if f"TMPDIR={self.scratch}".encode() in (proc / "environ").read_bytes():
                        found.append((proc / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except OSError:
                    continue  # it ended meanwhile, or is another user's
        return found

    def is_alone(self) -> bool:
        return not self.family()

    def kvmaps(self) -> list[Path]:
        found = (Path(folder, name) for folder, _, files in os.walk(self.maps) for name in files)
        return sorted(path for path in found if path.suffix == ".kvmap")

    def leftovers(self) -> list[str]:
        """Processes, files, and a port that is still listened on."""
        left = self.family()
        for top in (self.maps, self.scratch):
            for folder, folders, files in os.walk(top):  # which passes over what somebody else removes meanwhile
                left += [os.path.join(folder, name) for name in (*folders, *files)]
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", self.port)) == 0:
                left.append(f"port {self.port}")
        return left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def run(*flags: str) -> Demo:
        demos.append(Demo(tmp_path, *flags))
        return demos[-1]

    yield run
    for demo in demos:
        demo.process.kill()
        demo.process.communicate()
        eventually(demo.is_alone, "the demo's processes to end")


def test_five_seconds_end_with_a_summary(start: Callable[..., Demo]) -> None:
    demo = start("--seconds", "5", "--no-dashboard", *SMALL)
    out, err = demo.process.communicate(timeout=DEADLINE_SECONDS)
    assert demo.process.returncode == 0, err
    assert f"http://127.0.0.1:{demo.port}" in out
    assert f"Maps       {demo.maps}/demo-" in out
    assert "Summary" in out
    for word in ("demo-vllm", "demo-relocating", "served requests", "fragmentation rate p50", "prefix hit ratio"):
        assert word in out
    assert demo.leftovers() == []


def test_the_summary_as_json_has_real_figures(start: Callable[..., Demo]) -> None:
    demo = start("--seconds", "15", "--no-dashboard", "--json", *SMALL)
    out, err = demo.process.communicate(timeout=DEADLINE_SECONDS)
    assert demo.process.returncode == 0, err
    summary = json.loads(out)
    assert summary["schema"] == "kvatlas.demo/v1"
    stock, relocating = summary["engines"]
    assert (stock["policy"], relocating["policy"]) == ("vllm", "relocating")
    assert stock["relocation_copies"] == 0
    assert relocating["relocation_copies"] > 0
    for engine in (stock, relocating):
        assert engine["kv_bytes"] == 8000 * 16 * 640
        assert engine["served_requests"] > 0
        assert engine["verified_tokens"] > 0
        assert engine["mismatched_blocks"] == 0
        assert 0 < engine["live_share_max"] <= 1
    assert relocating["prefix_hit_ratio"] is not None
    assert stock["prefix_hit_ratio"] is not None
    assert stock["fragmentation_rate_p50"] > relocating["fragmentation_rate_p50"]


def test_a_killed_demo_leaves_nothing(start: Callable[..., Demo]) -> None:
    demo = start(*SMALL, "--dashboard-listen", "127.0.0.1:18551")
    eventually(lambda: len(demo.kvmaps()) == 2, "both maps")
    eventually(lambda: any("streamlit" in command for command in demo.family()), "the dashboard")
    eventually(lambda: len(demo.family()) == 5, "two engines, agent, dashboard, guardian, and nobody for a moment")
    demo.process.kill()
    demo.process.wait()
    eventually(lambda: demo.leftovers() == [], f"nothing left, not {demo.leftovers()}")
    eventually(lambda: not demo.maps.exists(), "the folder around the demo's own gone, which it had made")


def test_engines_end_even_where_the_guardian_was_killed_too(start: Callable[..., Demo]) -> None:
    demo = start(*SMALL, "--no-dashboard")
    eventually(lambda: len(demo.kvmaps()) == 2, "both maps")
    (guardian,) = [
        int(proc.name)
        for proc in Path("/proc").iterdir()
        if proc.name.isdecimal()
        and b"agent.demo.guardian" in (cmdline := cmdline_of(proc))
        and str(demo.scratch).encode() in cmdline
    ]
    os.kill(guardian, signal.SIGKILL)
    demo.process.kill()
    demo.process.wait()
    eventually(lambda: not demo.family() and not demo.kvmaps(), "processes and maps gone")


def test_ctrl_c_ends_it_well_and_a_busy_port_is_passed_over(start: Callable[..., Demo]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        demo = start("--no-dashboard", "--listen", f"127.0.0.1:{taken}", *SMALL)
        assert demo.process.stdout is not None
        said = [demo.process.stdout.readline()]
        while "Ctrl-C" not in said[-1]:
            said.append(demo.process.stdout.readline())
            assert said[-1], demo.process.stderr
        agent = next(line for line in said if line.startswith("Agent"))
        port = int(agent.split()[1].rsplit(":", 1)[1])
        assert taken < port < taken + 50
        demo.process.send_signal(signal.SIGINT)
        out, err = demo.process.communicate(timeout=DEADLINE_SECONDS)
        assert demo.process.returncode == 0, err
        assert "Summary" in out
        assert demo.leftovers() == []


def test_an_engine_that_dies_is_told_and_ends_the_demo(start: Callable[..., Demo]) -> None:
    demo = start(*SMALL, "--no-dashboard")
    eventually(lambda: len(demo.kvmaps()) == 2, "both maps")
    engine = next(
        int(proc.name)
        for proc in Path("/proc").iterdir()
        if proc.name.isdecimal()
        and f"{demo.scratch}".encode() in (cmdline := cmdline_of(proc))
        and b"demo-vllm" in cmdline
    )
    os.kill(engine, signal.SIGKILL)
    _, err = demo.process.communicate(timeout=DEADLINE_SECONDS)
    assert demo.process.returncode == 1
    assert "error: demo-vllm ended with status -9" in err
    assert demo.leftovers() == []


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--trace", "nowhere.jsonl"], 1, "error: nowhere.jsonl does not exist"),
        (["--speed", "nan"], 2, "error: speed=nan must be above 0, and finite"),
        (["--speed", "0"], 2, "error: speed=0.0 must be above 0"),
        (["--seconds", "-1"], 2, "error: seconds=-1.0 must be above 0"),
        (["--dashboard-listen", "8501"], 2, "error: '8501' is not an address"),
    ],
)
def test_wrong_usage_is_said_in_one_line(
    start: Callable[..., Demo], flags: list[str], status: int, message: str
) -> None:
    demo = start(*flags)
    _, err = demo.process.communicate(timeout=DEADLINE_SECONDS)
    assert demo.process.returncode == status
    assert err.startswith(message)
    assert demo.leftovers() == []


def test_the_default_pool_fits_the_default_trace() -> None:
    blocks = suggest_blocks(load_workload("mooncake-conversation"))
    assert blocks == pytest.approx(91_000, rel=0.05)
    assert blocks * 16 * 640 >= 512 << 20


def test_pools_follow_littles_law_within_bounds() -> None:
    def steady(rate: float, prompt: int, output: int) -> Workload:
        requests = tuple(TraceRequest(i, i / rate, prompt, output) for i in range(1001))
        return Workload("steady", requests, 0)

    # 4/s * 10 s of 1000 + 150 tokens are 46,046 live tokens, 2,878 blocks.
    assert suggest_blocks(steady(4.0, 1000, 300)) == pytest.approx(2878 / 0.36, rel=0.02)
    assert suggest_blocks(steady(0.01, 100, 30)) == 1024
    assert suggest_blocks(steady(0.01, 100_000, 30)) == pytest.approx(2 * 100_030 / 16, rel=0.01)
    assert suggest_blocks(steady(1000.0, 10_000, 300)) == 131_072


def test_figures_of_nothing_are_none_not_zero() -> None:
    report = {
        "kv_bytes": 1, "served_requests": 0, "rejected_requests": 0, "computed_tokens": 0, "output_tokens": 0,
        "tokens_per_second": 0.0, "preemptions": 0, "prefix_query_tokens": 0, "prefix_hit_tokens": 0,
        "relocation_copies": 0, "verified_tokens": 0, "mismatched_blocks": 0,
        "transfers": {"sequences": 0, "skipped": 0},
    }  # fmt: skip
    summary = EngineFigures("one", "vllm").summary(report)
    for key in ("prefix_hit_ratio", "live_share_p50", "live_share_max", "fragmentation_rate_p50"):
        assert summary[key] is None


def test_addresses() -> None:
    assert url(("0.0.0.0", 80)) == "http://127.0.0.1:80"  # noqa: S104
    assert url(("::1", 80)) == "http://[::1]:80"
    assert joined(("::1", 80)) == "[::1]:80"
    with pytest.raises(SettingsError, match="give HOST:PORT"):
        free_address("localhost")
    with pytest.raises(SettingsError, match="no such host"):
        free_address("no-such-host.invalid:80")
    with pytest.raises(SettingsError, match="not a host name"):
        free_address("a" * 64 + ".x:80")
    with pytest.raises(SettingsError, match="blocks=0 must be above 0"):
        require_positive("blocks", 0)


def test_the_guardian_lets_a_later_process_with_the_same_pid_alone() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        end_processes([(process.pid, ticks - 1)])
        assert process.poll() is None
        end_processes([(process.pid, ticks)])
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        assert start_ticks(process.pid) is None
    finally:
        process.kill()
        process.wait()


def test_the_guardian_kills_what_does_not_listen() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    ticks = start_ticks(process.pid)
    assert ticks is not None
    times = iter(range(0, 1000, 3))
    end_processes([(process.pid, ticks)], clock=lambda: float(next(times)))
    assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    process.stdout.close()


def test_the_guardian_ends_what_a_killed_engine_left_in_its_group() -> None:
    """Workers, one of which does not listen; a group whose leader runs is somebody else's."""
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    leader = f"""
import subprocess, sys, time
for ignores in (0, 1):
    program = {worker!r} if ignores else "print(flush=True); import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", leader], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    times = iter(range(0, 1000, 3))
    end_groups([process.pid], clock=lambda: float(next(times)))
    assert all(start_ticks(pid) is not None for pid in workers)
    process.kill()
    process.wait()
    process.stdout.close()
    end_groups([process.pid], clock=lambda: float(next(times)))
    eventually(lambda: all(start_ticks(pid) is None for pid in workers), "the workers to end")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="set KVATLAS_DIR"), Supervisor({"KVATLAS_DIR": str(tmp_path / "file")}):
        pass
