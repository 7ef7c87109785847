"""`kvatlas compact` as a person or a script calls it, with real engines in other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.compaction.audit import read_entries
from agent.compaction.control_client import EngineControl
from engine_shim.allocation_map.reader import MapReader
from engine_shim.control.messages import StatusReply, StatusRequest

Start = Callable[..., Any]
Capture = pytest.CaptureFixture[str]
KEYS = {
    "schema",
    "engine",
    "decision",
    "reason",
    "planned_moves",
    "moved_blocks",
    "moved_bytes",
    "fragmentation_rate_before",
    "fragmentation_rate_after",
    "largest_allocatable_run_before",
    "largest_allocatable_run_after",
}


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command looks for engines in this test's folder alone."""
    monkeypatch.setenv("KVATLAS_DIR", str(folder))


def json_of(capsys: Capture, *arguments: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["compact", *arguments, "--json"]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    assert value.keys() >= KEYS
    assert value["schema"] == "kvatlas.compact/v1"
    return value


def error_of(capsys: Capture, *arguments: str, status: int) -> str:
    assert cli.main(["compact", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_dry_run_a_run_and_the_switch(start_pool: Start, capsys: Capture, tmp_path: Path) -> None:
    pool, log = start_pool(engine_id="one"), tmp_path / "audit.jsonl"
    plan = json_of(capsys, "one", "--dry-run", "--target", "0.2", "--audit-log", str(log))
    assert (plan["decision"], plan["moved_blocks"], plan["engine"]) == ("planned", 0, pool.id)
    assert plan["planned_moves"] > 0
    assert plan["fragmentation_rate_before"] > 0.3
    assert plan["fragmentation_rate_after"] <= 0.2
    few = json_of(capsys, pool.id, "--max-moves", "2", "--audit-log", str(log))
    assert few["planned_moves"] == few["moved_blocks"] == 2
    done = json_of(capsys, str(pool.path), "--audit-log", str(log))
    assert done["decision"] == "reached"
    assert done["moved_bytes"] == done["moved_blocks"] << 20
    assert done["fragmentation_rate_after"] <= 0.10
    assert done["largest_allocatable_run_after"] > done["largest_allocatable_run_before"]
    off = json_of(capsys, "one", "--off", "--audit-log", str(log))
    assert (off["decision"], off["planned_moves"]) == ("moving_off", None)
    refused = json_of(capsys, "one", "--target", "0", status=1)
    assert (refused["decision"], refused["moved_blocks"]) == ("refused", 0)
    status = EngineControl(pool.path).request(StatusRequest())
    assert isinstance(status, StatusReply)
    assert not status.moving
    assert json_of(capsys, "one", "--on", "--audit-log", str(log))["decision"] == "moving_on"
    noted = [(entry.action, entry.outcome, entry.asker.route, entry.asker.pid) for entry in read_entries(log)]
    assert noted == [
        ("compact", few["decision"], "cli", os.getpid()),
        ("compact", "reached", "cli", os.getpid()),
        ("moving", "off", "cli", os.getpid()),
        ("moving", "on", "cli", os.getpid()),
    ]


def test_a_change_that_is_in_no_audit_log_is_said(start_pool: Start, capsys: Capture, tmp_path: Path) -> None:
    start_pool(engine_id="one")
    (tmp_path / "file").write_text("")
    log = str(tmp_path / "file" / "audit.jsonl")
    assert cli.main(["compact", "one", "--off", "--json", "--audit-log", log]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["audit_log_fault"] in told.err
    assert told.err.startswith(f"warning: this is not in the audit log: {log}: ")
    assert told.err.endswith("name another file with --audit-log\n")
    assert json_of(capsys, "one", "--on", "--audit-log", str(tmp_path / "a"))["audit_log_fault"] == ""


def test_relocation_is_switched_and_stays_on_when_moves_are_off(
    start_pool: Start, capsys: Capture, tmp_path: Path
) -> None:
    pool, log = start_pool(engine_id="one", policy="vllm", relocation=True), tmp_path / "audit.jsonl"

    def relocates() -> bool | None:
        status = EngineControl(pool.path).request(StatusRequest())
        assert isinstance(status, StatusReply)
        return status.relocation

    on = json_of(capsys, "one", "--relocation", "--audit-log", str(log))
    assert (on["decision"], on["planned_moves"], relocates()) == ("relocation_on", None, True)
    off = json_of(capsys, "one", "--off")
    assert off["decision"] == "moving_off"
    assert "--no-relocation" in off["reason"]
    assert relocates()
    assert json_of(capsys, "one", "--no-relocation", "--audit-log", str(log))["decision"] == "relocation_off"
    assert not relocates()
    assert "--no-relocation" not in json_of(capsys, "one", "--off")["reason"]
    noted = [(entry.action, entry.outcome, entry.parameters) for entry in read_entries(log)]
    assert noted == [("relocation", "on", {"on": True}), ("relocation", "off", {"on": False})]


def test_relocation_that_an_engine_does_not_have(start_pool: Start, capsys: Capture) -> None:
    pool = start_pool()
    assert "no relocation here" in error_of(capsys, pool.id, "--relocation", status=1)


def test_kvatlas_is_taken_out_of_an_engine(start_pool: Start, capsys: Capture, tmp_path: Path) -> None:
    pool, log = start_pool(engine_id="one"), tmp_path / "audit.jsonl"
    gone = json_of(capsys, "one", "--unplug", "--audit-log", str(log))
    assert (gone["decision"], gone["reason"]) == ("instrumentation_off", "kvatlas compact --unplug")
    reader = MapReader(pool.path)
    try:
        assert reader.read(60).flags.degraded
    finally:
        reader.close()
    assert [(entry.action, entry.outcome) for entry in read_entries(log)] == [("unplug", "off")]


def test_what_a_person_reads(start_pool: Start, capsys: Capture) -> None:
    pool = start_pool()
    assert cli.main(["compact", pool.id, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{pool.id}: planned")
    assert "would be" in text
    assert cli.main(["compact", pool.id]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{pool.id}: reached")
    assert "the longest step was held up" in text
    assert cli.main(["compact", pool.id, "--off"]) == 0
    assert capsys.readouterr().out == f"{pool.id}: moving_off, moving is switched off\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "no engine 'none'"),
        (["engine", "--target", "2"], "target=2: give a fragmentation rate from 0 to 1"),
        (["engine", "--max-moves", "-1"], "max_moves=-1"),
        (["engine", "--off", "--dry-run"], "give one of --dry-run, --off, --on"),
        (["engine", "--on", "--no-relocation"], "--no-relocation and --unplug"),
        (["engine", "--unplug", "--off"], "give one of"),
        (["engine", "--target", "low"], "--target"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(start_pool: Start, capsys: Capture, arguments: list[str], words: str) -> None:
    pool = start_pool()
    text = error_of(capsys, *arguments, status=2)
    assert words in text
    if arguments == ["none"]:
        assert pool.id in text  # what there is


def test_an_engine_without_control(start_pool: Start, start_engine: Start, capsys: Capture) -> None:
    pool = start_pool(control=False)
    assert "this engine offers no control" in error_of(capsys, pool.id, status=1)
    observed = start_engine(engine_id="observed")
    assert "this engine offers no control" in error_of(capsys, "observed", "--off", status=1)
    assert "no such map" in error_of(capsys, str(observed.path.with_name("x.kvmap")), status=1)


def test_an_engine_that_has_ended(start_pool: Start, capsys: Capture) -> None:
    pool = start_pool()
    pool.process.kill()
    pool.process.wait()
    assert "has ended" in error_of(capsys, pool.id, status=1)


def test_one_engine_with_several_pools(start_pool: Start, start_engine: Start, capsys: Capture) -> None:
    pool = start_pool(engine_id="both")
    other = start_engine(engine_id="both", pool="window")
    text = error_of(capsys, "both", "--dry-run", status=2)
    assert str(pool.path) in text
    assert str(other.path) in text
    assert json_of(capsys, pool.id, "--dry-run")["engine"] == pool.id
    # A pool that nobody writes to any more does not stand in the way.
    other.kill()
    assert json_of(capsys, "both", "--dry-run")["engine"] == pool.id


def test_no_engine_at_all(capsys: Capture, folder: Path) -> None:
    assert f"no engine 'any' in {folder}: there are none" in error_of(capsys, "any", status=2)
