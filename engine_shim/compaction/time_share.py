"""Keeps work between an engine's steps to a share of the engine's time: pure, the clock's values come in."""

from __future__ import annotations

from engine_shim.errors import SettingsError

MAX_TIME_SHARE = 0.0125
"""Chunks of 2 ms are 4 % of the steps of a fast engine, and several times the step of a small model. At this share an
engine serves 98 % of what it would, with room for what chunks cost beside their own time: caches left cold."""

MOST_SECONDS = 0.25
"""That one piece of work counts for at most. What seems to have taken longer was not work: the process was stopped, or
its machine, in the midst of it. An hour of that must not forbid all work for three days."""


class TimeShare:
    """Owes nothing at first. Work of t seconds is paid off by t (1 - share) / share seconds of something else."""

    def __init__(self, share: float = MAX_TIME_SHARE, *, most_seconds: float = MOST_SECONDS) -> None:
        """SettingsError for a share that is not above 0 and up to 1; 1 is no bound."""
        if not 0 < share <= 1:
            raise SettingsError(f"a share of {share} of an engine's time: give more than 0, and 1 or less")
        self.share, self._most_seconds = share, most_seconds
        self._free_at = 0.0

    def owes(self, now: float) -> bool:
        """Is work that was done not paid off yet?"""
        return now < self._free_at

    def owed(self, now: float) -> float:
        """Seconds until it is."""
        return max(0.0, self._free_at - now)

    def spent(self, began: float, ended: float) -> None:
        """Work was done from `began` to `ended`."""
        seconds = min(ended - began, self._most_seconds)
        self._free_at = max(self._free_at, ended - seconds) + seconds / self.share
