"""Asks every address on a clock and keeps what is known now; one address's fault never costs another its turn.

Nothing here waits on the sampler's thread: it hands over points of the maps and goes on. A thread of its own looks what
is due, and each question is asked on another one, within its own time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.engine_metrics.comparing import MapPoint, Memory, compare, window_of
from agent.engine_metrics.exposition import NotMetrics
from agent.engine_metrics.fetch import Fetch, NoAnswer, fetch
from agent.engine_metrics.joining import Match, join
from agent.engine_metrics.model import (
    MISSED,
    Answer,
    Comparison,
    EngineMetricsView,
    EngineReading,
    JoinedReading,
    SourceReading,
    frozen_after,
)
from agent.engine_metrics.sources import MetricsSource
from agent.engine_metrics.writers import WriterWatch
from agent.log import EventLog
from agent.sampling.crew import Crew
from agent.sampling.model import AgentView, Clock, PoolSample

POINTS_SECONDS = 60.0  # of the maps, that are kept to compare with
MOST_POINTS = 4096  # of a pool, should samples come faster than ever
LEAST_STEP_SECONDS = 1.0  # that a clock was set by; less is the drift of two clocks
MOST_AT_ONCE = 16
PATIENT_FAILURES = 3  # an engine that starts has its map before it answers
MOST_BACKOFF = 5  # doublings


@dataclass(frozen=True, slots=True)
class ScraperSettings:
    """How often; times in seconds."""

    interval_seconds: float = 5.0  # between two questions to one address
    most_backoff_seconds: float = 30.0  # where it gives no answer
    keep_seconds: float = 300.0  # that the last good answer is shown, or MISSED intervals where those are longer
    map_interval_seconds: float = 1.0  # between samples of the maps


@dataclass(slots=True)
class _Address:
    """One address. Its fields are the scraper's thread's, but for `outcome`, which the asking thread leaves."""

    reading: SourceReading
    due: float = 0.0
    asking: bool = False
    failures_in_a_row: int = 0
    watch: WriterWatch = field(default_factory=WriterWatch)
    outcome: tuple[float, float, Answer | str] | None = None  # began, ended, Unix seconds; a text: why not


@dataclass(slots=True)
class _Pair:
    """One pool beside its metrics."""

    memory: Memory = field(default_factory=Memory)
    comparison: Comparison | None = None
    judged: float | None = None  # the reading that was judged last, by its time
    pending: tuple[float, float, Match] | None = None


class MetricsScraper:
    """`notice` after each sample of the maps, from the sampler's thread; `run` is one thread's, or `tick` is called
    instead. `view` is the latest result."""

    def __init__(
        self,
        sources: Sequence[MetricsSource],
        samples: Callable[[], AgentView],
        *,
        settings: ScraperSettings | None = None,
        ask: Fetch = fetch,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.settings = settings or ScraperSettings()
        self._samples, self._ask = samples, ask
        self._clock = clock or Clock()
        self._log = log or EventLog(logging.getLogger("kvatlas.engine_metrics"))
        self._addresses = [_Address(SourceReading(source, up=False, fault="")) for source in sources]
        self._crew = Crew(min(MOST_AT_ONCE, max(1, len(sources))))
        self._pairs: dict[str, _Pair] = {}
        self._points: dict[str, deque[MapPoint]] = {}  # the sampler's thread's; others copy a deque
        self._view = EngineMetricsView(tuple(one.reading for one in self._addresses))
        self._live: frozenset[str] = frozenset()
        self._looked: tuple[float, float] | None = None  # the last tick, by both clocks
        self._news = threading.Event()
        self._stopping = False

    @property
    def view(self) -> EngineMetricsView:
        return self._view

    def notice(self) -> None:
        """There is a new view of the maps: keep what it says of each pool, to compare with. Returns at once."""
        if not self._addresses:
            return
        view = self._samples()
        for id in [id for id in self._points if id not in view.samples]:
            del self._points[id]
        for id, sample in view.samples.items():
            points = self._points.setdefault(id, deque(maxlen=MOST_POINTS))
            if points and points[-1].time_unix > view.taken_unix:
                points.clear()  # the clock was set back: they lie in the future, and would stay until it is over
            if sample.state == "live":
                points.append(MapPoint.of(sample, view.taken_unix))
            while points and points[0].time_unix < view.taken_unix - POINTS_SECONDS:
                points.popleft()
        self._news.set()

    def run(self) -> None:
        """Tick whenever there is something new, and twice an interval, until `stop`; without an address, do nothing."""
        while self._addresses and not self._stopping:
            self._news.wait(min(1.0, self.settings.interval_seconds / 2))
            self._news.clear()
            try:
                self.tick()
                self._log.on_change("engine metrics", "tick", "ok", quiet_first="ok")
            except Exception as error:  # noqa: BLE001 - the thread must outlive any fault of ours
                self._log.on_change("engine metrics", "tick", f"{type(error).__name__}: {error}", level=logging.ERROR)

    def stop(self) -> None:
        """End `run` soon; what is being asked for meanwhile is given up."""
        self._stopping = True
        self._news.set()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no address is being asked; False where that takes longer."""
        return self._crew.wait_idle(timeout_seconds)

    def tick(self) -> EngineMetricsView:
        """Take in what came, ask what is due, compare, and publish the new view."""
        now, now_unix = self._clock.monotonic(), self._clock.wall()
        self._follow_clock(now, now_unix)
        samples = self._samples().samples
        self._hasten(samples, now)
        for address in self._addresses:
            if address.outcome is not None:
                self._take(address, now, now_unix)
            if not address.asking and now >= address.due:
                address.asking = self._crew.start(self._question(address), "engine-metrics")
        readings = tuple(self._aged(one.reading, now_unix) for one in self._addresses)
        matches, unmapped = join(readings, samples)
        self._follow(matches)
        joined = {
            match.pool_id: JoinedReading(
                samples[match.pool_id].identity.engine_id,
                match.reading,
                match.engine,
                match.rank,
                self._judge(match, samples[match.pool_id], now_unix),
            )
            for match in matches
        }
        self._view = EngineMetricsView(readings, MappingProxyType(joined), unmapped, self.settings.interval_seconds)
        return self._view

    # Asking

    def _question(self, address: _Address) -> Callable[[], None]:
        def ask() -> None:
            began, outcome = self._clock.wall(), ""
            answer: Answer | None = None
            try:
                answer = self._ask(address.reading.source)
            except (NoAnswer, NotMetrics) as error:
                outcome = str(error)
            except Exception as error:  # noqa: BLE001 - on a thread of its own nobody else would hear of it
                outcome = type(error).__name__
            address.outcome = (began, self._clock.wall(), answer if answer is not None else outcome)
            self._news.set()

        return ask

    def _take(self, address: _Address, now: float, now_unix: float) -> None:
        if address.outcome is None:
            return
        (began, ended, outcome), address.outcome, address.asking = address.outcome, None, False
        if ended > now_unix:  # the clock was set back since
            began, ended = now_unix - max(0.0, ended - began), now_unix
        reading = replace(address.reading, attempts=address.reading.attempts + 1)
        if isinstance(outcome, str):
            address.failures_in_a_row += 1
            doublings = min(max(0, address.failures_in_a_row - PATIENT_FAILURES), MOST_BACKOFF)
            wait = self.settings.interval_seconds * 2.0**doublings
            address.due = now + max(self.settings.interval_seconds, min(self.settings.most_backoff_seconds, wait))
            address.reading = replace(reading, up=False, fault=outcome, failures=reading.failures + 1)
        else:
            address.failures_in_a_row, address.due = 0, now + self.settings.interval_seconds
            address.reading = replace(
                reading,
                up=True,
                fault="" if outcome.engines or reading.source.is_ollama else "no engine that is known is in the answer",
                began_unix=began,
                read_unix=ended,
                engines=outcome.engines,
                unchanged_since_unix=_unchanged_since(reading, outcome.engines, ended),
                several_writers=address.watch.several(outcome),
            )
        fault = address.reading.fault or ("several processes answer" if address.reading.several_writers else "ok")
        level = logging.INFO if fault == "ok" else logging.WARNING
        self._log.on_change("engine metrics", reading.source.name, fault, level=level, quiet_first="ok")

    def _hasten(self, samples: Mapping[str, PoolSample], now: float) -> None:
        """An engine has just shown its map: its metrics, asked for in vain until now, may be there too."""
        live = frozenset(id for id, sample in samples.items() if sample.state == "live")
        if live - self._live:
            for address in self._addresses:
                if not address.reading.up:
                    address.failures_in_a_row, address.due = 0, now
        self._live = live

    def _follow_clock(self, now: float, now_unix: float) -> None:
        """Where the clock was set, move what was read before along with it: else it were new, or old, by as much."""
        then, self._looked = self._looked, (now, now_unix)
        step = 0.0 if then is None else (now_unix - now) - (then[1] - then[0])
        if abs(step) < LEAST_STEP_SECONDS:
            return
        for address in self._addresses:
            address.reading = address.reading.moved(step)
        for pair in self._pairs.values():
            pair.pending, pair.judged = None, None if pair.judged is None else pair.judged + step

    def _aged(self, reading: SourceReading, now_unix: float) -> SourceReading:
        """Without what was last said too long ago."""
        age = reading.age_seconds(now_unix)
        keep = max(self.settings.keep_seconds, MISSED * self.settings.interval_seconds)
        return replace(reading, engines=()) if age is not None and age > keep else reading

    # Comparing

    def _follow(self, matches: Sequence[Match]) -> None:
        ids = {match.pool_id for match in matches}
        if ids != set(self._pairs):
            self._pairs = {id: self._pairs.get(id, _Pair()) for id in ids}

    def _judge(self, match: Match, sample: PoolSample, now_unix: float) -> Comparison:
        pair, reading = self._pairs[match.pool_id], match.reading
        if why := _why_not(match, sample):
            pair.pending, pair.memory, pair.comparison = None, Memory(), None
            return Comparison(match.pool_id, why_not=why)
        began, read = reading.began_unix, reading.read_unix
        if pair.pending is None and read != pair.judged and began is not None and read is not None:
            pair.pending = (began, read, match)
        if pair.pending is not None:
            began, read, of_then = pair.pending
            # A copy: the sampler's thread appends meanwhile.
            points = tuple(self._points.get(match.pool_id, deque()).copy())
            window = window_of(points, began, read, self.settings.map_interval_seconds)
            if window is not None:
                pair.pending, pair.judged = None, read
                if window and len({point.incarnation for point in window}) == 1:
                    pair.memory, made = compare(pair.memory, match.pool_id, of_then.rank.values, window, now_unix)
                    pair.comparison = made
                    level = logging.WARNING if made.disagrees else logging.INFO
                    self._log.on_change(
                        "map and engine metrics", match.pool_id, "disagree" if made.disagrees else "agree",
                        level=level, quiet_first="agree", reason=made.reason,
                    )  # fmt: skip
        made_so_far = pair.comparison or Comparison(match.pool_id)
        frozen = reading.frozen_seconds(match.engine, now_unix)
        if made_so_far.disagrees and frozen > frozen_after(self.settings.interval_seconds):
            return replace(
                made_so_far, reason=f"{made_so_far.reason}; nothing in its metrics has changed for {frozen:.0f} s"
            )
        return made_so_far


def _why_not(match: Match, sample: PoolSample) -> str:
    """Why this reading and this map cannot be held against each other now."""
    reading = match.reading
    if not reading.up:
        return f"its metrics cannot be read: {reading.fault}"
    if reading.several_writers:
        return f"several processes answer at {reading.source.name} in turn"
    if sample.state != "live":
        return f"the engine is {sample.state}"
    return ""


def _unchanged_since(
    before: SourceReading, engines: Sequence[EngineReading], now_unix: float
) -> Mapping[tuple[str, str], float]:
    old = {(one.kind, one.model): one for one in before.engines}
    since: dict[tuple[str, str], float] = {}
    for engine in engines:
        key = (engine.kind, engine.model)
        same = key in old and old[key].ranks == engine.ranks
        since[key] = before.unchanged_since_unix.get(key, now_unix) if same else now_unix
    return MappingProxyType(since)
