"""Which engines the agent may change by itself, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from agent.compaction.model import PolicySettings
from engine_shim.snapshot import WATCHED_ONLY, EngineIdentity

OWN_KIND = "reference"


@dataclass(frozen=True, slots=True)
class Scope:
    """Engines by kind, or by name; an engine in production is changed only where its operator named it."""

    kinds: frozenset[str] | None = frozenset()  # None: every kind
    engines: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """`off`, `reference`, `all`, or engine ids with commas between them. Raises ValueError."""
        if text == "off":
            return cls()
        if text == "reference":
            return cls(frozenset({OWN_KIND}))
        if text == "all":
            return cls(None)
        names = [name.strip() for name in text.split(",")]
        if not all(names) or {"off", "all"} & set(names):
            raise ValueError("give off, reference, all, or engine ids with commas between them")
        return cls(engines=frozenset(names))

    def why_not(self, identity: EngineIdentity) -> str:
        """Why the agent leaves this engine alone; "" where it may change it."""
        if identity.kind in WATCHED_ONLY:
            return f"engines of kind {identity.kind!r} are watched alone: nothing of KVAtlas can move their blocks"
        if self.kinds is None or identity.kind in self.kinds or identity.engine_id in self.engines:
            return ""
        if not self.kinds and not self.engines:
            return "this agent was told to leave every engine alone (setting compaction: off)"
        which = ", ".join(sorted(self.engines)) or "those of our own kind, reference"
        return (
            f"this agent may act on {which} alone (setting compaction); engine {identity.engine_id!r} of kind"
            f" {identity.kind!r} is not among them. Naming it there lets the agent act as far as the engine was started"
            " to allow it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """What the driver of the policy is told; times in seconds."""

    policy: PolicySettings = field(default_factory=PolicySettings)
    scope: Scope = field(default_factory=Scope)
    target: float = 0.10  # that runs come down to
    run_seconds: float = 60.0  # then the engine ends a run as far as it came
    consumers: tuple[str, ...] = ()  # that the operator declares, for every engine
    status_seconds: float = 5.0  # between questions how an engine stands to moving, while F is up
    retry_seconds: float = 15.0  # the same where it gave no answer
    workers: int = 8  # engines that are asked at once
    planning_share: float = 0.02  # of the time that planning for one pool may take
