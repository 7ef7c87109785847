"""Runs inside an engine's process: the paged pool, its allocation map, and what watches and moves blocks.

Importing this package imports NumPy and nothing heavier; an engine's own modules are imported only by its adapter.
"""

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.layout import BlockState
from engine_shim.observer import NO_OBSERVER, PoolObserver
from engine_shim.pool.block_pool import BlockPool

__all__ = ["NO_OBSERVER", "BlockPool", "BlockState", "MapObserver", "MapReader", "MapSpec", "MapWriter", "PoolObserver"]
__version__ = "0.1.0"
