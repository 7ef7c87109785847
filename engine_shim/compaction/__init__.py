"""Moving live blocks: the fewest moves that reach a target, made in chunks at step boundaries, and told in a report."""

from engine_shim.compaction.planning import plan_moves

__all__ = ["plan_moves"]
