"""Settings: flags over environment over file, and errors that contain the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.alerting.sinks import make_sinks
from agent.blackbox.privacy import known_secrets, tell_settings
from agent.config import AgentSettings, load_settings, parse_address, variable
from engine_shim.errors import SettingsError


def test_flags_beat_environment_beat_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("interval_seconds: 2\nstall-seconds: 7\nthreshold: 0.5\n")
    environment = {"KVATLAS_INTERVAL_SECONDS": "3", "KVATLAS_STALL_SECONDS": "8", "KVATLAS_UNRELATED": "x"}
    settings = load_settings({"interval_seconds": 4.0}, file=file, environment=environment)
    assert (settings.interval_seconds, settings.stall_seconds, settings.threshold) == (4.0, 8.0, 0.5)
    assert load_settings({}, environment={}) == AgentSettings()


def test_off_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("compaction: off")
    assert load_settings({}, file=file, environment={}).compaction == "off"
    file.write_text("compaction: on")
    with pytest.raises(SettingsError, match="compaction=True"):
        load_settings({}, file=file, environment={})


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('listen = "192.0.2.1:1234"\n')
    assert load_settings({}, file=file, environment={}).address == ("192.0.2.1", 1234)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings({}, environment={"KVATLAS_LISTEN": ""}).listen == AgentSettings().listen


@pytest.mark.parametrize(
    ("flags", "environment", "parts"),
    [
        ({}, {"KVATLAS_INTERVAL_SECONDS": "soon"}, ["interval_seconds='soon' in the environment", "valid number"]),
        ({"interval_seconds": 0}, {}, ["interval_seconds=0 on the command line", "0.05", "--interval-seconds"]),
        ({"interval_seconds": "nan"}, {}, ["interval_seconds='nan'", "finite"]),
        ({"listen": "nowhere"}, {}, ["listen='nowhere'", "HOST:PORT", "KVATLAS_LISTEN"]),
        ({"listen": "1.2.3.4:99999"}, {}, ["HOST:PORT"]),
        ({"log_level": "loud"}, {}, ["log_level='loud'", "'warning'"]),
        ({"token": "a", "token_file": "b"}, {}, ["token and token_file are both given on the command line"]),
        ({"token": ""}, {}, ["token is empty"]),
        (
            {"history_seconds": 86_400},
            {"KVATLAS_INTERVAL_SECONDS": "0.1"},
            ["864,000 samples a pool", "longer interval"],
        ),
    ],
)
def test_wrong_values_are_named_with_their_source(
    flags: dict[str, Any], environment: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, environment=environment)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("missing.yaml", None, ["missing.yaml", "No such file"]),
        ("bad.yaml", "a: [", ["bad.yaml cannot be parsed"]),
        ("bad.toml", "a = = 1", ["bad.toml cannot be parsed"]),
        ("deep.yaml", "[" * 5000, ["deep.yaml cannot be parsed: it is nested too deeply"]),
        ("deep.toml", "a = " + "[" * 5000, ["deep.toml cannot be parsed: it is nested too deeply"]),
        ("list.yaml", "- 1", ["settings by name"]),
        ("typo.yaml", "intervall: 1", ["intervall in", "not a setting", "interval_seconds"]),
        ("wrong.yaml", "threshold: 3", ["threshold=3 in ", "wrong.yaml", "less than or equal to 1"]),
        ("bytes.yaml", b"\xff\xfe\xff", ["not text"]),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes | None, parts: list[str]) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError) as caught:
        load_settings({}, file=file, environment={})
    for part in parts:
        assert part in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.touch()
    assert load_settings({}, file=file, environment={}) == AgentSettings()


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert load_settings({"token_file": file}, environment={}).read_token() == "secret"
    assert load_settings({"token": "other"}, environment={}).read_token() == "other"
    assert load_settings({}, environment={}).read_token() is None
    # The nearer layer wins.
    assert load_settings({"token": "near"}, environment={"KVATLAS_TOKEN_FILE": str(file)}).read_token() == "near"
    assert load_settings({"token_file": file}, environment={"KVATLAS_TOKEN": "far"}).read_token() == "secret"


def test_token_files_that_hold_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for file, reason in ((empty, "is empty"), (tmp_path / "missing", "No such file"), (tmp_path, "directory")):
        with pytest.raises(SettingsError, match=reason):
            load_settings({"token_file": file}, environment={}).read_token()


def test_a_token_is_never_shown() -> None:
    settings = load_settings({"token": "very secret"}, environment={})
    assert "very secret" not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        load_settings({"token": ["very secret"]}, environment={})
    assert "very secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80)), ("host.local:9477", ("host.local", 9477))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":80", "host:", "::1:80", "host:port", "a b:80", "http://host:80"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_every_setting_has_a_flag_and_a_description() -> None:
    """A setting that only the file could reach would break the rule that each has three ways in. The exceptions are
    addresses that are secrets: those have a file's flag."""
    from inspect import signature

    from agent.commands.serve import agent_command

    with_flag = set(signature(agent_command()).parameters) - {"config"}
    without = set(AgentSettings.model_fields) - with_flag
    assert without == {"slack_webhook_url", "alertmanager_url", "webhook_url"}
    assert {f"{name}_file" for name in without} <= with_flag
    assert all(field.description for field in AgentSettings.model_fields.values())
    assert variable("stall_seconds") == "KVATLAS_STALL_SECONDS"


@pytest.mark.parametrize("name", ["slack_webhook_url", "alertmanager_url", "webhook_url"])
def test_a_secret_address_is_not_repeated(name: str) -> None:
    environment = {variable(name): "https://hooks.example/T0/secret", variable(f"{name}_file"): "/x"}
    with pytest.raises(SettingsError, match=f"{name} and {name}_file are both given in the environment") as caught:
        load_settings({}, environment=environment)
    assert "secret" not in str(caught.value)
    settings = load_settings({}, environment={variable(name): "https://hooks.example/T0/secret"})
    assert "secret" not in repr(settings)
    assert "secret" not in str(settings.model_dump())


@pytest.mark.parametrize("who", ["slack", "alertmanager", "webhook"])
def test_a_proxy_s_password_belongs_not_on_the_command_line(who: str, tmp_path: Path) -> None:
    name, url = f"{who}_proxy", "http://user:hunter22@proxy.example:3128"
    with pytest.raises(SettingsError, match=f"{variable(name)}, or in a file that --{who}-proxy-file names") as refused:
        load_settings({name: url}, environment={})
    assert "hunter22" not in str(refused.value)
    assert getattr(load_settings({name: "http://proxy.example:3128"}, environment={}), name).endswith(":3128")

    file = tmp_path / "proxy"
    file.write_text(url + "\n")
    receiver = {f"KVATLAS_{who.upper()}_URL": "https://hooks.example/x"}
    receiver |= {"KVATLAS_SLACK_WEBHOOK_URL": "https://hooks.example/x"} if who == "slack" else {}
    for given in ({variable(name): url}, {variable(f"{name}_file"): str(file)}):
        settings = load_settings({}, environment=given | receiver)
        assert "hunter22" in known_secrets(settings)  # and so in no bundle
        assert "hunter22" not in str(tell_settings(settings))
        (sink,) = make_sinks(settings, only=who)
        assert sink.name == who
    missing = load_settings({f"{name}_file": tmp_path / "missing"}, environment=receiver)
    with pytest.raises(SettingsError, match=f"{name}: .*missing cannot be read"):
        make_sinks(missing, only=who)
    with pytest.raises(SettingsError, match=f"{name} and {name}_file are both given"):
        load_settings({}, environment={variable(name): "none", variable(f"{name}_file"): str(file)})
