"""The agent's settings: flags over environment over file, read once, and errors that contain the fix."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from agent.alerting.settings import AlertSettings
from agent.compaction.model import PolicySettings
from agent.compaction.settings import DriverSettings, Scope
from agent.devices.settings import DeviceSettings
from agent.engine_metrics.settings import EngineMetricsSettings
from agent.history.settings import ALERT_STORE, AUDIT_LOG, HistorySettings
from agent.sampling.judgement import Limits
from agent.sampling.sampler import SamplerSettings
from engine_shim.allocation_map.folders import map_folders
from engine_shim.errors import SettingsError

ENV_PREFIX = "KVATLAS_"
DEFAULT_LISTEN = "127.0.0.1:9477"
MAX_HISTORY_SAMPLES = 86_400  # 4 MB a pool


class AgentSettings(AlertSettings, EngineMetricsSettings, DeviceSettings, HistorySettings):
    """Every setting has a flag (`--stall-seconds`), a variable (`KVATLAS_STALL_SECONDS`) and a key in the file; an
    address that is a secret has no flag."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore", frozen=True, allow_inf_nan=False)

    listen: str = Field(default=DEFAULT_LISTEN, description="address and port to serve on, as HOST:PORT")
    dir: str = Field(
        default="", description="folders to look for maps in, separated by colons; empty: the host's usual ones"
    )
    interval_seconds: float = Field(default=1.0, ge=0.05, le=60, description="time between samples")
    history_seconds: float = Field(
        default=3600.0, ge=10, le=86_400, description="how far back the history in memory goes"
    )
    threshold: float = Field(
        default=0.30, ge=0, le=1, description="fragmentation rate above which a pool is called fragmented"
    )
    stall_seconds: float = Field(default=3.0, gt=0, le=3600, description="requests run and no step ends: stalled")
    stale_seconds: float = Field(default=5.0, gt=0, le=3600, description="no heartbeat: stale")
    gone_seconds: float = Field(
        default=300.0, ge=0, le=86_400, description="how long the last map of an ended engine is shown"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe event to log"
    )
    token: SecretStr | None = Field(default=None, description="bearer token for requests that change something")
    token_file: Path | None = Field(default=None, description="file that holds the token, instead of `token`")

    compaction: str = Field(
        default="reference",
        description="engines that the agent may change: off, reference (our own), all, or engine ids by commas",
    )
    compaction_enter: float = Field(default=0.30, ge=0, le=1, description="act above this fragmentation rate")
    compaction_exit: float = Field(default=0.20, ge=0, le=1, description="an episode ends at this one")
    compaction_target: float = Field(default=0.10, ge=0, le=1, description="rate that a run is to come down to")
    compaction_for_seconds: float = Field(
        default=10.0, ge=0, le=86_400, description="that an episode must last before anything is done"
    )
    compaction_cooldown_seconds: float = Field(
        default=30.0, ge=0, le=86_400, description="between the end of a run and the next one"
    )
    compaction_written_share: float = Field(
        default=0.01, ge=0, le=1, description="share of the KV bytes written that moves of live blocks may amount to"
    )
    compaction_relocation: bool = Field(default=True, description="switch relocating allocation on where there is one")
    compaction_relocation_copies: float = Field(
        default=2.0, ge=0, le=1000, description="copies per allocated block that relocation may cost"
    )
    compaction_require_consumer: bool = Field(
        default=False, description="do nothing for an engine without a consumer of contiguous blocks"
    )
    compaction_consumers: str = Field(
        default="", description="consumers that the engines have, by commas, besides those that they name themselves"
    )
    audit_log: Path | None = Field(default=None, description="file of JSON lines for what was decided and asked for")

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("compaction", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value

    @field_validator("compaction")
    @classmethod
    def _compaction_is_a_scope(cls, value: str) -> str:
        Scope.parse(value)
        return value

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if not self.compaction_target <= self.compaction_enter or not self.compaction_exit <= self.compaction_enter:
            named = f"compaction_enter={self.compaction_enter:g}"
            raise ValueError(
                f"{named} is below compaction_exit={self.compaction_exit:g} or"
                f" compaction_target={self.compaction_target:g}: both must be at most as high"
            )
        return self

    @model_validator(mode="after")
    def _history_fits(self) -> Self:
        samples = self.history_seconds / self.interval_seconds
        if samples > MAX_HISTORY_SAMPLES:
            pair = f"history_seconds={self.history_seconds:g} with interval_seconds={self.interval_seconds:g}"
            raise ValueError(
                f"{pair} is {samples:,.0f} samples a pool; at most {MAX_HISTORY_SAMPLES:,}:"
                " take a longer interval or less history"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # load_settings merges the layers, to know where each value came from

    @property
    def address(self) -> tuple[str, int]:
        return parse_address(self.listen)

    def map_folders(self) -> tuple[Path, ...]:
        """Where engines' maps are looked for, now."""
        return map_folders({"KVATLAS_DIR": self.dir}) if self.dir else map_folders()

    def sampler(self) -> SamplerSettings:
        limits = Limits(stall_seconds=self.stall_seconds, stale_seconds=self.stale_seconds)
        return SamplerSettings(self.interval_seconds, self.gone_seconds, limits=limits)

    def compaction_driver(self) -> DriverSettings:
        policy = PolicySettings(
            enter=self.compaction_enter,
            exit=self.compaction_exit,
            for_seconds=self.compaction_for_seconds,
            cooldown_seconds=self.compaction_cooldown_seconds,
            written_share=self.compaction_written_share,
            relocation=self.compaction_relocation,
            relocation_copies_per_block=self.compaction_relocation_copies,
            require_consumer=self.compaction_require_consumer,
        )
        consumers = tuple(name.strip() for name in self.compaction_consumers.split(",") if name.strip())
        return DriverSettings(
            policy=policy, scope=Scope.parse(self.compaction), target=self.compaction_target, consumers=consumers
        )

    def read_token(self) -> str | None:
        """The token itself. Raises SettingsError where the file cannot be read or holds none."""
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise SettingsError(
                f"token_file={self.token_file}: {reason}; name a file that this user may read"
            ) from error
        if not token:
            raise SettingsError(f"token_file={self.token_file} is empty; write the token into it")
        return token


def load_settings(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> AgentSettings:
    """Merge the three layers and check them. `flags` holds only those that were given.

    Raises SettingsError that names the setting, its value, where it came from, and what would be right.
    """
    names = AgentSettings.model_fields
    _refuse_passwords(flags)
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        from_file = _read_file(file)
        for name in from_file:
            if name not in names:
                raise SettingsError(f"{name} in {file} is not a setting; there are {', '.join(names)}")
        layers.append((f"in {file}", from_file))
    from_environment = {name: environment[variable(name)] for name in names if environment.get(variable(name))}
    layers.append(("in the environment", from_environment))
    layers.append(("on the command line", dict(flags)))
    merged: dict[str, Any] = {}
    source: dict[str, str] = {}
    for where, values in layers:
        for name, value in values.items():
            merged[name], source[name] = value, where
    for name in [name for name in merged if f"{name}_file" in merged]:
        other = f"{name}_file"
        # The nearer layer wins over the farther one, as for any setting; in one layer they contradict.
        if source[name] == source[other]:
            raise SettingsError(f"{name} and {other} are both given {source[name]}; give one")
        del merged[name if _nearer(source[other], source[name], layers) else other]
    if state_dir := merged.get("state_dir"):
        # One folder is enough; who wants a file elsewhere names it.
        for name, file_name in (("alert_store", ALERT_STORE), ("audit_log", AUDIT_LOG)):
            merged.setdefault(name, Path(str(state_dir)) / file_name)
    try:
        settings = AgentSettings(**merged)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(one, source) for one in error.errors())) from error
    if settings.token is not None and not settings.token.get_secret_value():
        raise SettingsError("token is empty; give one, or leave it out")
    return settings


def _refuse_passwords(flags: Mapping[str, Any]) -> None:
    """Raises SettingsError, which does not repeat it, for a proxy with a password on the command line."""
    for name, value in flags.items():
        if name.endswith("_proxy") and "@" in str(value):
            raise SettingsError(
                f"{name} on the command line holds a user or a password, which every user of this host sees in the list"
                f" of processes; give it in the variable {variable(name)}, or in a file that"
                f" --{name.replace('_', '-')}-file names"
            )


def has_flag(name: str) -> bool:
    """Whether a setting may stand on the command line."""
    extra = AgentSettings.model_fields[name].json_schema_extra
    return not (isinstance(extra, dict) and extra.get("flag") is False)


def variable(name: str) -> str:
    """The environment's twin of a setting."""
    return ENV_PREFIX + name.upper()


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 host in brackets. Raises ValueError."""
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65_535:
        raise ValueError(f"write it as HOST:PORT, such as {DEFAULT_LISTEN}")
    return match["six"] or match["host"], int(match["port"])


def _nearer(one: str, other: str, layers: list[tuple[str, dict[str, Any]]]) -> bool:
    order = [where for where, _ in layers]
    return order.index(one) > order.index(other)


def _read_file(path: Path) -> dict[str, Any]:
    """A TOML file by its suffix, else YAML (of which JSON is a part); keys may be written with hyphens."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"settings file {path}: {reason}; name a file that this user may read") from error
    try:
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        else:
            import yaml  # only here: few use a file, and every agent pays for the import

            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error).replace("\n", " ")) from error
    except ValueError as error:
        raise SettingsError(f"settings file {path} cannot be parsed: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"settings file {path} cannot be parsed: it is nested too deeply") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path} must hold settings by name, such as 'interval_seconds: 1'")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _describe(problem: Mapping[str, Any], source: Mapping[str, str]) -> str:
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    field = AgentSettings.model_fields.get(name)
    hidden = field is not None and SecretStr in get_args(field.annotation)
    value = "(hidden)" if hidden else re.sub(r"//[^/@\s]*@", "//(hidden)@", repr(problem.get("input")))
    where = source.get(name, "by default")
    advice = str(problem["msg"]).removeprefix("Value error, ")
    flag = f"flag --{name.replace('_', '-')}, " if field is None or has_flag(name) else ""
    return f"{name}={value} {where}: {advice} ({flag}variable {variable(name)})"
