"""What runs inside the engine: the allocation map, the block pool and its observer, and the reference engine."""
