"""`kvatlas advise ENGINE`: what to change in an engine that runs, from its map alone or with its model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.capacity.live import live_pool, to_json
from agent.capacity.request import load_model
from agent.commands.compact import find_map
from agent.fragmentation import analyze
from agent.sampling.model import measure_waste
from engine_shim.allocation_map.reader import MapReader


def advise_engine(engine: str, config: Path | None) -> dict[str, Any]:
    """The advice as plain JSON values.

    Raises SettingsError for an engine or a config that is none, MapUnavailable and MapCorrupt as reading a map does,
    and LayoutUnknown for a model whose layout is not known.
    """
    loaded = None if config is None else load_model(str(config))[0]
    reader = MapReader(find_map(engine).path)
    try:
        snapshot = reader.read(1.0)
        unknown = "" if reader.writer_alive() else "the engine has ended, and this is the map that it left"
    finally:
        reader.close()
    waste = measure_waste(snapshot)
    pool = live_pool(snapshot, analyze(snapshot.states), waste.tokens if waste else None, unknown)
    return to_json(pool, loaded)
