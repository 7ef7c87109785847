"""Reads the fleet once for all who look at it: every agent beside the others, and Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from agent.wire import EngineList
from agent.wire.alerts import AlertRecord
from dashboard.fleet import LINE_POINTS, LINE_SECONDS, Fleet, PoolCard, alert_words, card_of, unmapped_card, worst_of
from dashboard.prometheus import PrometheusUnavailable

FRESH_SECONDS = 2.5  # a reading is shared by all that ask within this time
RETRY_SECONDS = 10.0  # an agent that did not answer is left alone for so long: waiting for it would hold up the others
LINES_AT_ONCE = 12  # lines that one reading fetches: a fleet's lines fill within some readings
LINE_FRESH_SECONDS = 30.0
WORKERS = 16

Line = tuple[float | None, ...]


class Cards(Protocol):
    """Something that knows pools, as Prometheus does."""

    def cards(self) -> list[PoolCard]: ...


class FleetReader:
    """For any number of threads; one at a time reads, and the others get what it read."""

    def __init__(
        self,
        agents: Sequence[tuple[str, AgentClient]],
        prometheus: Cards | None = None,
        *,
        reason: Callable[[Exception], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`agents` are their names and clients, which are this reader's alone; `reason` makes an error fit to show."""
        self._agents, self._prometheus, self._reason, self._clock = tuple(agents), prometheus, reason, clock
        self._lock = threading.Lock()
        self._read: tuple[float, Fleet] | None = None
        self._silent: dict[int, tuple[float, str]] = {}  # agents that did not answer: since when, and why
        self._lines: dict[tuple[int, str], tuple[float, Line]] = {}
        self._workers = ThreadPoolExecutor(min(WORKERS, len(self._agents) + 1), thread_name_prefix="fleet")

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        for _, client in self._agents:
            client.close()

    def read(self) -> Fleet:
        """At most FRESH_SECONDS old."""
        with self._lock:
            if self._read is not None and self._clock() - self._read[0] <= FRESH_SECONDS:
                return self._read[1]
            fleet = self._read_now()
            self._read = (self._clock(), fleet)
            return fleet

    def _read_now(self) -> Fleet:
        """Cards of agents that answered. A pool that Prometheus knows too is shown once, by its agent."""
        troubles: list[str] = []
        asked = self._workers.submit(self._prometheus.cards) if self._prometheus is not None else None
        answers = list(self._workers.map(self._ask, range(len(self._agents))))
        cards = [card for answer in answers if not isinstance(answer, str) for card in answer]
        troubles += [answer for answer in answers if isinstance(answer, str)]
        cards = self._with_lines(cards)
        if asked is not None:
            known = {card.id for card in cards}
            try:
                cards += [card for card in asked.result() if card.id not in known]
            except PrometheusUnavailable as error:
                troubles.append(f"Prometheus: {self._reason(error)}")
        return Fleet.of(cards, troubles, len(self._agents) + (self._prometheus is not None))

    def _ask(self, index: int) -> list[PoolCard] | str:
        """Cards of one agent, or why there are none."""
        name, client = self._agents[index]
        since, why = self._silent.get(index, (0.0, ""))
        if why and self._clock() - since < RETRY_SECONDS:
            return why
        try:
            listing = client.engines()
        except (AgentUnavailable, AgentRefused) as error:
            why = f"{name}: {self._reason(error)}" if name else self._reason(error)  # the only one has no name
            self._silent[index] = (self._clock(), why)
            return why
        self._silent.pop(index, None)
        return _cards(listing, index + 1, name, _alerts(client))

    def _with_lines(self, cards: Sequence[PoolCard]) -> list[PoolCard]:
        """F over time of each pool. Those that are missing or old are read, the neediest first and not all at once."""
        now = self._clock()
        here = {(card.agent or 0, card.id) for card in cards}
        self._lines = {key: line for key, line in self._lines.items() if key in here}
        old = [
            card
            for card in sorted(cards, key=lambda card: card.order)
            if card.blocks and now - self._lines.get((card.agent or 0, card.id), (-1e9, ()))[0] > LINE_FRESH_SECONDS
        ]
        by_agent: dict[int, list[str]] = {}
        for card in old[:LINES_AT_ONCE]:
            by_agent.setdefault(card.agent or 0, []).append(card.id)
        for agent, lines in self._workers.map(self._fetch_lines, by_agent.items()):
            self._lines |= {(agent, id): (now, line) for id, line in lines.items()}
        return [replace(card, line=self._lines.get((card.agent or 0, card.id), (0.0, ()))[1]) for card in cards]

    def _fetch_lines(self, wanted: tuple[int, list[str]]) -> tuple[int, dict[str, Line]]:
        agent, ids = wanted
        found: dict[str, Line] = {}
        for id in ids:
            try:
                history = self._agents[agent - 1][1].history(id, "fragmentation", LINE_SECONDS, points=LINE_POINTS)
            except (AgentUnavailable, AgentRefused):
                continue  # it is asked for again; the card stands without
            by_time = {round(point.time_unix / history.step_seconds): point.mean for point in history.points}
            last = max(by_time, default=0)
            found[id] = tuple(by_time.get(at) for at in range(last - LINE_POINTS + 1, last + 1)) if by_time else ()
        return agent, found


def _alerts(client: AgentClient) -> tuple[float, list[AlertRecord]]:
    try:
        found = client.alerts()
    except (AgentUnavailable, AgentRefused):
        return 0.0, []  # an agent may have no alerts; the card says what it knows without
    return found.now_unix, found.open


def _cards(listing: EngineList, agent: int, name: str, alerts: tuple[float, list[AlertRecord]]) -> list[PoolCard]:
    now_unix, firing = alerts
    threshold = listing.agent.threshold
    mapped: list[PoolCard] = []
    for each in listing.engines:
        worst = worst_of(firing, each)
        severity = "" if worst is None else worst.severity
        mapped.append(card_of(each, agent, name, threshold, alert_words(firing, each, now_unix), severity))
    return mapped + [unmapped_card(each, agent, name) for each in listing.unmapped]
