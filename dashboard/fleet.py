"""The pools of a fleet, as they are compared side by side: one card each, the one most in need first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from agent.wire import EngineSummary, UnmappedEngine
from agent.wire.alerts import AlertRecord
from dashboard.choices import as_choice
from dashboard.conditions import MEANINGFUL_STATES
from dashboard.palette import STATE_ORDER, Theme
from dashboard.wording import NOT_KNOWN, count, duration, escape, rate, share, shortened

LINE_SECONDS = 900.0
LINE_POINTS = 45
NAME_CHARACTERS = 34
NO_AGENT = "Known from Prometheus alone. Start the dashboard with the address of its agent too, to see its blocks."

A_REPLAY = "A recording that is played back: no engine runs behind it."


@dataclass(frozen=True, slots=True)
class PoolCard:
    """One pool. `line` is F over the last LINE_SECONDS in equal steps, oldest first; None where it is not known."""

    id: str
    agent: int | None  # number of the agent that shows its blocks, from 1; None: known from Prometheus alone
    where: str  # which agent, or which scraped address
    kind: str
    model: str
    state: str
    reason: str
    blocks: Mapping[str, int]  # by state; empty without a map
    rate: float | None
    threshold: float
    running: int
    waiting: int
    blocked: bool  # new sequences wait for blocks
    degraded: bool
    exhaustion_seconds: float | None
    age_seconds: float | None
    alert: str = ""  # the worst that fires, with since when
    severity: str = ""  # of that alert
    replay: bool = False  # of a recording: no engine runs
    line: tuple[float | None, ...] = ()

    @property
    def order(self) -> tuple[bool, bool, bool, bool, bool, float, str]:
        """Ascending, the pool most in need comes first: as `conditions.most_in_need`, and alerts before calm."""
        return (
            self.state not in MEANINGFUL_STATES,
            self.state == "live",
            not self.blocked,
            not self.degraded,
            not self.alert,
            -(self.rate or 0.0),
            self.id,
        )

    @property
    def in_need(self) -> bool:
        """Whether an operator should look at it: more than fragmented, which by itself is no fault."""
        return self._held_up or bool(self.alert)

    @property
    def tone(self) -> str:
        """How its concern is coloured: red where it is held up, else as grave as its alert, as the banner is."""
        return "alarm" if self._held_up or self.severity == "critical" else self.severity if self.alert else ""

    @property
    def _held_up(self) -> bool:
        return self.blocked or self.degraded or self.state not in ("live", "sleeping", "no block map")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that was read at one time. `troubles` say which sources did not answer."""

    cards: tuple[PoolCard, ...] = ()
    troubles: tuple[str, ...] = ()
    sources: int = 1

    @classmethod
    def of(cls, cards: Iterable[PoolCard], troubles: Sequence[str], sources: int) -> Fleet:
        return cls(tuple(sorted(cards, key=lambda card: card.order)), tuple(troubles), sources)


def card_of(
    engine: EngineSummary, agent: int, where: str, threshold: float, alert: str = "", severity: str = ""
) -> PoolCard:
    """A pool as its agent tells of it."""
    return PoolCard(
        id=engine.id,
        agent=agent,
        where=where,
        kind=engine.kind,
        model=engine.model,
        state=engine.state,
        reason=engine.reason,
        blocks=engine.blocks.model_dump(),
        rate=engine.fragmentation.rate,
        threshold=threshold,
        running=engine.running_requests,
        waiting=engine.waiting_requests,
        blocked=engine.forecast.admission_blocked,
        degraded=engine.degraded,
        exhaustion_seconds=engine.forecast.exhaustion_seconds,
        age_seconds=engine.snapshot_age_seconds,
        alert=alert,
        severity=severity,
        replay=engine.replay,
    )


def unmapped_card(engine: UnmappedEngine, agent: int, where: str) -> PoolCard:
    """An engine that is known from its own metrics alone."""
    values = engine.metrics.values
    return PoolCard(
        id=engine.id,
        agent=agent,
        where=where,
        kind=engine.kind,
        model=engine.model,
        state="no block map" if engine.state == "live" else engine.state,
        reason=engine.reason,
        blocks={},
        rate=None,
        threshold=1.0,
        running=round(values.get("running_requests", 0.0)),
        waiting=round(values.get("waiting_requests", 0.0)),
        blocked=False,
        degraded=False,
        exhaustion_seconds=None,
        age_seconds=engine.metrics.age_seconds,
    )


def alert_words(alerts: Sequence[AlertRecord], engine: EngineSummary, now_unix: float) -> str:
    """The worst alert that fires for a pool, and for how long; "" where none does."""
    one = worst_of(alerts, engine)
    return "" if one is None else f"{one.summary}, for {duration(max(0.0, now_unix - one.started_unix))}"


def worst_of(alerts: Sequence[AlertRecord], engine: EngineSummary) -> AlertRecord | None:
    """The worst alert that fires for a pool. The list has the worst first."""
    own = {"engine_id": engine.engine_id, "pool": engine.pool, "rank": engine.rank}
    for one in alerts:
        if one.state == "firing" and all(one.labels.get(name) == value for name, value in own.items()):
            return one
    return None


def fleet_html(cards: Sequence[PoolCard], theme: Theme) -> str:
    """All cards; those that an agent shows are links to their pool."""
    return f'<div class="kv-cards">{"".join(_card_html(card, theme) for card in cards)}</div>'


def choice_of(card: PoolCard) -> str:
    """What a card's link stands for; `chosen_of` reads it."""
    return f"{card.agent} {card.id}"


def chosen_of(choice: str) -> tuple[int, str]:
    """Number of the agent and id of the pool."""
    agent, _, id = choice.partition(" ")
    return int(agent), id


def _card_html(card: PoolCard, theme: Theme) -> str:
    tone = "bad" if card.rate is not None and card.rate > card.threshold else ""
    state = card.state.replace(" ", "-")
    badge = f'<span class="kv-state replay" title="{A_REPLAY}">replay</span>' if card.replay else ""
    inner = (
        f'<span class="kv-card-head"><b title="{escape(card.id)}">{escape(shortened(card.id, NAME_CHARACTERS))}</b>'
        f'{badge}<span class="kv-state {escape(state)}">{escape(card.state)}</span></span>'
        f'<span class="kv-detail-line">{escape(_facts(card))}</span>'
        f'<span class="kv-card-body"><span class="kv-value {tone}">F {rate(card.rate)}</span>'
        f"{_line_svg(card, theme)}</span>"
        f"{_bar_html(card, theme)}"
        f'<span class="kv-detail-line">{escape(_amounts(card))}</span>'
        f'<span class="kv-concern {escape(card.tone)}">{escape(concern(card))}</span>'
    )
    if card.agent is None:
        return f'<div class="kv-card" title="{NO_AGENT}">{inner}</div>'
    address = {"view": "pool", "pool": card.id} | ({"agent": str(card.agent)} if card.agent > 1 else {})
    link = escape(urlencode(address))
    return f'<a class="kv-card" href="?{link}" data-choice="{as_choice(choice_of(card))}">{inner}</a>'


def concern(card: PoolCard) -> str:
    """What is the matter with a pool, in one line: what holds it up first, then alerts, then what is merely so."""
    if card.state not in ("live", "no block map"):
        return f"{card.state}: {card.reason}" if card.reason else card.state
    parts = [
        card.alert,
        "new sequences wait for blocks" if card.blocked else "",
        "the shim has stopped following it" if card.degraded else "",
        f"no block left in {duration(card.exhaustion_seconds)}" if card.exhaustion_seconds is not None else "",
    ]
    told = " · ".join(part for part in parts if part)
    above = card.rate is not None and card.rate > card.threshold
    return told or (f"F above {card.threshold:.2f}" if above else "calm")


def _facts(card: PoolCard) -> str:
    return " · ".join(part for part in (card.kind, card.model, card.where) if part)


def _amounts(card: PoolCard) -> str:
    total = sum(card.blocks.values())
    held = total - card.blocks.get("free", 0) - card.blocks.get("cached", 0)
    waiting = f", {count(card.waiting)} waiting" if card.waiting else ""
    parts = (
        f"{share(held, total)} of {count(total)} held" if total else "",
        f"{count(card.running)} running{waiting}",
        f"{duration(card.age_seconds)} old" if card.age_seconds is not None else "",
    )
    return " · ".join(part for part in parts if part)


def _bar_html(card: PoolCard, theme: Theme) -> str:
    total = sum(card.blocks.values())
    parts = "".join(
        f'<i style="flex:{card.blocks[name]};background:{theme.states[name]}"></i>'
        for name in STATE_ORDER
        if card.blocks.get(name)
    )
    words = ", ".join(f"{name} {count(card.blocks[name])}" for name in STATE_ORDER if card.blocks.get(name))
    return f'<span class="kv-bar" title="{escape(words)}">{parts}</span>' if total else '<span class="kv-bar"></span>'


def _line_svg(card: PoolCard, theme: Theme) -> str:
    """F over time as a small picture, 0 at the bottom and 1 at the top; a gap where it was not known."""
    strokes: list[str] = []
    open_stroke: list[str] = []
    for index, value in enumerate((*card.line, None)):
        if value is not None:
            open_stroke.append(f"{index * 100 / max(1, len(card.line) - 1):.1f},{29 - 28 * value:.1f}")
        elif open_stroke:
            strokes.append(" ".join(open_stroke if len(open_stroke) > 1 else open_stroke * 2))
            open_stroke = []
    lines = "".join(f'<polyline points="{points}"/>' for points in strokes)
    known = [value for value in card.line if value is not None]
    label = "F over 15 minutes: " + (f"{rate(min(known))} to {rate(max(known))}" if known else NOT_KNOWN)
    limit = 29 - 28 * card.threshold
    return (
        f'<svg class="kv-spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<path d="M0 {limit:.1f}H100" stroke="{theme.threshold}" stroke-dasharray="2 2"/>'
        f'<g fill="none" stroke="{theme.line}">{lines}</g></svg>'
    )


def card_rows(cards: Sequence[PoolCard]) -> list[dict[str, object]]:
    """The cards as rows for files."""
    return [
        {
            "pool": card.id,
            "where": card.where,
            "kind": card.kind,
            "model": card.model,
            "state": card.state,
            "replay": card.replay,
            "concern": concern(card),
            "fragmentation_rate": card.rate,
            **{f"{name}_blocks": card.blocks.get(name) for name in STATE_ORDER},
            "running_requests": card.running,
            "waiting_requests": card.waiting,
            "exhaustion_seconds": card.exhaustion_seconds,
            "snapshot_age_seconds": card.age_seconds,
        }
        for card in cards
    ]
