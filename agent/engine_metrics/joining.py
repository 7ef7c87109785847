"""Which map belongs to which reading, and which readings are of engines without one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.engine_metrics.model import EngineReading, RankReading, SourceReading, UnmappedEngine
from agent.sampling.discovery import printable
from agent.sampling.model import PoolSample

MAIN_POOL = "kv"


@dataclass(frozen=True, slots=True)
class Match:
    """A pool, and what metrics say of its engine and rank."""

    pool_id: str
    reading: SourceReading
    engine: EngineReading
    rank: RankReading


def join(
    readings: Iterable[SourceReading], samples: Mapping[str, PoolSample]
) -> tuple[tuple[Match, ...], tuple[UnmappedEngine, ...]]:
    """Matches, and engines without a map.

    An address that the operator gave to an engine belongs to that engine's maps. Any other one belongs to the one
    engine of this host that has its kind and model; where there are several such engines, or the address leads
    elsewhere, nothing is guessed.
    """
    present = [one for one in samples.values() if one.state != "gone" and one.identity.pool == MAIN_POOL]
    matches: list[Match] = []
    unmapped: list[UnmappedEngine] = []
    taken: set[str] = set(samples)
    for reading in readings:
        for engine in reading.engines:
            pools = _pools_of(reading, engine, present)
            found = [
                Match(pool.id, reading, engine, rank)
                for pool in pools
                if (rank := engine.of_rank(pool.identity.data_parallel_rank)) is not None
            ]
            matches += found
            if not found:
                unmapped.append(_unmapped(reading, engine, taken))
    first: dict[str, Match] = {}
    for match in matches:
        first.setdefault(match.pool_id, match)  # of two addresses for one pool
    return tuple(first.values()), tuple(unmapped)


def _pools_of(reading: SourceReading, engine: EngineReading, present: Sequence[PoolSample]) -> Sequence[PoolSample]:
    source = reading.source
    if source.engine_id:
        return [one for one in present if one.identity.engine_id == source.engine_id]
    if not source.is_local:
        return ()
    pools = [one for one in present if one.identity.kind == engine.kind and one.identity.model == engine.model]
    return pools if len({one.identity.engine_id for one in pools}) == 1 else ()


def _unmapped(reading: SourceReading, engine: EngineReading, taken: set[str]) -> UnmappedEngine:
    name = reading.source.engine_id or reading.source.place
    if len(reading.engines) > 1:
        # A model's name may hold what an address must not.
        name = f"{name}.{printable(engine.model).rsplit('/', 1)[-1] or engine.kind}"
    id, number = name, 1
    while id in taken:
        number += 1
        id = f"{name}-{number}"
    taken.add(id)
    return UnmappedEngine(id, name, reading, engine)
