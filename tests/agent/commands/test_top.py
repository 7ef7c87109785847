"""`kvatlas top` as it really runs: in a terminal, beside an agent and engines, until something ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.client import AgentClient
from agent.terminal.bar import states_of
from agent.terminal.words import ASCII, UNICODE

ROOT = Path(__file__).resolve().parents[3]
Start = Callable[..., Any]
TOP = (sys.executable, "-m", "engine_shim.launcher", "top")
LEAVES_SCREEN, SHOWS_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"
BAD_NAME = "req\x1b[2J\u202e-1"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """With its output in a pipe."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **environment}
    return subprocess.run([*TOP, *arguments], capture_output=True, cwd=ROOT, timeout=120, check=False, env=given)


@pytest.fixture
def fixed(start_engine: Start) -> Any:
    """An engine whose 64 blocks stay as they are: 1 reserved, 6 used by two sequences, 1 pinned, 2 cached."""
    engine = start_engine(engine_id="fixed", total_blocks=64)
    one, two = engine.open_owner(BAD_NAME), engine.open_owner("request-2")
    engine.reserved([0])
    engine.allocated([1, 2, 5, 9], one)
    engine.allocated([20, 21], two)
    engine.wrote([1, 2, 5, 9, 20, 21], [16, 16, 16, 3, 16, 16], 83)
    engine.progressed([one, two], [51, 32])
    engine.allocated([30, 40, 41])
    engine.pinned([30])
    engine.cached([40, 41])
    engine.step_ended(0, 7)
    return engine


@pytest.fixture
def agent(fixed: Any, start_agent: Start, client_of: Callable[..., AgentClient], wait_until: Start) -> Any:
    """One that has seen it, and alerts on nothing at once."""
    started = start_agent("--interval-seconds", "0.1")
    client = client_of(started)
    wait_until(lambda: client.engines().engines)
    return started


def test_printed_once_it_says_what_the_api_says(fixed: Any, agent: Any, client_of: Callable[..., AgentClient]) -> None:
    client = client_of(agent)
    engine, cells = client.engine(fixed.id), client.map(fixed.id)
    blocks, fragmentation = engine.blocks, engine.fragmentation
    assert (blocks.used, blocks.pinned, blocks.cached, blocks.reserved, blocks.free) == (6, 1, 2, 1, 54)
    for glyphs, environment in ((UNICODE, {}), (ASCII, {"LC_ALL": "C"}), (ASCII, {"PYTHONIOENCODING": "latin-1"})):
        done = run("--agent", agent.url, **environment)  # a pipe: it prints once by itself
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout
        text = done.stdout.decode(glyphs.encoding)
        lines = text.splitlines()
        assert all(len(line) <= 80 for line in lines)
        assert "".join(glyphs.states[state] for state in states_of(cells)) in lines
        for state in ("used", "pinned", "cached", "reserved", "free"):
            number = getattr(blocks, state)
            assert f"{glyphs.states[state]} {state} {number} ({100 * number / 64:.1f} %)" in text
        assert f"F {fragmentation.rate:.3f} above 0.30, free alone {fragmentation.strict_rate:.3f}" in text
        assert f"longest run {fragmentation.largest_allocatable_run} (132 KiB) of 56 allocatable" in text
        assert f"in {fragmentation.allocatable_runs} runs" in text
        assert "0 running, 7 waiting" in text
        first, second = (line.split() for line in lines if line.startswith("req"))
        assert first[:3] == ["req?[2J?-1", "4", "3"]  # nothing from outside reaches the terminal as it is
        assert second[:4] == ["request-2", "2", "1", "32"]
    chosen = run("--agent", agent.url, "--pool", "fixed", "--once", "--ascii")
    assert chosen.stdout.splitlines()[2].startswith(b"> fixed.dp0.tp0.pp0.kv")


def test_as_json_it_gives_the_answers_of_the_api(fixed: Any, agent: Any, client_of: Callable[..., AgentClient]) -> None:
    client = client_of(agent)
    done = run("--agent", agent.url, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    facts = json.loads(done.stdout)
    assert (facts["schema"], facts["id"], facts["missing"]) == ("kvatlas.top/v1", fixed.id, {})
    assert facts["agent"] == client.engines().agent.model_dump(mode="json")
    moving = {"snapshot_age_seconds", "heartbeat_age_seconds", "last_step_age_seconds", "age_seconds"}
    moving |= {"forecast", "oldest_pinned_seconds", "tokens_per_second", "last_block_seconds"}

    def still(value: dict[str, Any]) -> dict[str, Any]:
        return {key: one for key, one in value.items() if key not in moving}

    assert still(facts["engines"][0]) == still(client.engine(fixed.id).model_dump(mode="json"))
    assert still(facts["map"]) == still(client.map(fixed.id, 64).model_dump(mode="json"))
    asked = client.requests(fixed.id).model_dump(mode="json")["requests"]
    assert [still(one) for one in facts["requests"]["requests"]] == [still(one) for one in asked]
    assert facts["requests"]["requests"][0]["request_id"] == BAD_NAME  # in JSON it harms nobody
    assert facts["history"]["metric"] == "fragmentation"
    assert facts["alerts"]["rules"] == client.alerts().rules


def test_without_an_agent_it_fails_and_says_so() -> None:
    for flag in ("--once", "--json"):
        done = run("--agent", "http://user:secret@127.0.0.1:1", flag)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"error: no answer from the agent at http://127.0.0.1:1: ")
        assert b"secret" not in done.stderr
    assert run("--interval", "0").returncode == 2
    assert run("--agent", "ftp://x").returncode == 2


def test_a_pool_that_is_not_there(agent: Any) -> None:
    done = run("--agent", agent.url, "--pool", "other", "--once")
    assert done.returncode == 1
    assert done.stderr == b"error: the agent lists no pool or engine 'other'; there are fixed.dp0.tp0.pp0.kv\n"


def test_keys_size_and_alerts_in_a_terminal(
    fixed: Any, agent: Any, start_engine: Start, start_tty: Start, client_of: Callable[..., AgentClient]
) -> None:
    other = start_engine(engine_id="other", total_blocks=5000)
    tty = start_tty(*TOP, "--agent", agent.url, "--interval", "0.1")
    frame = tty.await_frame(lambda lines: any("other.dp0" in line for line in lines))
    assert len(frame) == 24
    assert frame[2].startswith("▶ fixed.")  # the worse of the two: F of the other is 0
    assert "used 6 (9.4 %)" in "\n".join(frame)

    tty.type("j")
    frame = tty.await_frame(lambda lines: lines[3].startswith("▶ other.") and lines[4].startswith("other."))
    bar = "".join(line for line in frame if line and set(line) == {"·"})
    assert len(bar) == 4 * client_of(agent).map(other.id, 80).cells  # 4 rows of 80 columns, 4 of them a cell
    tty.type("\x1b[A")
    tty.await_frame(lambda lines: lines[2].startswith("▶ fixed."))

    tty.type("p")
    paused = tty.await_frame(lambda lines: "PAUSED" in lines[0])
    fixed.allocated([50])
    fixed.step_ended(0, 7)
    client = client_of(agent)
    while client.engine(fixed.id).blocks.used != 7:
        tty.read(0.05)
    assert "used 6 " in "\n".join(tty.frame())
    assert tty.frame()[0] == paused[0]
    tty.type("p")
    tty.await_frame(lambda lines: "used 7 " in "\n".join(lines))

    other.kill()
    frame = tty.await_frame(lambda lines: any(line.startswith("critical Engine other is gone") for line in lines))
    (told,) = [one for one in client.alerts().open if one.rule == "engine-gone"]
    assert any(told.summary in line for line in frame)
    assert any(line.strip("> ") in told.action for line in frame if line.startswith("  > "))
    assert frame[2].startswith("  other.")  # the worst now, and the chosen one stays chosen
    assert frame[3].startswith("▶ fixed.")

    tty.resize(100, 40)
    tty.await_frame(lambda lines: "longest" in lines[1])
    tty.resize(30, 6)
    frame = tty.await_frame(lambda lines: lines[0].startswith("kvatlas top"))
    assert all(len(line) <= 30 for line in frame)
    tty.type("q")
    assert tty.end() == 0
    assert tty.mode == tty.mode_before
    assert tty.output.endswith(SHOWS_CURSOR + LEAVES_SCREEN)


def test_an_agent_that_does_not_answer_leaves_no_old_numbers(fixed: Any, agent: Any, start_tty: Start) -> None:
    tty = start_tty(*TOP, "--agent", agent.url, "--interval", "0.1", NO_COLOR="1")
    tty.await_frame(lambda lines: "used 6 " in "\n".join(lines))
    agent.process.send_signal(signal.SIGSTOP)
    try:
        frame = tty.await_frame(lambda lines: "asked again" in "\n".join(lines))
        assert "no answer from the agent" in frame[1]
        assert "used 6" not in "\n".join(frame)
    finally:
        agent.process.send_signal(signal.SIGCONT)
    tty.await_frame(lambda lines: "used 6 " in "\n".join(lines))
    assert b"\x1b[3" not in tty.output  # no colour
    tty.type("\x03")  # Ctrl-C
    assert tty.end() == 130
    assert tty.mode == tty.mode_before


def test_sigterm_leaves_the_terminal_as_it_was(start_tty: Start) -> None:
    tty = start_tty(*TOP, "--agent", "http://127.0.0.1:1")
    tty.await_frame(lambda lines: "asked again" in "\n".join(lines))
    assert tty.mode != tty.mode_before  # keys are not echoed: that it comes back proves something
    tty.process.terminate()
    assert tty.end() == 128 + signal.SIGTERM
    assert tty.mode == tty.mode_before
    assert tty.output.endswith(SHOWS_CURSOR + LEAVES_SCREEN)


def test_a_fault_leaves_the_terminal_as_it_was(start_tty: Start) -> None:
    program = textwrap.dedent(
        """
        from rich.console import Console
        from agent.terminal.live import watch
        from agent.terminal.words import ASCII
        def ask(pool, columns):
            raise ZeroDivisionError("of ours")
        watch(ask, str, console=Console(), address="x", pool=None, glyphs=ASCII, interval_seconds=1)
        """
    )
    tty = start_tty(sys.executable, "-c", program)
    assert tty.end() == 1
    assert tty.mode == tty.mode_before
    screen, _, after = tty.output.partition(LEAVES_SCREEN)
    assert b"ZeroDivisionError: of ours" in after
    assert SHOWS_CURSOR in screen


def test_it_can_be_suspended_and_continued(start_tty: Start) -> None:
    tty = start_tty("/bin/bash", "--norc", "--noprofile", "-i", PS1="ready$ ")
    tty.await_text("ready$ ")
    tty.type(" ".join((*TOP, "--agent", "http://127.0.0.1:1")) + "\n")
    tty.await_frame(lambda lines: "asked again" in "\n".join(lines))
    tty.output = b""
    tty.type("\x1a")  # Ctrl-Z
    tty.await_text("Stopped")
    assert LEAVES_SCREEN in tty.output.partition(b"Stopped")[0]
    tty.output = b""
    tty.type("fg\n")
    tty.await_frame(lambda lines: "asked again" in "\n".join(lines))
    tty.output = b""
    tty.type("q")
    tty.await_text(LEAVES_SCREEN.decode())
    tty.output = tty.output.partition(LEAVES_SCREEN)[2]
    tty.await_text("ready$ ")
    tty.type("echo status=$?\n")
    tty.await_text("status=0")
    tty.type("exit\n")
    assert tty.end() == 0


def test_a_terminal_that_cannot_redraw_gets_one_print(agent: Any, start_tty: Start) -> None:
    for term in ("dumb", ""):
        tty = start_tty(*TOP, "--agent", agent.url, TERM=term)
        assert tty.end() == 0
        assert b"\x1b[?1049h" not in tty.output
        assert b"fixed.dp0.tp0.pp0.kv" in tty.output
