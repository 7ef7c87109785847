"""What is found out while a config.json is read: how far to trust it, notes, warnings, and the errors it can end in."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.capacity.geometry import Confidence, weakest
from engine_shim.errors import KvatlasError, SettingsError


class LayoutUnknown(KvatlasError):
    """The file describes a cache that no formula here counts. Take sizes from the engine's own log."""


@dataclass(slots=True)
class Reading:
    """Findings so far; `lower` keeps the weakest confidence."""

    confidence: Confidence = "high"
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def lower(self, to: Confidence, why: str) -> None:
        """Trust the result no further than `to`, and say why."""
        self.confidence = weakest(self.confidence, to)
        if why not in self.warnings:
            self.warnings.append(why)


def missing(name: str, why: str) -> SettingsError:
    """The error for a field that is needed and not there, or not of the form it needs."""
    return SettingsError(f"the config has no usable {name} ({why}); mend the file")
