"""The commands as a person or a script calls them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from agent import cli
from agent.config import AgentSettings, has_flag
from agent.doctor import Finding, examine, to_json
from agent.log import JsonFormatter

Start = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


def json_of(capsys: Capture, *arguments: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    return value


def test_map(start_engine: Start, capsys: Capture) -> None:
    engine = start_engine(total_blocks=10)
    engine.reserved([0])
    engine.allocated([1, 2, 5], engine.open_owner("a"))
    engine.cached([5])
    engine.step_ended(1, 0)
    facts = json_of(capsys, "map", str(engine.path), "--json")
    assert facts["schema"] == "kvatlas.map/v1"
    assert (facts["engine"], facts["model"], facts["total_blocks"], facts["block_bytes"]) == (
        "engine",
        "org/model",
        10,
        4096,
    )
    assert facts["blocks"] == {"free": 6, "cached": 1, "used": 2, "pinned": 0, "reserved": 1, "unknown": 0}
    assert (facts["largest_allocatable_run"], facts["fragmentation_rate"]) == (7, 0.0)
    assert facts["strict_fragmentation_rate"] == pytest.approx(1 / 3)
    assert 0 <= facts["heartbeat_age_seconds"] < 10
    assert facts["writer_alive"]

    assert cli.main(["map", str(engine.path)]) == 0
    text = capsys.readouterr().out
    assert "writer alive" in text
    assert "largest run 7 of 7 allocatable blocks, 1 runs" in text
    engine.set_flag(sleeping=True)
    assert json_of(capsys, "map", str(engine.path), "--json")["fragmentation_rate"] is None
    engine.kill()
    assert not json_of(capsys, "map", str(engine.path), "--json")["writer_alive"]


def test_map_of_an_engine_by_its_id(
    start_engine: Start, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_DIR", str(folder))
    engine = start_engine(total_blocks=10)
    assert json_of(capsys, "map", "engine", "--json")["file"] == str(engine.path)
    assert cli.main(["map", "nobody"]) == 2
    refused = capsys.readouterr().err
    assert "no engine 'nobody'" in refused
    assert "kvatlas doctor" in refused


def test_top_without_an_agent(capsys: Capture) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen: the port is nobody else's meanwhile
        assert cli.main(["top", "--once", "--agent", f"http://127.0.0.1:{deaf.getsockname()[1]}"]) == 1
    assert "is it running? kvatlas agent starts one" in capsys.readouterr().err


def test_a_recording_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["replay", str(tmp_path / "none.kvrec")]) == 1
    assert "kvatlas record ENGINE -o FILE makes one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"something else", "wrong magic"), (b"KVATLAS\0", "cut short")]
)
def test_map_of_what_is_none(content: bytes | None, reason: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.kvmap"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["map", str(path), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert str(path) in captured.err
    assert reason in captured.err


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["map"], ["map", "a", "b"], ["agent", "--nonsense"], ["simulate", "x", "--blocks", "few"]],
)
def test_wrong_usage(arguments: list[str], capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "--help" in captured.err
    assert captured.out == ""


def test_help_lists_every_command(capsys: Capture) -> None:
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    for command in ("agent", "alerts", "compact", "dashboard", "demo", "doctor", "map", "simulate", "version"):
        assert f"\n  {command} " in bare


def test_version_is_a_command_like_the_others(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher answers it without the agent; here the agent's own command does. Both say the same."""
    from engine_shim import launcher

    facts = json_of(capsys, "version", "--json")
    assert facts["schema"] == "kvatlas.version/v1"
    assert launcher.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts
    for run in (cli.main, launcher.main):
        assert run(["version", "--help"]) == 0
        text = capsys.readouterr().out
        assert "Usage: kvatlas version" in text
        assert "KVATLAS_JSON" in text
        assert run(["version"]) == 0
        assert capsys.readouterr().out.startswith("kvatlas ")
        assert run(["version", "--nonsense"]) == 2
        assert "--nonsense" in capsys.readouterr().err
    for value in ("1", "true", "on"):
        monkeypatch.setenv("KVATLAS_JSON", value)
        for run in (cli.main, launcher.main):
            assert run(["version"]) == 0
            assert json.loads(capsys.readouterr().out) == facts
    monkeypatch.setenv("KVATLAS_JSON", "0")
    assert launcher.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("kvatlas ")


def test_the_agent_s_help_tells_its_defaults() -> None:
    command = typer.main.get_command(cli.complete_app())
    shown = {one.name: one.show_default for one in command.commands["agent"].params}  # type: ignore[attr-defined]
    assert "slack_webhook_url" not in shown
    for name, field in AgentSettings.model_fields.items():
        default = field.default
        if not has_flag(name):
            continue
        if default in (None, "", ()):
            assert not isinstance(shown[name], str), name
        else:
            expected = ("on" if default else "off") if isinstance(default, bool) else str(default)
            assert shown[name] == expected, name


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.4:.1f},{200 + i % 7 * 90},{20 + i % 5 * 30}" for i in range(60)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    return path


def test_simulate(trace: Path, capsys: Capture) -> None:
    arguments = ["simulate", str(trace), "--json", "--blocks", "2000", "--policy", "vllm", "--policy", "lowest-free"]
    first = json_of(capsys, *arguments)
    assert first["schema"] == "kvatlas.simulate/v1"
    assert list(first["policies"]) == ["vllm", "lowest-free"]
    assert {"fragmentation_rate", "live_share_mean", "preemptions"} <= set(first["policies"]["vllm"])
    assert json_of(capsys, *arguments) == first
    plain = json_of(capsys, *arguments, "--no-prefix-cache")
    assert not plain["prefix_cache"]
    assert cli.main(["simulate", str(trace), "--blocks", "2000", "--policy", "fifo"]) == 0
    text = capsys.readouterr().out
    assert "fifo" in text
    assert "F settled" in text
    rates = json_of(capsys, *arguments[:-4], "--policy", "fifo")["policies"]["fifo"]
    settled, whole = rates["settled_fragmentation_rate"], rates["fragmentation_rate"]
    wanted = [settled["p10"], settled["p50"], settled["p90"], whole["p50"], whole["p95"]]
    assert text.splitlines()[-1].split()[1:6] == ["-" if rate is None else f"{rate:.3f}" for rate in wanted]


@pytest.mark.parametrize(
    ("extra", "words", "status"),
    [
        (["--policy", "best"], "best", 2),
        (["--blocks", "0"], "blocks=0", 2),
        (["--max-seqs", "0"], "max_sequences=0", 2),
        (["--headroom", "2"], "headroom", 2),
        (["--block-size", "0"], "block", 2),
    ],
)
def test_simulate_with_wrong_values(trace: Path, extra: list[str], words: str, status: int, capsys: Capture) -> None:
    assert cli.main(["simulate", str(trace), *extra]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err


def test_simulate_without_a_trace(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["simulate", str(tmp_path / "missing.csv")]) == 1
    assert "missing.csv does not exist" in capsys.readouterr().err


def test_an_option_s_variable(trace: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_BLOCKS", "2345")
    monkeypatch.setenv("KVATLAS_POLICY", "fifo")
    monkeypatch.setenv("KVATLAS_JSON", "1")
    facts = json_of(capsys, "simulate", str(trace))
    assert (facts["blocks"], list(facts["policies"])) == (2345, ["fifo"])
    assert json_of(capsys, "simulate", str(trace), "--blocks", "2000")["blocks"] == 2000


def test_doctor(start_engine: Start, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(engine_id="seen")
    (folder / "foreign.kvmap").write_bytes(b"?")
    monkeypatch.setenv("KVATLAS_DIR", str(folder))
    report = json_of(capsys, "doctor", "--json", "--listen", "127.0.0.1:0")
    assert report["schema"] == "kvatlas.doctor/v1"
    findings = {one["check"]: one for one in report["findings"]}
    assert {"python", "packages", "writer", "gpu", "port 127.0.0.1:0", f"folder {folder}"} <= set(findings)
    assert "its writer lives" in findings[f"map {engine.id}"]["message"]
    assert "wrong magic" in findings["map"]["message"]
    assert findings["port 127.0.0.1:0"]["level"] == "ok"
    assert cli.main(["doctor"]) == 0
    assert "its writer lives" in capsys.readouterr().out


def test_doctor_names_running_demos(start_engine: Start, folder: Path, capsys: Capture) -> None:
    engine = start_engine(folder / "demo-abc", engine_id="demo-vllm")
    (folder / "demo-left").mkdir()
    (folder / "demo-file").write_text("")
    from agent.config import load_settings

    settings = load_settings({"listen": "127.0.0.1:0"}, environment={})
    demos = {one.check: one for one in examine([folder], settings) if one.check.startswith("demo ")}
    assert set(demos) == {f"demo {folder / 'demo-abc'}", f"demo {folder / 'demo-left'}"}
    running = demos[f"demo {folder / 'demo-abc'}"]
    assert (running.level, running.message) == ("ok", f"runs with {engine.id}")
    assert f"KVATLAS_DIR={folder / 'demo-abc'}" in running.action
    assert demos[f"demo {folder / 'demo-left'}"].level == "note"
    engine.kill()
    demos = {one.check: one for one in examine([folder], settings) if one.check.startswith("demo ")}
    assert demos[f"demo {folder / 'demo-abc'}"].level == "note"


def test_doctor_tells_that_a_port_is_taken(folder: Path) -> None:
    import socket

    from agent.config import load_settings

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        name = f"127.0.0.1:{taken.getsockname()[1]}"
        findings = examine([folder], load_settings({"listen": name}, environment={}))
    (port,) = [one for one in findings if one.check == f"port {name}"]
    assert (port.level, port.message) == ("note", "cannot be had: Address already in use")


@pytest.mark.parametrize(
    ("environment", "level", "part"),
    [
        ({}, "ok", "rules, told to log"),
        ({"KVATLAS_WEBHOOK_URL": "http://127.0.0.1:9/x"}, "warning", "log, webhook, kept in memory alone"),
        ({"KVATLAS_WEBHOOK_URL": "http://127.0.0.1:9/x", "KVATLAS_ALERT_STORE": "/x"}, "ok", "log, webhook"),
        ({"KVATLAS_SLACK_WEBHOOK_URL": "http://hooks.example/secret"}, "failed", "https"),
        ({"KVATLAS_ALERT_RULES": "/nowhere.yml"}, "failed", "/nowhere.yml: No such file"),
    ],
)
def test_doctor_tells_whether_alerts_are_set_up(
    folder: Path, environment: dict[str, str], level: str, part: str
) -> None:
    from agent.config import load_settings

    findings = examine([folder], load_settings({"listen": "127.0.0.1:0"}, environment=environment))
    (alerts,) = [one for one in findings if one.check == "alerts"]
    assert alerts.level == level
    assert part in alerts.message
    assert "secret" not in alerts.message


def test_doctor_refuses_both_distributions_in_one_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent.config import load_settings

    settings = load_settings({"listen": "127.0.0.1:0"}, environment={})
    monkeypatch.setattr("agent.doctor.installed", lambda: {"kvatlas": "1", "kvatlas-shim": "1"})
    findings = examine([folder], settings)
    assert [one.check for one in findings if one.level == "failed"] == ["distributions"]
    assert not to_json(findings)["ok"]
    assert to_json([Finding("a", "warning", "b")])["ok"]


def test_dashboard_becomes_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: called.append(command))
    assert cli.main(["dashboard", "--listen", "127.0.0.1:9", "--agent", "http://127.0.0.1:8"]) == 0
    assert called[0][1:4] == ["-P", "-m", "dashboard"]
    assert called[0][4:8] == ["--listen", "127.0.0.1:9", "--agent", "http://127.0.0.1:8"]
    monkeypatch.delenv("KVATLAS_AGENT_URL", raising=False)
    for given, told in (
        (["--agent", "http://a:1", "--agent", "http://b:2"], "http://a:1,http://b:2"),
        (["--agent", "http://a:1,http://b:2"], "http://a:1,http://b:2"),
        ([], cli.AGENT_URLS[0]),
    ):
        assert cli.main(["dashboard", *given]) == 0
        assert called[-1][7] == told


def test_dashboard_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    assert cli.main(["dashboard"]) == 2
    assert "kvatlas[dashboard]" in capsys.readouterr().err


def test_log_lines_are_json() -> None:
    import logging

    record = logging.LogRecord("kvatlas.x", logging.WARNING, "", 0, "an event", None, None)
    record.fields = {"subject": "ü\n", "count": 3}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["event"], parsed["level"], parsed["subject"], parsed["count"]) == ("an event", "warning", "ü\n", 3)
    assert parsed["time"].endswith("Z")
