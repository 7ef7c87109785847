"""The agent's settings that are about what outlives it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

ALERT_STORE, AUDIT_LOG = "alerts.sqlite", "audit.jsonl"


class HistorySettings(BaseSettings):
    """Where what outlives the agent is kept, and how much of it."""

    state_dir: Path | None = Field(
        default=None,
        description="folder for the lasting history, black boxes, the store of alerts and the audit log;"
        " without it the history is in memory alone",
    )
    state_max_mib: int = Field(
        default=512, ge=32, le=1_048_576, description="size of the history in that folder, in MiB"
    )
    black_boxes: int = Field(default=20, ge=0, le=1000, description="black boxes of ended engines that are kept there")
