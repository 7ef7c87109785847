"""What was read from engines' own metrics: frozen, with what is doubtful about it said beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.engine_metrics.names import EngineKind, Quantity
from agent.engine_metrics.sources import MetricsSource

Values = Mapping[Quantity, float]  # what is not exported, or not believable, is absent
FROZEN_SECONDS = 15.0  # an engine that runs requests and changes nothing for so long
STALE_SECONDS = 30.0  # numbers that are older are no longer exported: what is gone is absent
MISSED = 3  # readings; where these take longer than the seconds above, they count


def frozen_after(interval_seconds: float) -> float:
    """How long nothing may change while requests run, at that time between readings."""
    return max(FROZEN_SECONDS, MISSED * interval_seconds)


@dataclass(frozen=True, slots=True)
class RankReading:
    """One data-parallel rank of one engine; `rank` is None where the text does not tell ranks apart."""

    rank: int | None
    values: Values


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One engine as one answer describes it: its ranks, and all of them together."""

    kind: EngineKind
    model: str  # "" where it is not told
    ranks: tuple[RankReading, ...]
    total: Values
    notes: tuple[str, ...] = ()

    def of_rank(self, rank: int) -> RankReading | None:
        """The rank of that number; where ranks are not told apart, the only one there is."""
        if len(self.ranks) == 1 and self.ranks[0].rank is None:
            return self.ranks[0]
        return next((one for one in self.ranks if one.rank == rank), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one address: the engines in it, and the process that gave it, where it can be told."""

    engines: tuple[EngineReading, ...]
    writer: float | None = None  # when that process started, Unix seconds


@dataclass(frozen=True, slots=True)
class SourceReading:
    """One address: its last good answer, and whether the last attempt brought one."""

    source: MetricsSource
    up: bool
    fault: str  # why the last attempt brought nothing; "" where it did, or where there was none yet
    began_unix: float | None = None  # when the last good answer was asked for
    read_unix: float | None = None  # and when it was there
    engines: tuple[EngineReading, ...] = ()
    unchanged_since_unix: Mapping[tuple[str, str], float] = field(default_factory=lambda: MappingProxyType({}))
    several_writers: bool = False  # more than one process answers in turn
    attempts: int = 0
    failures: int = 0

    def moved(self, seconds: float) -> SourceReading:
        """The same, read that much later: for a clock that was set ahead by as much since."""
        return replace(
            self,
            began_unix=None if self.began_unix is None else self.began_unix + seconds,
            read_unix=None if self.read_unix is None else self.read_unix + seconds,
            unchanged_since_unix=MappingProxyType(
                {engine: since + seconds for engine, since in self.unchanged_since_unix.items()}
            ),
        )

    def age_seconds(self, now_unix: float) -> float | None:
        """None before the first good answer."""
        return None if self.read_unix is None else max(0.0, now_unix - self.read_unix)

    def frozen_seconds(self, engine: EngineReading, now_unix: float) -> float:
        """How long nothing has changed though requests run: the engine hangs, or its gauges are no longer written.

        0 where something changes, or nothing runs.
        """
        since = self.unchanged_since_unix.get((engine.kind, engine.model))
        if since is None or not engine.total.get(Quantity.RUNNING):
            return 0.0
        return max(0.0, now_unix - since)


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity as the metrics have it, and the range that the map had in the seconds around the reading.

    For counters both are what was added since the two were first held against each other.
    """

    quantity: Quantity
    metrics: float
    map_low: float
    map_high: float
    ratio: float  # 0 to 1: how far outside that range; of the larger number for counts
    beyond: bool  # farther than the tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the metrics of an engine and the map of one of its pools agree."""

    pool_id: str
    made_unix: float | None = None  # None: not yet made
    why_not: str = ""  # why it is not made
    differences: tuple[Difference, ...] = ()
    disagrees: bool = False  # beyond tolerance in more than one reading in a row
    reason: str = ""  # both numbers, where they disagree

    @property
    def ratio(self) -> float | None:
        """The largest disagreement that lasts, 0 where there is none; None where nothing could be compared."""
        if self.made_unix is None or self.why_not:
            return None
        return max((one.ratio for one in self.differences if one.beyond), default=0.0) if self.disagrees else 0.0


@dataclass(frozen=True, slots=True)
class JoinedReading:
    """What the metrics say of the engine of one pool."""

    engine_id: str
    reading: SourceReading
    engine: EngineReading
    rank: RankReading
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class UnmappedEngine:
    """An engine that is known from its metrics alone: there is no block map, and so no fragmentation."""

    id: str
    engine_id: str
    reading: SourceReading
    engine: EngineReading


@dataclass(frozen=True, slots=True)
class EngineMetricsView:
    """Everything read from metrics, as of one moment."""

    sources: tuple[SourceReading, ...] = ()
    by_pool: Mapping[str, JoinedReading] = field(default_factory=lambda: MappingProxyType({}))
    unmapped: tuple[UnmappedEngine, ...] = ()
    interval_seconds: float = 5.0  # between two readings of one address

    @property
    def stale_seconds(self) -> float:
        """Older numbers are no longer exported."""
        return max(STALE_SECONDS, MISSED * self.interval_seconds)

    def disagreement_ratio(self, pool_id: str) -> float | None:
        """0 where map and metrics agree, up to 1; None where they cannot be compared. For rules on named numbers."""
        joined = self.by_pool.get(pool_id)
        return None if joined is None else joined.comparison.ratio
