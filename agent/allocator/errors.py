"""What can be wrong with a snapshot."""

from __future__ import annotations

from engine_shim.errors import KvatlasError


class SnapshotError(KvatlasError):
    """The file is no snapshot, or is not read for safety's sake; the text says why, where, and what to do."""
