"""A history that outlives the agent: what is recent from memory, what is older from the disk, in one answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from agent.history.entries import Sample
from agent.history.memory import MemoryHistory
from agent.history.model import Bucket, Grid
from agent.history.reading import HistoryReader, Rows
from agent.history.tiers import SAMPLE_TIERS, Tier, choose_tier
from agent.history.writer import HistoryWriter
from agent.sampling.model import Clock
from alerts.database import DatabaseUnusable, Fault

Floats = NDArray[np.float64]

FINE_SECONDS = SAMPLE_TIERS[0].keep_seconds - 600.0  # within which the finest tier is there for sure


class LastingHistory:
    """A History over a memory and a file. Where the file cannot be used, it is the memory alone."""

    def __init__(
        self, memory: MemoryHistory, writer: HistoryWriter, reader: HistoryReader, clock: Clock | None = None
    ) -> None:
        self._memory, self._writer, self._reader = memory, writer, reader
        self._clock = clock or Clock()

    def append(self, pool: str, time_unix: float, values: Mapping[str, float | None]) -> None:
        self._memory.append(pool, time_unix, values)
        self._writer.put(Sample(pool, time_unix, dict(values)))

    def query(self, pool: str, metric: str, start_unix: float, end_unix: float, step_seconds: float) -> list[Bucket]:
        grid = Grid.covering(metric, start_unix, end_unix, step_seconds)
        begin, end = grid.first * grid.step, (grid.first + grid.count) * grid.step
        try:
            times, values = self._memory.samples(pool, metric)
        except KeyError:
            times, values = np.empty(0), np.empty(0)
        rising = times.size == 0 or bool(np.all(np.diff(times) >= 0))
        since = float(times[0]) if times.size and rising else math.inf
        kept: list[Rows] = []
        known = bool(times.size)
        if begin < since:
            older, since = self._older(pool, metric, begin, min(end, since), end, grid.step)
            kept, known = older, known or bool(older)
        if not known:
            raise KeyError(pool)
        near = (times >= max(begin, since)) & (times < end) & ~np.isnan(values)
        times, values = times[near], values[near]
        ones = np.ones(times.size)
        columns: list[tuple[Floats, ...]] = [(times, ones, values, values, values)]
        columns += [
            (rows.starts, *(rows.records[name].astype(np.float64) for name in ("count", "minimum", "mean", "maximum")))
            for rows in kept
        ]
        return grid.bucket(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))

    def recent(self, pool: str, metric: str, seconds: float) -> tuple[Floats, Floats]:
        return self._memory.recent(pool, metric, seconds)

    def drop(self, pool: str) -> None:
        self._memory.drop(pool)

    def _older(
        self, pool: str, metric: str, begin: float, until: float, end: float, step: float
    ) -> tuple[list[Rows], float]:
        """What the file has of `begin` to `until`, and the time from which on memory is to answer.

        Each stretch comes from the tier that suits the step, or from a coarser one where that keeps nothing so old.
        `until` is put off to the next whole bucket of the last tier, whose samples are all in it: none counts twice.
        """
        now = self._clock.wall()
        found: list[Rows] = []
        known = False
        try:
            for tier, to in _stretches(step, min(until, end), now):
                if begin >= to:
                    continue
                rows = self._reader.rows(pool, metric, tier, begin, to)
                if rows is None:
                    break
                known = True
                found.append(rows)
                begin = to
        except DatabaseUnusable as error:
            if error.fault is Fault.CORRUPT:
                self._writer.suspect()
            return [], -math.inf  # memory alone, all of it
        return found, begin if known else -math.inf


def _stretches(step: float, until: float, now: float) -> Iterator[tuple[Tier, float]]:
    """Tiers, the coarsest first, with the time up to which each is to answer: a whole bucket of it."""
    suits = choose_tier(SAMPLE_TIERS, step)
    for index in range(len(SAMPLE_TIERS) - 1, suits - 1, -1):
        tier = SAMPLE_TIERS[index]
        # A finer tier takes over within what it keeps for sure.
        to = until if index == suits else min(until, now - SAMPLE_TIERS[index - 1].keep_seconds)
        to = math.ceil(to / tier.step_seconds) * tier.step_seconds
        if to > now - FINE_SECONDS:
            # The end of that bucket is in memory, and need not be on the disk: the finest tier goes on up to there.
            to -= tier.step_seconds
        yield tier, to
    yield SAMPLE_TIERS[0], math.ceil(until / SAMPLE_TIERS[0].step_seconds) * SAMPLE_TIERS[0].step_seconds
