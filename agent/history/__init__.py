"""The past of every pool: in memory, and on the disk where the agent was given a folder for it."""

from agent.history.memory import MemoryHistory
from agent.history.model import MAX_POINTS, METRICS, Bucket, History

__all__ = ["MAX_POINTS", "METRICS", "Bucket", "History", "MemoryHistory"]
