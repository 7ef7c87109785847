"""One look at an agent: every pool, the chosen one in detail, and what is alerted on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent import wire
from agent.client import AgentClient, AgentRefused
from agent.terminal.bar import cells_wanted
from agent.wire.alerts import AlertList, AlertRecord

SCHEMA = "kvatlas.top/v1"
TREND_SECONDS = 300.0
TREND_POINTS = 30
MEANINGFUL = ("live", "stale", "stalled")  # states in which there are blocks to draw
_SEVERITIES = {"critical": 3, "warning": 2, "info": 1}
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Look:
    """What the API said, as it said it. None where it was not asked, or in `missing` by name with the reason."""

    listing: wire.EngineList
    engines: tuple[wire.EngineSummary, ...]  # the worst first
    chosen: str | None  # id of a pool, or of an engine without a map
    alerts: AlertList | None = None
    cells: wire.MapCells | None = None
    requests: wire.RequestPage | None = None
    trend: wire.History | None = None  # of the fragmentation rate
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> wire.EngineSummary | None:
        return next((one for one in self.engines if one.id == self.chosen), None)

    @property
    def unmapped(self) -> wire.UnmappedEngine | None:
        return next((one for one in self.listing.unmapped if one.id == self.chosen), None)

    @property
    def ids(self) -> list[str]:
        """What can be chosen, in the order of the table."""
        return [*(one.id for one in self.engines), *(one.id for one in self.listing.unmapped)]

    def to_json(self) -> dict[str, Any]:
        """The answers under the names of the API."""

        def plain(one: wire.WireModel | None) -> dict[str, Any] | None:
            return None if one is None else one.model_dump(mode="json")

        return {
            "schema": SCHEMA,
            "now_unix": self.listing.now_unix,
            "agent": plain(self.listing.agent),
            "engines": [plain(one) for one in self.engines],
            "unmapped": [plain(one) for one in self.listing.unmapped],
            "id": self.chosen,
            "map": plain(self.cells),
            "requests": plain(self.requests),
            "history": plain(self.trend),
            "alerts": plain(self.alerts),
            "missing": self.missing,
        }


def take(client: AgentClient, wanted: str | None, columns: int) -> Look:
    """Ask the agent. `wanted` is a pool, an engine with one pool or without a map, or None for the worst pool; the bar
    gets at most `columns` columns.

    Raises AgentUnavailable where it does not answer, or not as an agent, and AgentRefused where it does not tell its
    engines. What else it refuses is left out, with its reason.
    """
    missing: dict[str, str] = {}

    def part(name: str, ask: Callable[[], Answer]) -> Answer | None:
        try:
            return ask()
        except AgentRefused as error:
            missing[name] = str(error)
            return None

    listing = client.engines()
    alerts = part("alerts", client.alerts)
    engines = tuple(worst_first(listing.engines, alerts))
    chosen = _resolve(wanted, engines, listing.unmapped)
    engine = next((one for one in engines if one.id == chosen), None)
    if engine is None:
        return Look(listing, engines, chosen, alerts, missing=missing)
    cells = requests = None
    if engine.state in MEANINGFUL:
        wide = cells_wanted(engine.total_blocks, columns)
        cells = part("map", lambda: client.map(engine.id, wide))
        requests = part("requests", lambda: client.requests(engine.id))
    trend = part("history", lambda: client.history(engine.id, "fragmentation", TREND_SECONDS, TREND_POINTS))
    return Look(listing, engines, chosen, alerts, cells, requests, trend, missing)


def told(alerts: AlertList | None) -> list[AlertRecord]:
    """Open alerts that fire, muted ones too, in the order of the API: the worst first."""
    return [one for one in alerts.open if one.state in ("firing", "muted")] if alerts is not None else []


def about(alert: AlertRecord, engine: wire.EngineSummary) -> bool:
    """Whether an alert is of this pool."""
    labels = alert.labels
    return (labels.get("engine_id"), labels.get("pool"), labels.get("rank")) == (
        engine.engine_id,
        engine.pool,
        engine.rank,
    )


def worst_first(engines: Sequence[wire.EngineSummary], alerts: AlertList | None) -> list[wire.EngineSummary]:
    """By the worst alert that fires, then engines in trouble, then where sequences wait, then by fragmentation."""
    firing = [one for one in told(alerts) if one.state == "firing"]

    def badness(engine: wire.EngineSummary) -> tuple[int, bool, bool, bool, float, str]:
        return (
            -max((_SEVERITIES[one.severity] for one in firing if about(one, engine)), default=0),
            engine.state in ("live", "sleeping"),
            not engine.forecast.admission_blocked,
            not engine.degraded,
            -(engine.fragmentation.rate or 0.0),
            engine.id,
        )

    return sorted(engines, key=badness)


def _resolve(
    wanted: str | None, engines: Sequence[wire.EngineSummary], unmapped: Sequence[wire.UnmappedEngine]
) -> str | None:
    """The id that is meant; one that is not known stays as it is, and is shown as not listed."""
    if wanted is None:
        return engines[0].id if engines else unmapped[0].id if unmapped else None
    if wanted in {*(one.id for one in engines), *(one.id for one in unmapped)}:
        return wanted
    of_engine = [one.id for one in engines if one.engine_id == wanted]
    return of_engine[0] if len(of_engine) == 1 else wanted
