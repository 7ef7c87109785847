"""The agent's settings that are about alerts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings

TIMEOUT_SECONDS = 10.0
NO_FLAG: JsonDict = {"flag": False}  # other users of the host see what stands on a command line
PROXY = "proxy: environment (HTTPS_PROXY and its like), none, or the URL of one, on a command line without a password"


class AlertSettings(BaseSettings):
    """Rules, where states are kept, and who is told."""

    alert_rules: Path | None = Field(
        default=None, description="YAML file that changes the rules of alerts and adds others"
    )
    alert_store: Path | None = Field(
        default=None, description="SQLite file for what must outlive the agent: open alerts, what is to be sent, mutes"
    )
    alert_page: str = Field(
        default="", description="address of the dashboard, for the links in messages; empty: the agent's own API"
    )
    alert_runbook: str = Field(default="", description="address of the page that docs/runbook.md is published as")
    alert_log: bool = Field(default=True, description="write each alert to the log")

    slack_webhook_url: SecretStr | None = Field(
        default=None, description="URL of a Slack incoming webhook", json_schema_extra=NO_FLAG
    )
    slack_webhook_url_file: Path | None = Field(default=None, description="file that holds that URL instead")
    slack_severity: Literal["info", "warning", "critical"] = Field(
        default="info", description="least severity that Slack is told of"
    )
    slack_proxy: str = Field(default="environment", description=f"Slack's {PROXY}")
    slack_proxy_file: Path | None = Field(default=None, description="file that holds the URL of that proxy instead")
    slack_timeout_seconds: float = Field(default=TIMEOUT_SECONDS, gt=0, le=120, description="Slack's time to answer")

    alertmanager_url: SecretStr | None = Field(
        default=None, description="address of Alertmanager, in front of /api/v2", json_schema_extra=NO_FLAG
    )
    alertmanager_url_file: Path | None = Field(default=None, description="file that holds that address instead")
    alertmanager_proxy: str = Field(default="environment", description=f"Alertmanager's {PROXY}")
    alertmanager_proxy_file: Path | None = Field(
        default=None, description="file that holds the URL of that proxy instead"
    )
    alertmanager_timeout_seconds: float = Field(
        default=TIMEOUT_SECONDS, gt=0, le=120, description="Alertmanager's time to answer"
    )

    webhook_url: SecretStr | None = Field(
        default=None, description="URL that is posted Alertmanager's payload", json_schema_extra=NO_FLAG
    )
    webhook_url_file: Path | None = Field(default=None, description="file that holds that URL instead")
    webhook_proxy: str = Field(default="environment", description=f"the webhook's {PROXY}")
    webhook_proxy_file: Path | None = Field(default=None, description="file that holds the URL of that proxy instead")
    webhook_timeout_seconds: float = Field(
        default=TIMEOUT_SECONDS, gt=0, le=120, description="the webhook's time to answer"
    )
