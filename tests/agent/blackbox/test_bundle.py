"""`kvatlas bundle` beside a real agent and real engines, one dead and one alive; and what must never be in it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agent import cli
from agent.blackbox.privacy import HIDDEN, hide, known_secrets, tell_settings
from agent.client import AgentClient
from agent.config import AgentSettings, load_settings

Start = Callable[..., Any]
DEAD_REQUEST, LIVE_REQUEST, SALT = "chatcmpl-of-the-dead", "chatcmpl-of-the-living", "a-tenants-salt"
TOKEN, WEBHOOK = "a-bearer-token-1", "https://hooks.slack.example/services/T0/B0/a-webhook-secret"
URL_FILE, PASSWORD = "http://alertmanager.example:9093/a-path-secret", "a-password-3"


def everything_in(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Every member, those of archives in it too."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        for entry in opened:
            content = opened.extractfile(entry).read()  # type: ignore[union-attr]
            yield entry.name, content
            if entry.name.endswith(".tar.gz"):
                yield from ((f"{entry.name}/{name}", inner) for name, inner in everything_in(content))


@pytest.fixture
def environment(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings with every kind of secret, for the agent and for the command."""
    (tmp_path / "url").write_text(URL_FILE + "\n")
    given = {
        "KVATLAS_STATE_DIR": str(tmp_path / "state"),
        "KVATLAS_DIR": str(folder),
        "KVATLAS_TOKEN": TOKEN,
        "KVATLAS_SLACK_WEBHOOK_URL": WEBHOOK,
        "KVATLAS_ALERTMANAGER_URL_FILE": str(tmp_path / "url"),
        "KVATLAS_ENGINE_METRICS": f"http://user:{PASSWORD}@127.0.0.1:1/metrics",
        "KVATLAS_SLACK_PROXY": "none",
        "KVATLAS_ALERTMANAGER_PROXY": "none",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


def test_a_bundle_has_what_a_report_needs_and_nothing_that_is_secret(
    environment: dict[str, str],
    tmp_path: Path,
    start_engine: Start,
    start_agent: Start,
    client_of: Callable[..., AgentClient],
    wait_until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead, alive = start_engine(engine_id="dead"), start_engine(engine_id="alive")
    for engine, request in ((dead, DEAD_REQUEST), (alive, LIVE_REQUEST)):
        engine.allocated([1, 2], engine.open_owner(request, cache_salt=SALT))
        engine.step_ended(0, 0)
    agent = start_agent("--interval-seconds", "0.2", environment=environment)
    client = client_of(agent)
    wait_until(lambda: len(client.engines().engines) == 2)
    assert client.requests(dead.id).requests[0].request_id == DEAD_REQUEST
    dead.kill()
    boxes = tmp_path / "state" / "blackbox"
    wait_until(lambda: list(boxes.glob("*.tar.gz")))
    wait_until(lambda: [one for one in client.marks(dead.id, 0, 1e10).marks if "gone" in one.text])

    monkeypatch.setenv("KVATLAS_AGENT_URL", agent.url)
    output = tmp_path / "report.tar.gz"
    assert cli.main(["bundle", "-o", str(output), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], facts["black_boxes"], facts["maps"], facts["left_out"]) == (
        "kvatlas.bundle/v1",
        1,
        2,
        [],
    )
    assert facts["bytes"] == output.stat().st_size
    assert output.stat().st_mode & 0o777 == 0o600
    content = dict(everything_in(output.read_bytes()))
    named = set(content)
    assert {"bundle.json", "settings.json", "doctor.json", "log.jsonl", "audit.jsonl"} <= named
    assert {"agent/engines.json", "agent/alerts.json", "agent/devices.json", "agent/metrics.txt"} <= named
    assert json.loads(content["bundle.json"])["members"].keys() == set(facts["members"]) - {"bundle.json"}
    assert json.loads(content["settings.json"])["token"] == HIDDEN
    assert json.loads(content["settings.json"])["state_dir"] == environment["KVATLAS_STATE_DIR"]
    assert json.loads(content["doctor.json"])["schema"] == "kvatlas.doctor/v1"
    assert any(json.loads(line)["event"] == "listening" for line in content["log.jsonl"].splitlines())
    hashed = hashlib.sha256(LIVE_REQUEST.encode()).hexdigest()[:32].encode()
    assert sum(hashed in one for name, one in content.items() if name.startswith("maps/alive")) == 2
    assert any(name.endswith("box.json") and name.startswith("blackbox/") for name in named)

    secrets = (TOKEN, "a-webhook-secret", "a-path-secret", PASSWORD)
    for word in (DEAD_REQUEST, LIVE_REQUEST, SALT, *secrets):
        assert [name for name, one in content.items() if word.encode() in one] == [], word
    # The negative control: the scan finds what is there, and the request ids were there to be found.
    assert [name for name, one in content.items() if b"kvatlas.doctor" in one] == ["doctor.json"]
    assert LIVE_REQUEST.encode() in alive.path.read_bytes()
    for file in (tmp_path / "state").rglob("*"):
        if file.is_file():
            stored = file.read_bytes()
            for word in (DEAD_REQUEST, LIVE_REQUEST, SALT, *secrets):
                assert word.encode() not in stored, file

    assert cli.main(["bundle", "dead", "-o", str(output)]) == 0
    assert "1 black box, 1 map\n" in capsys.readouterr().out
    assert not any("alive" in name for name in dict(everything_in(output.read_bytes())))
    assert cli.main(["bundle", "nobody", "-o", str(output)]) == 2
    assert "nothing is known of an engine 'nobody'" in capsys.readouterr().err
    elsewhere = tmp_path / "none" / "report.tar.gz"
    assert cli.main(["bundle", "dead", "-o", str(elsewhere)]) == 1
    assert f"error: {elsewhere} cannot be written (No such file or directory); give" in capsys.readouterr().err


def test_without_an_agent_it_packs_what_there_is(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVATLAS_AGENT_URL", "http://127.0.0.1:1")
    output = tmp_path / "report.tar.gz"
    assert cli.main(["bundle", "-o", str(output), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "settings.json" in facts["members"]
    assert any("ConnectError" in line for line in facts["left_out"])
    assert cli.main(["bundle", "-o", str(tmp_path / "nowhere" / "x.tar.gz")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_what_is_no_file_is_not_replaced(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "elsewhere")
    for output in (fifo, link):
        assert cli.main(["bundle", "-o", str(output)]) == 2
        assert "is no regular file" in capsys.readouterr().err
    assert fifo.is_fifo()
    assert link.is_symlink()


def test_what_is_no_address_is_said_before_anything_is_packed(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.tar.gz"
    assert cli.main(["bundle", "-o", str(output), "--agent", "http://127.0.0.1:94x7"]) == 2
    assert "KVATLAS_AGENT_URL is no address of an agent" in capsys.readouterr().err
    assert not output.exists()


def test_every_secret_is_known_and_none_is_told(environment: dict[str, str]) -> None:
    settings = load_settings({}, environment=environment)
    assert set(known_secrets(settings)) == {TOKEN, WEBHOOK, URL_FILE, PASSWORD}
    told = json.dumps(tell_settings(settings))
    for secret in known_secrets(settings):
        assert secret not in told
    assert "metrics" in told
    assert hide(f"posted to {WEBHOOK} with {TOKEN}", known_secrets(settings)) == f"posted to {HIDDEN} with {HIDDEN}"
    assert set(tell_settings(settings)) == set(AgentSettings.model_fields)


def test_settings_of_every_secret_kind_are_hidden() -> None:
    """A setting that is added later as a secret is hidden without anybody thinking of it."""
    secret = [name for name, field in AgentSettings.model_fields.items() if "SecretStr" in str(field.annotation)]
    assert len(secret) >= 4
    settings = AgentSettings.model_validate({name: SecretStr("x" * 20) for name in secret})
    assert [name for name, value in tell_settings(settings).items() if value == HIDDEN] == secret
