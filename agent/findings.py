"""One checked thing of `kvatlas doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing. `action` says what to do and is "" where there is nothing to do."""

    check: str
    level: Level
    message: str
    action: str = ""
