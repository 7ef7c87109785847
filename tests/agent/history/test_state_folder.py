"""One folder for everything that outlives the agent, and what doctor says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agent import doctor
from agent.config import load_settings
from agent.doctor import Finding, examine
from engine_shim.errors import SettingsError


def test_the_folder_places_what_nobody_placed_elsewhere(tmp_path: Path) -> None:
    settings = load_settings({}, environment={"KVATLAS_STATE_DIR": str(tmp_path)})
    assert (settings.alert_store, settings.audit_log) == (tmp_path / "alerts.sqlite", tmp_path / "audit.jsonl")
    elsewhere = load_settings({"alert_store": "/x/a"}, environment={"KVATLAS_STATE_DIR": str(tmp_path)})
    assert (elsewhere.alert_store, elsewhere.audit_log) == (Path("/x/a"), tmp_path / "audit.jsonl")
    without = load_settings({}, environment={})
    assert (without.state_dir, without.alert_store, without.audit_log) == (None, None, None)


def test_a_size_that_holds_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match="state_max_mib='5'"):
        load_settings({}, environment={"KVATLAS_STATE_MAX_MIB": "5"})


def state_finding(**environment: str) -> Finding:
    (found,) = [
        one for one in examine((), load_settings({}, environment=environment)) if one.check.startswith("state folder")
    ]
    return found


def test_doctor_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_devices", list)
    # A disk of its own, which is neither full nor larger than what is asked for below.
    disk = SimpleNamespace(total=2**41, used=0, free=2**37)
    monkeypatch.setattr("agent.doctor.shutil.disk_usage", lambda folder: disk)
    assert state_finding().level == "note"
    assert state_finding(KVATLAS_STATE_DIR=str(tmp_path / "not" / "yet")).level == "ok"
    (tmp_path / "file").touch()
    assert state_finding(KVATLAS_STATE_DIR=str(tmp_path / "file")).level == "failed"
    large = state_finding(KVATLAS_STATE_DIR=str(tmp_path), KVATLAS_STATE_MAX_MIB="1048576")
    assert (large.level, "lower KVATLAS_STATE_MAX_MIB" in large.action) == ("warning", True)
