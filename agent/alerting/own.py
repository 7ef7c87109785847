"""Readings of the agent itself: whether it samples in time, and whether what it has to say comes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.sampling.model import AgentView
from alerts.readings import Reading

SOURCE = "agent"
MAX_NAMED = 3  # unreadable maps in a text
MAX_NAMED_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one receiver of messages stands."""

    sink: str
    failing_seconds: float  # for how long nothing has come through; 0 while all does
    sent: int  # messages, ever
    lost: int  # messages given up for good, ever


@dataclass(slots=True)
class OwnFeed:
    """One thread's."""

    name: str  # of this agent, for people
    interval_seconds: float
    deliveries: Callable[[], Sequence[Delivery]]
    link: str | None = None
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # sent and lost, by receiver
    _refuses: dict[str, bool] = field(default_factory=dict)  # by receiver that was sent anything, whether it refused
    _refused_before: bool = False  # since this agent began
    _before: tuple[int, float] | None = None  # generation and time of the view before
    _gap: float = 0.0

    def reading(self, view: AgentView, now: float) -> Reading:
        """`view` is the latest; where the sampler hangs, it is an old one."""
        deliveries = self.deliveries()
        numbers: dict[str, float | None] = {
            "agent_sample_late_seconds": self._late(view, now),
            "agent_unreadable_maps": float(len(view.unreadable)),
            "agent_notifications_refused": self._refused(deliveries),
            "agent_notifications_failing_seconds": self._failing(deliveries),
        }
        return Reading(
            source=SOURCE,
            labels={"agent": self.name},
            numbers=numbers,
            texts={
                "sink": self._worst(deliveries),
                "unreadable": "; ".join(line[:MAX_NAMED_LENGTH] for line in view.unreadable[:MAX_NAMED]) or "none",
            },
            link=self.link,
        )

    def late_seconds(self, view: AgentView, now: float) -> float:
        """By how much the next sample is late by now; what this one took is not held against it, since a slow agent is
        not a blind one."""
        if view.taken_monotonic is None:
            return 0.0
        return max(0.0, now - view.taken_monotonic - view.sample_seconds - self.interval_seconds)

    def _late(self, view: AgentView, now: float) -> float:
        taken = view.taken_monotonic
        if taken is None:
            return 0.0
        if self._before is None or self._before[0] != view.generation:
            if self._before is not None:
                skipped = max(1, view.generation - self._before[0])  # views that came while this thread was at another
                self._gap = (taken - self._before[1]) / skipped - self.interval_seconds
            self._before = (view.generation, taken)
        return max(0.0, self._gap, now - taken - self.interval_seconds)

    def _refused(self, deliveries: Sequence[Delivery]) -> float | None:
        """Whether the last message to some receiver was given up; None until each was sent one, since nobody knows how
        it stands with those, or until one refused: then it is about that one, whatever others were never sent."""
        for one in deliveries:
            sent, lost = self._counts.get(one.sink, (0, 0))
            if one.sent > sent:
                self._refuses[one.sink] = False
            elif one.lost > lost:
                self._refuses[one.sink] = self._refused_before = True
            self._counts[one.sink] = (one.sent, one.lost)
        if any(self._refuses.values()):
            return 1.0
        return 0.0 if self._refused_before or len(self._refuses) == len(deliveries) else None

    def _failing(self, deliveries: Sequence[Delivery]) -> float:
        """How long the worst receiver fails; one that refuses for good is told as such, and not as late."""
        return max((one.failing_seconds for one in deliveries if not self._refuses.get(one.sink)), default=0.0)

    def _worst(self, deliveries: Sequence[Delivery]) -> str:
        """The receiver that gives most trouble."""
        worst = max(deliveries, key=lambda one: (self._refuses.get(one.sink, False), one.failing_seconds), default=None)
        return worst.sink if worst is not None else "none"
